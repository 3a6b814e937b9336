"""Steps: the work of one forward pass, and the ways to attend in it."""

from __future__ import annotations

import ctypes
import os
from typing import Any, List, Literal, NamedTuple, Optional, Tuple, TYPE_CHECKING, Union, overload
from typing import Sequence as Seq

import numpy as np

from . import _lib
from ._client import Client, Request
from ._errors import Error, ErrorCode, invalid, make_error
from ._model import Model, Sequence
from ._tensor import NUMPY, Array, at_address, integers, is_torch, milliseconds, take, take_lse
from ._tensor import to_torch, tree_mask, unsigned

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Type

F32 = np.dtype(np.float32)


class StepSeq(NamedTuple):
    """A sequence's part in a step; Sequence.append and Sequence.read make it."""

    seq: Sequence
    new_len: int
    q_len: int
    reserve: int
    tokens: Optional[Any]
    positions: Optional[Any]
    tree_mask: Optional[Any]


class BlockMask(NamedTuple):
    """Which KV blocks the rows of each query block see, ascending.  The query blocks, of q_block
    rows, of all sequences follow each other, ceil(rows / q_block) for each."""

    q_block: int
    kv_blocks: Seq[Seq[int]]


class Ran:
    """What the daemon ran for an attend: give one to it to be filled."""

    kernel = ""
    why = ""
    splits = 0
    batch_rows = 0
    queue_us = 0
    run_us = 0

    def fill(self, ran: _lib.RanStruct) -> None:
        self.kernel = ran.kernel.decode("ascii", "replace")
        self.why = ran.why.decode("ascii", "replace")
        self.splits, self.batch_rows = ran.splits, ran.batch_rows
        self.queue_us, self.run_us = ran.queue_us, ran.run_us


class _Memory:
    """The buffers of libattnd.  Every array of them holds this; they go with the last one."""

    def __init__(self, pointer: Any) -> None:
        self._pointer = pointer
        self._pid = os.getpid()
        self._free = _lib.lib.attnd_buffers_free  # which is there until the interpreter is gone

    def __del__(self) -> None:
        if self._pid == os.getpid():
            self._free(self._pointer)


class Buffers:
    """Memory for attends of up to max_rows query rows and max_new_rows new ones, made by
    Model.buffers.  Over a ring it is shared with the daemon, and nothing is copied:

        b.q[:rows] = ...; b.k[:rows] = ...; b.v[:rows] = ...
        out = step.attend(layer, buffers=b)

    q [max_rows, q_heads, head_dim], k [max_new_rows, kv_heads, head_dim], v [max_new_rows,
    kv_heads, v_head_dim].  What attend returns is a read-only view, good until the next
    attend through the same buffers.  One attend at a time.  The memory lives as long as this object
    or any array of it.
    """

    def __init__(self, model: Model, max_rows: int, max_new_rows: int, lse: bool) -> None:
        if model.client.engine == "cuda":
            raise invalid("engine", "on a GPU attnd.torch.empty makes such memory")
        self.model = model
        self.max_rows = unsigned("max_rows", max_rows)
        self.max_new_rows = unsigned("max_new_rows", max_new_rows)
        self.has_lse = lse
        self.pointer = ctypes.POINTER(_lib.BuffersStruct)()
        model.client.call_in(
            model.epoch,
            _lib.lib.attnd_buffers_create,
            ctypes.byref(self.pointer),
            model.id,
            self.max_rows,
            self.max_new_rows,
            lse,
        )
        self._memory = _Memory(self.pointer)
        self._dtype = NUMPY[model.dtype]
        b, m = self.pointer.contents, model
        self.q = self._view(b.q, (self.max_rows, m.q_heads, m.head_dim))
        self.k = self._view(b.k, (self.max_new_rows, m.kv_heads, m.head_dim))
        self.v = self._view(b.v, (self.max_new_rows, m.kv_heads, m.v_head_dim))

    def _view(self, address: Optional[int], shape: Tuple[int, ...]) -> Array:
        return at_address(address, self._dtype, shape, self._memory, True)

    def _out(self, rows: int) -> Array:
        shape = (rows, self.model.q_heads, self.model.v_head_dim)
        return at_address(self.pointer.contents.out, self._dtype, shape, self._memory, False)

    def _lse(self, rows: int) -> Array:
        shape = (self.model.q_heads, rows)
        return at_address(self.pointer.contents.lse, F32, shape, self._memory, False)


def _address(array: Array, keep: List[Any]) -> int:
    keep.append(array)
    return int(array.__array_interface__["data"][0])


def _given(array: Array, keep: List[Any]) -> Optional[int]:
    """_given is _address of an array that may be left out; one without elements counts as so."""
    return _address(array, keep) if array.size else None


class Given(NamedTuple):
    """What the caller gives to an attend."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any


class _Arrays(NamedTuple):
    args: _lib.AttendArgs
    out: Any  # to be returned
    lse: Any
    keep: Tuple[object, ...]  # memory that libattnd reads or writes


def _arrays(model: Model, rows: int, new_rows: int, given: Given) -> _Arrays:
    """_arrays checks what the caller has, and makes the outputs that it does not."""
    q, k, v, out, lse = given
    if (k is None) != (v is None):
        raise invalid("v" if v is None else "k", "k and v are both there, or both None")
    qt = take("q", q, model.dtype, (rows, model.q_heads, model.head_dim))
    args = _lib.AttendArgs(model=model.id, rows=rows)
    args.q, args.q_stride_token, args.q_stride_head = qt[:3]
    keep: List[Any] = [qt]
    if k is not None:
        kt = take("k", k, model.dtype, (new_rows, model.kv_heads, model.head_dim))
        vt = take("v", v, model.dtype, (new_rows, model.kv_heads, model.v_head_dim))
        keep += [kt, vt]
        if new_rows > 0:
            args.new_rows = new_rows
            args.k, args.k_stride_token, args.k_stride_head = kt[:3]
            args.v, args.v_stride_token, args.v_stride_head = vt[:3]
    like_torch = is_torch(q)
    out_shape = (rows, model.q_heads, model.v_head_dim)
    if out is None:
        made = np.empty(out_shape, NUMPY[model.dtype])
        args.out = _address(made, keep)
        out = to_torch(made) if like_torch else made
    else:
        keep.append(take("out", out, model.dtype, out_shape, out=True))
        args.out = keep[-1].address
    if lse is True:
        made = np.empty((model.q_heads, rows), F32)
        args.lse = _address(made, keep)
        lse = to_torch(made) if like_torch else made
    elif lse is False:
        lse = None
    else:
        keep.append(take_lse(lse, (model.q_heads, rows)))
        args.lse = keep[-1].address
    return _Arrays(args, out, lse, tuple(keep))


def _mask(mask: Optional[BlockMask], keep: List[Any]) -> Optional[_lib.BlockMaskArgs]:
    if mask is None:
        return None
    if not isinstance(mask, BlockMask):
        raise TypeError(f"block_mask: {type(mask).__name__} is no attnd.BlockMask")
    lists = mask.kv_blocks
    ends = np.cumsum([0] + [len(blocks) for blocks in lists])
    start = integers("block_mask", ends, np.uint32, len(lists) + 1)
    flat = [block for blocks in lists for block in blocks]
    blocks = integers("block_mask", flat, np.uint32, len(flat))
    return _lib.BlockMaskArgs(
        q_block=unsigned("q_block", mask.q_block),
        num_query_blocks=len(lists),
        start=_address(start, keep),
        kv_blocks=_address(blocks, keep),
    )


def _entries(seqs: Seq[Union[StepSeq, Sequence]], keep: List[Any]) -> Tuple[List[StepSeq], Any]:
    """_entries makes a step's sequences those of libattnd."""
    parts = [s.append() if isinstance(s, Sequence) else s for s in seqs]
    if not parts:
        raise invalid("num_seqs", "a step has at least one sequence")
    model = parts[0].seq.model
    c = (_lib.StepSeqArgs * len(parts))()
    for entry, part in zip(c, parts):
        if part.seq.model is not model:
            raise invalid("seq", "all sequences of a step are of one model")
        n = part.new_len or part.q_len
        entry.seq, entry.new_len, entry.q_len = part.seq.id, part.new_len, part.q_len
        entry.reserve = unsigned("reserve", part.reserve)
        if part.tokens is not None:
            entry.tokens = _given(integers("tokens", part.tokens, np.uint32, n), keep)
        if part.positions is not None:
            entry.positions = _given(integers("positions", part.positions, np.int32, n), keep)
        if part.tree_mask is not None:
            entry.tree_mask = _given(tree_mask(part.tree_mask, n), keep)
    return parts, c


class Step:
    """One forward pass of a batch of sequences; Client.step opens it.

        with client.step([a.append(20), b], deadline=1.0) as step:
            for layer in range(model.layers):
                out = step.attend(layer, q, k, v)
            step.commit()

    A sequence alone stands for its append(1).  All blocks are reserved when the step opens: when
    there are none, the step waits up to deadline seconds (0: not at all), then NoSpaceError.  The
    deadline also bounds how long it may stay open.  A with block that ends without commit cancels
    the step.

    commit and accepted carry the commit of another step, which is made first, and stands when this
    step is then refused.  The fields of its own errors begin with "commit.".

    rows is how many rows q has, all sequences together, in the order of the step: of each its new
    tokens that the prefix cache does not have, or its read rows; new_rows how many k and v have.
    committed and cached say per sequence what was there, and how many new tokens are cached.
    """

    def __init__(
        self,
        client: Client,
        seqs: Seq[Union[StepSeq, Sequence]],
        *,
        deadline: float,
        commit: Optional[Step],
        accepted: Optional[Seq[Union[int, Seq[int]]]],
        request: Optional[Request],
    ) -> None:
        keep: List[Any] = []
        self._parts, entries = _entries(seqs, keep)
        self.model = self._parts[0].seq.model
        self._client = client
        self.id = 0
        if self.model.client is not client:
            raise invalid("seq", "a sequence of another client")
        opts = _lib.StepOpts(deadline_ms=milliseconds("deadline", deadline, 2**32 - 1))
        if request is not None:
            opts.request = ctypes.pointer(request.id)
        if commit is not None:
            commit._must_be_open()
            accept = commit._accept(accepted, keep)
            opts.commit_step, opts.commit_accept = commit.id, accept
            opts.num_commit = len(accept)
        elif accepted is not None:
            raise invalid("accepted", "accepted tokens of no step")
        number = ctypes.c_uint64()
        try:
            client.call_in(
                self.model.epoch,
                _lib.lib.attnd_step_open,
                self.model.id,
                entries,
                len(self._parts),
                opts,
                ctypes.byref(number),
            )
        except Error as e:
            if commit is not None and e.code in (ErrorCode.ENOSPC, ErrorCode.ECANCELED):
                commit._committed(accept)  # the daemon was past it
            raise
        if commit is not None:
            commit._committed(accept)
        self.id = number.value
        self.is_open = True
        self.committed = tuple(int(e.committed) for e in entries)
        self.cached = tuple(int(e.cached) for e in entries)
        own = [p.new_len - c if p.new_len else 0 for p, c in zip(self._parts, self.cached)]
        self.new_rows = sum(own)
        self.rows = self.new_rows + sum(p.q_len for p in self._parts)

    def _must_be_open(self) -> None:
        if not self.is_open:
            raise make_error(ErrorCode.ESTALE, "step", "the step is committed or cancelled")

    @overload
    def attend(
        self,
        layer: int,
        q: Any = ...,
        k: Any = ...,
        v: Any = ...,
        *,
        out: Any = ...,
        lse: Literal[False] = ...,
        partial: bool = ...,
        block_mask: Optional[BlockMask] = ...,
        buffers: None = ...,
        ran: Optional[Ran] = ...,
        request: Optional[Request] = ...,
    ) -> Any: ...

    @overload
    def attend(
        self,
        layer: int,
        q: Any = ...,
        k: Any = ...,
        v: Any = ...,
        *,
        out: Any = ...,
        lse: Any,
        partial: bool = ...,
        block_mask: Optional[BlockMask] = ...,
        buffers: None = ...,
        ran: Optional[Ran] = ...,
        request: Optional[Request] = ...,
    ) -> Tuple[Any, Any]: ...

    @overload
    def attend(
        self,
        layer: int,
        *,
        partial: bool = ...,
        buffers: Buffers,
        ran: Optional[Ran] = ...,
        request: Optional[Request] = ...,
    ) -> Any: ...

    def attend(
        self,
        layer: int,
        q: Any = None,
        k: Any = None,
        v: Any = None,
        *,
        out: Any = None,
        lse: Any = False,
        partial: bool = False,
        block_mask: Optional[BlockMask] = None,
        buffers: Optional[Buffers] = None,
        ran: Optional[Ran] = None,
        request: Optional[Request] = None,
    ) -> Any:
        """Attends one layer: q [rows, q_heads, head_dim], k [new_rows, kv_heads, head_dim], v
        [new_rows, kv_heads, v_head_dim], of the model's dtype, any strides with the last dimension
        contiguous.  k and v are None for a layer that reads another's, or when nothing is new.

        Returns out [rows, q_heads, v_head_dim]: a torch tensor when q is one, else a NumPy array
        (bf16 as ml_dtypes.bfloat16 when that is installed, else as uint16); or what out gave.  With
        lse True, or an array to write, (out, lse): natural log, float32 [q_heads, rows].  partial:
        a state to be merged, sinks left out.  With buffers, q, k, v and out are in there, and lse
        is returned when the buffers have it.

        Each layer once, in any order; once more before the commit computes the same again.
        """
        self._must_be_open()
        if self._client.engine == "cuda":
            raise invalid("q", "on a GPU attnd.torch attends")
        keep: List[Any] = []
        if buffers is None:
            given = Given(q, k, v, out, lse)
            args, out, lse, memory = _arrays(self.model, self.rows, self.new_rows, given)
            keep.append(memory)
        else:
            if not (q is k is v is out is None and lse is False):
                raise invalid("buffers", "buffers stand instead of q, k, v, out and lse")
            args = _lib.AttendArgs(rows=self.rows, new_rows=self.new_rows, model=self.model.id,
                                   buffers=buffers.pointer)
            self._client.check_epoch(buffers.model.epoch)
        args.step, args.layer, args.partial = self.id, unsigned("layer", layer), partial
        mask = _mask(block_mask, keep)
        if mask is not None:
            args.block_mask = ctypes.pointer(mask)
        if request is not None:
            args.request = ctypes.pointer(request.id)
        what = _lib.RanStruct()
        self._client.call_in(self.model.epoch, _lib.lib.attnd_attend, args, what)
        if ran is not None:
            ran.fill(what)
        if buffers is not None:
            out, lse = buffers._out(self.rows), buffers._lse(self.rows) if buffers.has_lse else None
        return out if lse is None else (out, lse)

    def _accept(self, accepted: Optional[Seq[Union[int, Seq[int]]]], keep: List[Any]) -> Any:
        if accepted is None:
            accepted = [p.new_len for p in self._parts]
        if len(accepted) != len(self._parts):
            raise invalid("accepted", f"{len(accepted)} of {len(self._parts)} sequences")
        c = (_lib.Accept * len(self._parts))()
        for entry, how, cached in zip(c, accepted, self.cached):
            if isinstance(how, (int, np.integer)):
                entry.accepted = unsigned("accepted", int(how))
                entry.num_path = max(0, entry.accepted - cached)
            else:
                entry.num_path = len(how)
                entry.accepted = cached + len(how)
                entry.path = _address(integers("path", how, np.uint32, len(how)), keep)
        return c

    def _committed(self, accept: Any) -> None:
        for part, entry, before in zip(self._parts, accept, self.committed):
            part.seq.length = before + entry.accepted
        self.is_open = False

    def commit(self, accepted: Optional[Seq[Union[int, Seq[int]]]] = None) -> Tuple[int, ...]:
        """Commits the step, after every layer was attended; returns the committed lengths.

        accepted, per sequence: how many of its new tokens count, cached ones included (None = all);
        or, for a tree, the rows of the accepted path, ascending.  The reply means that it is there
        to stay.
        """
        self._must_be_open()
        keep: List[Any] = []
        accept = self._accept(accepted, keep)
        lens = (ctypes.c_uint32 * len(accept))()
        self._client.call_in(
            self.model.epoch, _lib.lib.attnd_step_commit, self.id, accept, len(accept), lens
        )
        self._committed(accept)
        return tuple(lens)

    def cancel(self) -> None:
        """Ends the step without a trace."""
        self._must_be_open()
        self._client.call_in(self.model.epoch, _lib.lib.attnd_step_cancel, self.id)
        self.is_open = False

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self,
        exc_type: Optional[Type[BaseException]],
        exc: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        if self.is_open:
            try:
                self.cancel()
            except Error as e:  # of a step that its deadline or a loss has ended there is none
                if exc is None and e.code not in (ErrorCode.ESTALE, ErrorCode.ECONN):
                    raise


def attend_once(
    function: Any,
    model: Model,
    seqs: Seq[Union[StepSeq, Sequence]],
    given: Given,
    partial: bool,
    deadline: float,
    ran: Optional[Ran],
) -> Any:
    """attend_once is Model.decode and Model.prefill."""
    keep: List[Any] = []
    parts, entries = _entries(seqs, keep)
    if parts[0].seq.model is not model:
        raise invalid("seq", "a sequence of another model")
    new_rows = sum(p.new_len for p in parts)
    a = _arrays(model, new_rows + sum(p.q_len for p in parts), new_rows, given)
    a.args.partial = partial
    lens = (ctypes.c_uint32 * len(parts))()
    what = _lib.RanStruct()
    model.client.call_in(model.epoch, function, entries, len(parts),
                         milliseconds("deadline", deadline, 2**32 - 1), a.args, lens,
                         what)
    for part, length in zip(parts, lens):
        part.seq.length = length
    if ran is not None:
        ran.fill(what)
    return a.out if a.lse is None else (a.out, a.lse)
