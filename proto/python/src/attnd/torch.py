"""Attention on CUDA tensors of torch, by two modes of attnd.connect(url, engine="cuda", mode=...):

"in-process"    over the arena of a daemon on the same GPU: nothing is copied, nothing waits
"service"       by the daemon, on the same GPU or on another: the current stream hands q, k and v
                over and waits there.  Tensors that attnd.torch.empty made, out=... among them, are
                used where they are, others are copied once, within the GPU

    import attnd, attnd.torch

    with attnd.connect(url, engine="cuda") as client:
        model = client.open_model("demo", layers=2, q_heads=8, kv_heads=2, head_dim=64, dtype="bf16")
        seq = model.sequence()
        with client.step([seq.append(20)]) as step:
            for layer in range(2):
                out = attnd.torch.attend(step, layer, q, k, v)   # on the current stream
            step.commit()

An attend is work on the current stream, the same one for all layers of a step; no thread waits for
it.  A whole forward pass can be a CUDA graph:

    step = client.step([seq])                       # a token for each sequence
    graph = attnd.torch.Graph(step, forward)        # forward(step) attends every layer
    for _ in range(100):
        graph.replay(step)                          # on the current stream
        step = client.step([seq], commit=step)

In service mode a commit waits until the daemon has attended all layers, and raises what went wrong
with any of them.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import sys
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import _lib
from ._client import Client
from ._errors import ErrorCode, invalid, make_error
from ._step import Step
from ._tensor import unsigned

_torch: Any = importlib.import_module("torch")
_DTYPES = {_torch.bfloat16: "bf16", _torch.float16: "f16", _torch.float32: "f32"}


_unfreed: List[Any] = []  # places that went while a stream was under capture


class _Memory:
    """A place of the region, as torch takes memory of others.  It goes with the last tensor, when
    the work that may still use it has ended."""

    def __init__(self, client: Client, nbytes: int) -> None:
        self._pointer = ctypes.POINTER(_lib.MemoryStruct)()
        client.call(_lib.lib.attnd_memory_create, ctypes.byref(self._pointer), nbytes)
        self._free = _lib.lib.attnd_memory_free  # which is there until the interpreter is gone
        self._pid = os.getpid()
        self.address = self._pointer.contents.data
        self.__cuda_array_interface__: Dict[str, Any] = {
            "version": 3, "shape": (nbytes,), "typestr": "|u1", "strides": None,
            "data": (self.address, False),
        }

    def __del__(self) -> None:
        if not self._pointer or self._pid != os.getpid() or sys.is_finalizing():
            return
        _unfreed.append((self._free, self._pointer))
        _free_all()


def _free_all() -> None:
    if _unfreed and not _torch.cuda.is_current_stream_capturing():
        _torch.cuda.synchronize()
        while _unfreed:
            free, pointer = _unfreed.pop()
            free(pointer)


def empty(client: Client, shape: Tuple[int, ...], dtype: Any) -> Any:
    """An uninitialised tensor in the region of a client in service mode, for q, k, v and outputs:
    attend copies nothing of it, nor of parts of it that begin at multiples of 256 bytes and whose
    strides are multiples of 8 elements, such as q, k and v in the product of a fused projection.
    Not when the daemon computes on another GPU."""
    if client.mode != "service":
        raise invalid("mode", "the client must be connected with mode=\"service\"")
    _free_all()
    nbytes = math.prod(shape) * dtype.itemsize
    memory = _Memory(client, max(nbytes, 1))
    raw = _torch.as_tensor(memory, device=f"cuda:{_torch.cuda.current_device()}")
    if raw.data_ptr() != memory.address:  # it is a copy of what another GPU has
        raise make_error(ErrorCode.ENOTSUP, "device", "the daemon computes on another GPU")
    return raw[:nbytes].view(dtype).view(shape)


def _take(field: str, t: Any, dtype: str, shape: Tuple[int, ...]) -> Tuple[int, int, int]:
    """_take returns address and strides of a CUDA tensor [rows, heads, dim]."""
    if not isinstance(t, _torch.Tensor) or not t.is_cuda:
        raise invalid(field, "it must be a CUDA tensor")
    if _DTYPES.get(t.dtype) != dtype:
        raise invalid(field, f"type {t.dtype}, it must be {dtype}")
    if tuple(t.shape) != shape:
        raise invalid(field, f"shape {list(t.shape)}, it must be {list(shape)}")
    strides = t.stride()
    if shape[2] > 1 and strides[2] != 1:
        raise invalid(field, f"stride {strides[2]} in the last dimension, it must be 1")
    return t.data_ptr(), unsigned(field, strides[0]), unsigned(field, strides[1])


def _check(step: Step) -> None:
    step._must_be_open()
    if step._client.engine != "cuda":
        raise invalid("engine", "the client must be connected with engine=\"cuda\"")


def attend(
    step: Step,
    layer: int,
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    out: Optional[Any] = None,
    lse: Optional[Any] = None,
    partial: bool = False,
) -> Any:
    """Attends one layer on the current stream, as Step.attend does: q, k and v are CUDA tensors, in
    process of the daemon's GPU, any strides with the last dimension contiguous and 16-byte aligned
    rows.
    Returns out [rows, q_heads, v_head_dim], a new tensor or the contiguous one given.  lse: a
    contiguous float32 tensor [q_heads, rows] to be written."""
    _check(step)
    model = step.model
    args = _lib.AttendArgs(step=step.id, layer=unsigned("layer", layer), model=model.id,
                           rows=step.rows, new_rows=step.new_rows, partial=partial)
    args.q, args.q_stride_token, args.q_stride_head = _take(
        "q", q, model.dtype, (step.rows, model.q_heads, model.head_dim))
    if k is not None:
        args.k, args.k_stride_token, args.k_stride_head = _take(
            "k", k, model.dtype, (step.new_rows, model.kv_heads, model.head_dim))
    if v is not None:
        args.v, args.v_stride_token, args.v_stride_head = _take(
            "v", v, model.dtype, (step.new_rows, model.kv_heads, model.v_head_dim))
    shape = (step.rows, model.q_heads, model.v_head_dim)
    if out is None:
        out = _torch.empty(shape, dtype=q.dtype, device=q.device)
    args.out = _take("out", out, model.dtype, shape)[0]
    if not out.is_contiguous():
        raise invalid("out", "an output must be contiguous")
    if lse is not None:
        if (not lse.is_cuda or lse.dtype != _torch.float32 or not lse.is_contiguous()
                or tuple(lse.shape) != (model.q_heads, step.rows)):
            raise invalid("lse", "it must be a CUDA tensor, float32, contiguous, [q_heads, rows]")
        args.lse = lse.data_ptr()
    args.stream = _torch.cuda.current_stream(q.device).cuda_stream
    step._client.call_in(model.epoch, _lib.lib.attnd_attend, args, None)
    return out


class Graph:
    """A CUDA graph of what forward(step) does on the current stream, attends of all layers included.
    forward runs twice: at once, so that what it needs is there, and while it is captured.  What it
    returned the second time is `result`; replays write to the same tensors."""

    def __init__(self, step: Step, forward: Callable[[Step], Any]) -> None:
        _check(step)
        self._client, self._captured = step._client, step.id
        forward(step)
        _torch.cuda.current_stream().synchronize()
        self._graph = _torch.cuda.CUDAGraph()
        with _torch.cuda.graph(self._graph):
            self.result = forward(step)

    def replay(self, step: Step) -> None:
        """Runs the graph for a step with as many sequences and rows, on the current stream."""
        _check(step)
        stream = _torch.cuda.current_stream().cuda_stream
        self._client.call_in(step.model.epoch, _lib.lib.attnd_step_replay, self._captured, step.id,
                             stream)
        self._graph.replay()
