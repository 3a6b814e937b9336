"""The client: a session with the daemon, and the way of every call."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import threading
import weakref
from typing import Any, Dict, Iterator, NamedTuple, Optional, TYPE_CHECKING

from . import _lib
from ._errors import ErrorCode, make_error
from ._tensor import milliseconds, unsigned

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Sequence as Seq
    from typing import Type, Union

    from ._model import Layer, Model, Sequence
    from ._step import Step, StepSeq


ENGINES = ("cpu", "cuda")
MODES = ("in-process", "service")  # of an engine


class Limits(NamedTuple):
    """What the daemon takes at most."""

    message_bytes: int
    in_flight: int
    step_seqs: int
    step_rows: int
    sequences: int


class Session(NamedTuple):
    """A session's id, and the secret that re-attaches it."""

    id: int
    secret: bytes


class Handle:
    """A libattnd client and the calls that run on it.  What must be alone (closing, reconnecting)
    waits for the calls of other threads, and they for it."""

    def __init__(self, pointer: ctypes.c_void_p) -> None:
        self._pointer: Optional[ctypes.c_void_p] = pointer
        self._calls = 0
        self._alone = False
        self._change = threading.Condition(threading.Lock())
        self._pid = os.getpid()
        self.epoch = 0  # of the session: what belongs to an older one is stale

    def _check(self) -> ctypes.c_void_p:
        if self._pointer is None:
            raise make_error(ErrorCode.ECONN, "client", "the client is closed")
        if self._pid != os.getpid():
            raise make_error(ErrorCode.ECONN, "client", "the client belongs to the parent process")
        return self._pointer

    def __enter__(self) -> ctypes.c_void_p:
        with self._change:
            while self._alone:
                self._change.wait()
            pointer = self._check()
            self._calls += 1
            return pointer

    def __exit__(self, *_: object) -> None:
        with self._change:
            self._calls -= 1
            if self._calls == 0:
                self._change.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[ctypes.c_void_p]:
        with self._change:
            while self._alone:
                self._change.wait()
            pointer = self._check()
            self._alone = True
            while self._calls > 0:
                self._change.wait()
        try:
            yield pointer
        finally:
            with self._change:
                self._alone = False
                self._change.notify_all()

    def close(self) -> None:
        if self._pointer is not None and self._pid == os.getpid():
            with contextlib.suppress(ConnectionError), self.alone() as pointer:
                self._pointer = None
                _lib.lib.attnd_close(pointer)

    def forsake(self) -> None:
        """forsake closes for a client that was forgotten.  Calls may still run in daemon threads
        when the interpreter ends; they keep what they have."""
        if not self._calls and not self._alone:
            self.close()


class Request:
    """Names one call, so that another thread can cancel it: give it to Client.step or Step.attend,
    and call cancel, by which the other call ends with ECANCELED unless it was faster."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.id = ctypes.c_uint64(0)

    def cancel(self) -> None:
        self._client.call(_lib.lib.attnd_cancel, self.id.value)


class Client:
    """A session on the daemon's URL, ipc:///run/attnd/attnd.sock say; attnd.connect is its name.

    transport: "ring" (shared memory, on the daemon's own machine), "nng" (messages), or "auto", a
    ring when the daemon gives one.  timeout: seconds, of connecting and of each call.  client_name
    is for the daemon's log.  ring_bytes: of memory for what is in flight and for buffers, 0 = 32
    MiB.  spin_us: how long a call that waits on a ring watches it before it sleeps, 0 = not at all.
    session re-attaches an earlier one (Client.session).

    engine: "cpu" or "cuda", by mode:
    "in-process": this process attends, over the daemon's arena in host memory or on a GPU, when the
    daemon's server.in_process_uids names this user; on a GPU by attnd.torch.  Whoever may, can read
    and destroy what every tenant has cached.  engine_threads: of "cpu", 0 = all.
    "service", with "cuda": the daemon attends, and attnd.torch hands over and waits on the current
    stream, between tensors of the current GPU and a region of the daemon's memory of region_bytes
    (0 = 256 MiB, or what the daemon gives).  Client and daemon on one GPU want MPS.

    Every method may be called from any thread, also at the same time.  A call that waits lets other
    threads run; in asyncio, use asyncio.to_thread.  A child of fork has no client of its parent's.

    close, or the end of a with block, ends the session: its sequences that are not kept are freed.
    """

    def __init__(
        self,
        url: str,
        *,
        transport: str = "auto",
        client_name: Optional[str] = None,
        tenant: Optional[str] = None,
        timeout: float = 30.0,
        ring_bytes: int = 0,
        spin_us: Optional[int] = None,
        session: Optional[Session] = None,
        engine: Optional[str] = None,
        engine_threads: int = 0,
        mode: str = "in-process",
        region_bytes: int = 0,
    ) -> None:
        if engine not in (None, *ENGINES):
            raise make_error(ErrorCode.EINVAL, "engine",
                             f"{engine!r} is none of {', '.join(ENGINES)}")
        if mode not in MODES or (mode == "service" and engine != "cuda"):
            raise make_error(ErrorCode.EINVAL, "mode",
                             f"{mode!r} is no mode of engine {engine!r}: "
                             f"in-process of {' and '.join(ENGINES)}, service of cuda")
        if region_bytes and mode != "service":
            raise make_error(ErrorCode.EINVAL, "region_bytes",
                             "a region is for service mode, and " +
                             ("there is no engine" if engine is None else
                              f"engine {engine!r} attends in process"))
        if transport not in _lib.TRANSPORTS:
            raise make_error(ErrorCode.EINVAL, "transport",
                             f"{transport!r} is none of {', '.join(_lib.TRANSPORTS)}")
        opts = _lib.ConnectOpts(
            client_name=encode("client_name", client_name),
            tenant=encode("tenant", tenant),
            timeout_ms=max(1, milliseconds("timeout", timeout, 2**31 - 1)),
            transport=_lib.TRANSPORTS.index(transport),
            ring_bytes=unsigned("ring_bytes", ring_bytes, 2**63),
            spin_us=0 if spin_us is None else unsigned("spin_us", spin_us, 2**31 - 1) or -1,
        )
        self.engine = engine
        self.mode = mode
        if engine is not None:
            opts.engine = _lib.engine(f"{engine}_service" if mode == "service" else engine)
            opts.region_bytes = unsigned("region_bytes", region_bytes, 2**63)
            opts.engine_threads = unsigned("engine_threads", engine_threads, 2**31 - 1)
        if session is not None:
            opts.session = unsigned("session", session.id, 2**64 - 1)
            opts.secret[:] = exact_bytes("secret", session.secret, 16)
        pointer = ctypes.c_void_p()
        _lib.call(_lib.lib.attnd_connect, ctypes.byref(pointer), encode("url", url), opts)
        self._handle = Handle(pointer)
        self._finalize = weakref.finalize(self, self._handle.forsake)

    # ---- calls

    def call(self, function: Any, *args: Any) -> None:
        """call makes a call of libattnd on this client.  Private to the package."""
        with self._handle as pointer:
            _lib.call(function, pointer, *args)

    def call_in(self, epoch: int, function: Any, *args: Any) -> None:
        """call_in does the same for what belongs to the session of that epoch."""
        with self._handle as pointer:
            self.check_epoch(epoch)
            _lib.call(function, pointer, *args)

    @property
    def epoch(self) -> int:
        return self._handle.epoch

    def check_epoch(self, epoch: int) -> None:
        if epoch != self._handle.epoch:
            raise make_error(ErrorCode.ESTALE, "session", "it belongs to a session that is lost")

    # ---- life

    def close(self) -> None:
        """Ends the session; waits for the calls of other threads.  Once more does no harm."""
        self._handle.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        exc_type: Optional[Type[BaseException]],
        exc: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()

    def reconnect(self) -> bool:
        """Connects again after a loss, for which it waits up to the timeout.

        True: nothing was lost, or the session is there again with all that was committed; steps
        that were open are aborted, and buffers have to be made anew.  False: there is a new
        session; models, sequences, steps and buffers of the old one raise StaleError from now on.
        ConnectionError: still no daemon.  Calls of other threads wait meanwhile.
        """
        with self._handle.alone() as pointer:
            try:
                _lib.call(_lib.lib.attnd_reconnect, pointer)
            except Exception as e:
                if getattr(e, "code", None) != ErrorCode.ESTALE:
                    raise
                self._handle.epoch += 1
                return False
            return True

    @property
    def limits(self) -> Limits:
        with self._handle as pointer:
            limits = _lib.lib.attnd_get_limits(pointer).contents
            return Limits(*(getattr(limits, name) for name in Limits._fields))

    @property
    def transport(self) -> str:
        """"ring" or "nng"."""
        with self._handle as pointer:
            return _lib.TRANSPORTS[_lib.lib.attnd_get_transport(pointer)]

    @property
    def session(self) -> Session:
        secret = (ctypes.c_uint8 * 16)()
        with self._handle as pointer:
            number = _lib.lib.attnd_get_session(pointer, secret)
        return Session(number, bytes(secret))

    # ---- what there is to do

    def open_model(
        self,
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
    ) -> Model:
        """Opens a model, or joins one of the same name, digest and geometry: see Model."""
        from ._model import Model

        return Model(self, name, layers=layers, q_heads=q_heads, kv_heads=kv_heads,
                     head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype, kv_dtype=kv_dtype,
                     digest=digest, block_tokens=block_tokens, causal=causal, layer=layer,
                     per_layer=per_layer)

    def step(
        self,
        seqs: Seq[Union[StepSeq, Sequence]],
        *,
        deadline: float = 0.0,
        commit: Optional[Step] = None,
        accepted: Optional[Seq[Union[int, Seq[int]]]] = None,
        request: Optional[Request] = None,
    ) -> Step:
        """Opens a step: see Step."""
        from ._step import Step

        return Step(self, seqs, deadline=deadline, commit=commit, accepted=accepted,
                    request=request)

    def admin(self, op: str, **body: Any) -> Dict[str, Any]:
        """Calls an op that answers in JSON: model_list, seq_list, stats, session_list, drain,
        config_get, config_set (proto_wire.h)."""
        reply = ctypes.c_void_p()
        text = json.dumps(body).encode() if body else None
        self.call(_lib.lib.attnd_admin, encode("op", op), text, ctypes.byref(reply))
        try:
            answer: Dict[str, Any] = json.loads(ctypes.string_at(reply.value or 0))
            return answer
        finally:
            _lib.lib.attnd_free(reply)


connect = Client


def encode(field: str, text: Optional[str]) -> Optional[bytes]:
    """encode makes a C string."""
    if text is None:
        return None
    data = text.encode()
    if b"\0" in data:
        raise make_error(ErrorCode.EINVAL, field, "a NUL inside")
    return data


def exact_bytes(field: str, data: bytes, count: int) -> bytes:
    if len(data) != count:
        raise make_error(ErrorCode.EINVAL, field, f"{len(data)} bytes, it has {count}")
    return bytes(data)
