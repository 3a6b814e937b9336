"""Models and sequences."""

from __future__ import annotations

import ctypes
from typing import Any, List, NamedTuple, Optional, Tuple, TYPE_CHECKING
from typing import Sequence as Seq

from . import _lib
from ._client import Client, encode, exact_bytes
from ._errors import Error, ErrorCode, invalid
from ._tensor import floats, milliseconds, unsigned

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Type, Union

    from ._step import Buffers, Ran, StepSeq


class Rope(NamedTuple):
    """Rotary embedding, fused into attention.  inv_freq [rotary_dim / 2]."""

    inv_freq: Seq[float]
    attention_factor: float = 1.0
    interleaved: bool = False


class Layer(NamedTuple):
    """What may differ from layer to layer.  softmax_scale None = 1 / sqrt(head_dim); window_size
    (left, right), -1 = unbounded; softcap 0 = off; sinks and alibi_slopes [q_heads]; k_scale and
    v_scale [kv_heads], of an f8e4m3 cache; kv_layer: reads that layer's K and V, not its own."""

    softmax_scale: Optional[float] = None
    window_size: Tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: Optional[Seq[float]] = None
    alibi_slopes: Optional[Seq[float]] = None
    k_scale: Optional[Seq[float]] = None
    v_scale: Optional[Seq[float]] = None
    rope: Optional[Rope] = None
    kv_layer: Optional[int] = None


class Model:
    """A model that is open; Client.open_model makes one.

        client.open_model(name, layers=, q_heads=, kv_heads=, head_dim=, dtype="bf16", ...)

    dtype ("f32", "bf16", "f16") is that of q, k, v and the output; kv_dtype that of the cache: the
    same, or "f8e4m3".  digest, 32 bytes, is of the weights: models of one name must agree in it.
    layer is of every layer unless per_layer gives one for each.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        *,
        layers: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: Optional[int] = None,
        dtype: str = "bf16",
        kv_dtype: Optional[str] = None,
        digest: bytes = bytes(32),
        block_tokens: int = 0,
        causal: bool = True,
        layer: Optional[Layer] = None,
        per_layer: Optional[Seq[Layer]] = None,
    ) -> None:
        self.client = client
        self.name = name
        self.layers = unsigned("layers", layers)
        self.q_heads = unsigned("q_heads", q_heads)
        self.kv_heads = unsigned("kv_heads", kv_heads)
        self.head_dim = unsigned("head_dim", head_dim)
        self.v_head_dim = unsigned("v_head_dim", head_dim if v_head_dim is None else v_head_dim)
        self.dtype = dtype
        if dtype not in _lib.DTYPES[:3]:
            raise invalid("dtype", f"{dtype!r} is none of {', '.join(_lib.DTYPES[:3])}")
        if (kv_dtype or dtype) not in _lib.DTYPES:
            raise invalid("kv_dtype", f"{kv_dtype!r} is none of {', '.join(_lib.DTYPES)}")
        if per_layer is not None and len(per_layer) != layers:
            raise invalid("per_layer", f"{len(per_layer)} of {layers} layers")
        keep: List[Any] = []  # arrays that libattnd reads
        opts = _lib.ModelOpts(
            name=encode("name", name),
            dtype=_lib.DTYPES.index(dtype),
            kv_dtype=_lib.DTYPES.index(kv_dtype or dtype),
            layers=self.layers,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            block_tokens=unsigned("block_tokens", block_tokens),
            not_causal=not causal,
            all=self._layer_opts(layer or Layer(), keep),
        )
        opts.digest[:] = exact_bytes("digest", digest, 32)
        if per_layer is not None:
            every = (_lib.LayerOpts * len(per_layer))(
                *(self._layer_opts(one, keep) for one in per_layer)
            )
            opts.per_layer = every
        number = ctypes.c_uint32()
        self.epoch = client.epoch
        client.call_in(self.epoch, _lib.lib.attnd_model_open, opts, ctypes.byref(number))
        self.id = number.value

    def _layer_opts(self, layer: Layer, keep: List[Any]) -> _lib.LayerOpts:
        def array(field: str, values: Optional[Seq[float]], count: int) -> Optional[int]:
            made = floats(field, values, count)
            keep.append(made)
            return None if made is None else int(made.__array_interface__["data"][0])

        left, right = layer.window_size
        if not (-1 <= left < 2**31 and -1 <= right < 2**31):
            raise invalid("window", f"window_size ({left}, {right}) is not from -1 to 2147483647")
        opts = _lib.LayerOpts(
            scale=0.0 if layer.softmax_scale is None else layer.softmax_scale,
            softcap=layer.softcap,
            window_left=left,
            window_right=right,
            sinks=array("sinks", layer.sinks, self.q_heads),
            alibi_slopes=array("alibi", layer.alibi_slopes, self.q_heads),
            k_scale=array("k_scale", layer.k_scale, self.kv_heads),
            v_scale=array("v_scale", layer.v_scale, self.kv_heads),
            kv_layer=-1,
        )
        if layer.kv_layer is not None:
            opts.kv_layer = unsigned("kv_layer", layer.kv_layer, 2**31 - 1)
        if layer.rope is not None:
            count = len(layer.rope.inv_freq)
            if count == 0:
                raise invalid("rope.inv_freq", "no frequencies; rope=None is no RoPE")
            opts.rope = _lib.RopeOpts(
                inv_freq=array("rope.inv_freq", layer.rope.inv_freq, count),
                num_inv_freq=count,
                attention_factor=layer.rope.attention_factor,
                interleaved=layer.rope.interleaved,
            )
        return opts

    def close(self) -> None:
        """Closes the model.  Its sequences stay until they are freed, but cannot be attended
        unless it is opened again: a step of them is ENOENT, as are more sequences."""
        self.client.call_in(self.epoch, _lib.lib.attnd_model_close, self.id)

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self,
        exc_type: Optional[Type[BaseException]],
        exc: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        try:
            self.close()
        except Error:
            if exc is None:
                raise

    def sequence(self, *, priority: int = 0) -> Sequence:
        """Makes an empty sequence.

        What it leaves in the prefix cache goes before what has a higher priority: 1 (goes first)
        to 255, at most the tenant's; 0 = the tenant's.
        """
        number = ctypes.c_uint64()
        self.client.call_in(
            self.epoch,
            _lib.lib.attnd_seq_create_priority,
            self.id,
            unsigned("priority", priority),
            ctypes.byref(number),
        )
        return Sequence(self, number.value, 0)

    def attach(self, name: str) -> Sequence:
        """Takes over a sequence of this model that was kept under a name.  BusyError while another
        session holds it; one that was just closed does until the daemon hears of it."""
        number, length = ctypes.c_uint64(), ctypes.c_uint32()
        self.client.call_in(
            self.epoch,
            _lib.lib.attnd_seq_attach,
            self.id,
            encode("name", name),
            ctypes.byref(number),
            ctypes.byref(length),
        )
        return Sequence(self, number.value, length.value)

    def buffers(
        self, max_rows: int, max_new_rows: Optional[int] = None, *, lse: bool = False
    ) -> Buffers:
        """Makes memory for attends without copies, max_new_rows None = max_rows: see Buffers."""
        from ._step import Buffers

        return Buffers(self, max_rows, max_rows if max_new_rows is None else max_new_rows, lse)

    def decode(
        self,
        seqs: Seq[Union[StepSeq, Sequence]],
        q: Any,
        k: Any = None,
        v: Any = None,
        *,
        out: Any = None,
        lse: Any = False,
        partial: bool = False,
        deadline: float = 0.0,
        ran: Optional[Ran] = None,
    ) -> Any:
        """Step, attend and commit in one message, for a model with one layer, of at most 8 rows a
        sequence.  The arguments and the result are those of Client.step and Step.attend."""
        from ._step import Given, attend_once

        return attend_once(_lib.lib.attnd_decode, self, seqs, Given(q, k, v, out, lse), partial,
                           deadline, ran)

    def prefill(
        self,
        seqs: Seq[Union[StepSeq, Sequence]],
        q: Any,
        k: Any = None,
        v: Any = None,
        *,
        out: Any = None,
        lse: Any = False,
        partial: bool = False,
        deadline: float = 0.0,
        ran: Optional[Ran] = None,
    ) -> Any:
        """The same, of any number of rows."""
        from ._step import Given, attend_once

        return attend_once(_lib.lib.attnd_prefill, self, seqs, Given(q, k, v, out, lse), partial,
                           deadline, ran)


class Sequence:
    """A sequence of a model; Model.sequence makes one.

    length is what is committed, as this client knows it.  free, or the end of a with block, frees
    it; a sequence that is forgotten lives until its session ends, and longer when it is kept.
    """

    def __init__(self, model: Model, number: int, length: int) -> None:
        self.model = model
        self.id = number
        self.length = length

    def _call(self, function: Any, *args: Any) -> None:
        self.model.client.call_in(self.model.epoch, function, self.id, *args)

    def append(
        self,
        count: int = 1,
        *,
        reserve: int = 0,
        tokens: Optional[Any] = None,
        positions: Optional[Any] = None,
        tree_mask: Optional[Any] = None,
    ) -> StepSeq:
        """For Client.step: count new tokens; 0 is a sequence that the step leaves as it is, without
        rows (read gives it some).

        tokens [count], their ids: the prefix cache may have some of them, and the step then has
        fewer rows (Step.cached).  positions [count], for RoPE.  tree_mask bool [count, count]: row
        i sees new token j.  reserve: slots beyond.
        """
        from ._step import StepSeq

        return StepSeq(self, unsigned("new_len", count), 0, reserve, tokens, positions, tree_mask)

    def read(self, count: int = 1, *, positions: Optional[Any] = None) -> StepSeq:
        """For Client.step: count rows of queries over what is committed, and no new token."""
        from ._step import StepSeq

        return StepSeq(self, 0, unsigned("q_len", count), 0, None, positions, None)

    def fork(self) -> Sequence:
        """Makes another sequence with the same tokens, whose blocks both share."""
        number, length = ctypes.c_uint64(), ctypes.c_uint32()
        self._call(_lib.lib.attnd_seq_fork, ctypes.byref(number), ctypes.byref(length))
        return Sequence(self.model, number.value, length.value)

    def truncate(self, length: int) -> None:
        """Drops the tokens behind length."""
        self._call(_lib.lib.attnd_seq_truncate, unsigned("len", length))
        self.length = length

    def keep(self, name: str, ttl: float = 0.0) -> None:
        """Keeps the sequence under a name, also when its session ends, then for ttl seconds, 0 =
        for ever.  "" keeps it no longer."""
        self._call(
            _lib.lib.attnd_seq_keep, encode("name", name), milliseconds("ttl", ttl, 2**53)
        )

    def free(self) -> None:
        self._call(_lib.lib.attnd_seq_free)

    def __len__(self) -> int:
        return self.length

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self,
        exc_type: Optional[Type[BaseException]],
        exc: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        try:
            self.free()
        except Error as e:
            if exc is None and e.code not in (ErrorCode.ESTALE, ErrorCode.ECONN):
                raise
