"""Attention on CUDA tensors of torch, in process over a daemon's arena on the same GPU.

    import attnd, attnd.torch

    with attnd.connect(url, engine="cuda") as client:
        model = client.open_model("demo", layers=2, q_heads=8, kv_heads=2, head_dim=64, dtype="bf16")
        seq = model.sequence()
        with client.step([seq.append(20)]) as step:
            for layer in range(2):
                out = attnd.torch.attend(step, layer, q, k, v)   # on the current stream
            step.commit()

Nothing is copied, and nothing waits: an attend is work on the current stream, the same one for all
layers of a step.  A whole forward pass can be a CUDA graph:

    step = client.step([seq])                       # a token for each sequence
    graph = attnd.torch.Graph(step, forward)        # forward(step) attends every layer
    for _ in range(100):
        graph.replay(step)                          # on the current stream
        step = client.step([seq], commit=step)
"""

from __future__ import annotations

import importlib
from typing import Any, Callable, Optional, Tuple

from . import _lib
from ._errors import invalid
from ._step import Step
from ._tensor import unsigned

_torch: Any = importlib.import_module("torch")
_DTYPES = {_torch.bfloat16: "bf16", _torch.float16: "f16", _torch.float32: "f32"}


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
    """Attends one layer on the current stream, as Step.attend does: q, k and v are CUDA tensors of
    the daemon's GPU, any strides with the last dimension contiguous and 16-byte aligned rows.
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
