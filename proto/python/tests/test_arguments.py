"""What is refused, and by which error; nothing of it may change or crash anything."""

from __future__ import annotations

import pickle
from typing import Any, Callable, Dict, Iterator, Tuple

import attnd
import numpy as np
import pytest

HEADS, KV_HEADS, DIM, ROWS = 4, 2, 8, 3
q = np.ones((ROWS, HEADS, DIM), np.float32)
k = np.ones((ROWS, KV_HEADS, DIM), np.float32)
v = np.ones((ROWS, KV_HEADS, DIM), np.float32)
GEOMETRY: Any = dict(layers=1, q_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, dtype="f32")


@pytest.fixture
def model(client: attnd.Client) -> attnd.Model:
    return client.open_model("arguments", **GEOMETRY)


@pytest.fixture
def seq(model: attnd.Model) -> attnd.Sequence:
    return model.sequence()


@pytest.fixture
def step(client: attnd.Client, seq: attnd.Sequence) -> Iterator[attnd.Step]:
    with client.step([seq.append(ROWS)]) as s:
        yield s
        np.testing.assert_array_equal(s.attend(0, q, k, v), np.ones_like(q))  # still in order


def read_only(x: Any) -> Any:
    y = x.copy()
    y.flags.writeable = False
    return y


def unaligned(x: Any) -> Any:
    raw = np.zeros(x.nbytes + 1, np.uint8)[1:]
    return raw.view(x.dtype).reshape(x.shape)


BAD_TENSORS: Dict[str, Tuple[str, Callable[[], Dict[str, Any]]]] = {
    "rows": ("q", lambda: dict(q=q[:2])),
    "heads": ("q", lambda: dict(q=q[:, :2])),
    "dim": ("k", lambda: dict(k=k[..., :4])),
    "dimensions": ("q", lambda: dict(q=q.ravel())),
    "scalar": ("v", lambda: dict(v=np.float32(1))),
    "float64": ("q", lambda: dict(q=q.astype(np.float64))),
    "int32": ("v", lambda: dict(v=v.astype(np.int32))),
    "float16": ("k", lambda: dict(k=k.astype(np.float16))),
    "big-endian": ("q", lambda: dict(q=q.astype(">f4"))),
    "complex": ("q", lambda: dict(q=q.astype(np.complex64))),
    "objects": ("q", lambda: dict(q=q.astype(object))),
    "broadcast": ("k", lambda: dict(k=np.broadcast_to(k[:1], k.shape))),
    "reversed": ("q", lambda: dict(q=q[::-1])),
    "last dimension": ("q", lambda: dict(q=np.ones((ROWS, HEADS, 2 * DIM), np.float32)[..., ::2])),
    "unaligned": ("q", lambda: dict(q=unaligned(q))),
    "bytes": ("q", lambda: dict(q=q.tobytes())),
    "no k": ("k", lambda: dict(k=None)),
    "no v": ("v", lambda: dict(v=None)),
    "out read-only": ("out", lambda: dict(out=read_only(q))),
    "out of bytes": ("out", lambda: dict(out=memoryview(bytes(q.nbytes)).cast("f", q.shape))),
    "out rows": ("out", lambda: dict(out=np.empty((ROWS + 1, HEADS, DIM), np.float32))),
    "out type": ("out", lambda: dict(out=np.empty(q.shape, np.float64))),
    "out strided": ("out", lambda: dict(out=np.empty((2 * ROWS, HEADS, DIM), np.float32)[::2])),
    "lse shape": ("lse", lambda: dict(lse=np.empty((ROWS, HEADS), np.float32))),
    "lse type": ("lse", lambda: dict(lse=np.empty((HEADS, ROWS), np.float64))),
    "lse strided": ("lse", lambda: dict(lse=np.empty((ROWS, HEADS), np.float32).T)),
    "layer": ("layer", lambda: dict(layer=1)),
    "layer below 0": ("layer", lambda: dict(layer=-1)),
    "layer of 33 bits": ("layer", lambda: dict(layer=2**32)),
}


@pytest.mark.parametrize("what", BAD_TENSORS)
def test_bad_tensors(step: attnd.Step, what: str) -> None:
    field, make = BAD_TENSORS[what]
    attend: Any = step.attend
    with pytest.raises(attnd.InvalidError) as e:
        attend(**{"layer": 0, "q": q, "k": k, "v": v, **make()})
    assert (e.value.code, e.value.field) == (attnd.ErrorCode.EINVAL, field)


@pytest.mark.parametrize("thing", [None, 1.0, "q", [[1.0]], object()])
def test_no_tensors(step: attnd.Step, thing: Any) -> None:
    with pytest.raises(TypeError, match="^q: "):
        step.attend(0, thing, k, v)


def test_no_layer(step: attnd.Step) -> None:
    bad: Any = 0.0
    with pytest.raises(TypeError):
        step.attend(bad, q, k, v)


BAD_CALLS = {
    "no sequences": ("num_seqs", lambda c, s: c.step([])),
    "negative": ("new_len", lambda c, s: s.append(-1)),
    "too many": ("new_len", lambda c, s: s.append(2**32)),
    "tokens": ("tokens", lambda c, s: c.step([s.append(2, tokens=[1])])),
    "float tokens": ("tokens", lambda c, s: c.step([s.append(2, tokens=[1.0, 2.0])])),
    "negative tokens": ("tokens", lambda c, s: c.step([s.append(2, tokens=[1, -1])])),
    "positions": ("positions", lambda c, s: c.step([s.append(2, positions=[0, 2**31])])),
    "tree": ("tree_mask", lambda c, s: c.step([s.append(2, tree_mask=np.ones((2, 3), bool))])),
    "tree type": ("tree_mask", lambda c, s: c.step([s.append(2, tree_mask=np.ones((2, 2)))])),
    "deadline": ("deadline", lambda c, s: c.step([s.append(1)], deadline=-1)),
    "NaN deadline": ("deadline", lambda c, s: c.step([s.append(1)], deadline=float("nan"))),
    "reserve of nothing": ("reserve", lambda c, s: c.step([s.append(0, reserve=1)])),
    "tokens of nothing": ("tokens", lambda c, s: c.step([s.append(0, tokens=[1])])),
    "accepted alone": ("accepted", lambda c, s: c.step([s.append(1)], accepted=[1])),
    "truncate": ("len", lambda c, s: s.truncate(1)),
    "name": ("name", lambda c, s: s.keep("a\0b")),
    "long name": ("name", lambda c, s: s.keep("n" * 64)),
    "heads": ("q_heads", lambda c, s: c.open_model("x", **{**GEOMETRY, "q_heads": 3})),
    "head_dim": ("head_dim", lambda c, s: c.open_model("x", **{**GEOMETRY, "head_dim": 2**32})),
    "dtype": ("dtype", lambda c, s: c.open_model("x", **{**GEOMETRY, "dtype": "f64"})),
    "kv_dtype": ("kv_dtype", lambda c, s: c.open_model("x", kv_dtype="int8", **GEOMETRY)),
    "digest": ("digest", lambda c, s: c.open_model("x", digest=b"1", **GEOMETRY)),
    "layers": ("per_layer", lambda c, s: c.open_model("x", per_layer=[], **GEOMETRY)),
    "sinks": ("sinks", lambda c, s: c.open_model("x", layer=attnd.Layer(sinks=[1]), **GEOMETRY)),
    "window": (
        "window",
        lambda c, s: c.open_model("x", layer=attnd.Layer(window_size=(-2, 0)), **GEOMETRY),
    ),
    "rope": (
        "rope.inv_freq",
        lambda c, s: c.open_model("x", layer=attnd.Layer(rope=attnd.Rope([])), **GEOMETRY),
    ),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_bad_calls(client: attnd.Client, seq: attnd.Sequence, what: str) -> None:
    field, call = BAD_CALLS[what]
    bad: Callable[[attnd.Client, attnd.Sequence], Any] = call
    with pytest.raises(attnd.InvalidError) as e:
        bad(client, seq)
    assert e.value.field == field
    with client.step([seq.append(1)]) as step:  # still in order
        step.attend(0, q[:1], k[:1], v[:1])
        assert step.commit() == (1,)


def test_commit_before_every_layer(client: attnd.Client) -> None:
    model = client.open_model("arguments-3", **{**GEOMETRY, "layers": 3})
    seq = model.sequence()
    with client.step([seq.append(ROWS)]) as step:
        step.attend(0, q, k, v)
        step.attend(2, q, k, v)
        with pytest.raises(attnd.InvalidError) as e:
            step.commit()
        assert e.value.detail == 1, "the first missing layer"
        with pytest.raises(attnd.InvalidError):
            step.commit([1, 1])
        step.attend(1, q, k, v)
        for accepted in (ROWS + 1, -1):
            with pytest.raises(attnd.InvalidError):
                step.commit([accepted])
        step.commit()
    for again in (step.commit, step.cancel, lambda: step.attend(0, q, k, v)):
        with pytest.raises(attnd.StaleError):
            again()


def test_a_sequence_in_two_steps(client: attnd.Client, seq: attnd.Sequence) -> None:
    with client.step([seq]):
        for busy in (lambda: client.step([seq]), seq.free, lambda: seq.truncate(0)):
            with pytest.raises(attnd.BusyError):
                busy()
    with pytest.raises(attnd.InvalidError):
        client.step([seq, seq])
    with client.step([seq]):  # the first step was cancelled at the end of its block
        pass


def test_append_of_nothing_leaves_a_sequence_as_it_is(
    client: attnd.Client, model: attnd.Model, seq: attnd.Sequence
) -> None:
    model.prefill([seq.append(ROWS)], q, k, v)
    other = model.sequence()
    nothing = seq.append(0, tokens=[], positions=[], tree_mask=np.ones((0, 0), bool))
    with client.step([nothing, other.append(2)]) as step:
        assert (step.rows, step.new_rows, step.committed) == (2, 2, (ROWS, 0))
        out = step.attend(0, q[:2], k[:2], v[:2])
        np.testing.assert_allclose(out, np.ones_like(q[:2]), rtol=1e-6)
        assert step.commit() == (ROWS, 2)
    with client.step([seq.append(0)]) as step:
        assert step.rows == 0
        assert step.attend(0, q[:0]).shape == (0, HEADS, DIM)
        with pytest.raises(attnd.InvalidError) as e:
            step.commit([1])
        assert e.value.field == "accepted"
        assert step.commit() == (ROWS,)
    assert len(seq) == ROWS


def test_a_closed_model_has_no_steps(client: attnd.Client) -> None:
    model, twice = (client.open_model("closed", **GEOMETRY) for _ in range(2))
    seq = model.sequence()
    model.prefill([seq.append(ROWS)], q, k, v)
    model.close()
    model.prefill([seq.append(ROWS)], q, k, v)  # it was opened twice
    twice.close()
    for call in (
        lambda: client.step([seq]),
        lambda: client.step([seq.read()]),
        lambda: model.decode([seq], q[:1], k[:1], v[:1]),
        model.sequence,
        lambda: model.attach("kept"),
        lambda: model.buffers(1),
    ):
        with pytest.raises(attnd.Error, match=f"model {model.id} is not open") as e:
            call()
        assert (e.value.code, e.value.field) == (attnd.ErrorCode.ENOENT, "model")
    client.open_model("closed", **GEOMETRY)
    with client.step([seq.read(1)]) as step:  # the sequence is as it was
        assert step.committed == (2 * ROWS,)
        np.testing.assert_allclose(step.attend(0, q[:1]), np.ones_like(q[:1]), rtol=1e-6)


def test_sequences_of_others(client: attnd.Client, daemon: Any, seq: attnd.Sequence) -> None:
    other_model = client.open_model("arguments-other", **GEOMETRY)
    with pytest.raises(attnd.InvalidError) as e:
        client.step([seq, other_model.sequence()])
    assert e.value.field == "seq"
    with attnd.connect(daemon.url) as other, pytest.raises(attnd.InvalidError) as e:
        other.step([seq])
    assert e.value.field == "seq"


def test_freed_sequence_is_stale(client: attnd.Client, seq: attnd.Sequence) -> None:
    seq.free()
    for call in (seq.free, seq.fork, lambda: seq.truncate(0), lambda: client.step([seq])):
        with pytest.raises(attnd.StaleError):
            call()


def test_no_room(client: attnd.Client, seq: attnd.Sequence) -> None:
    with pytest.raises(attnd.NoSpaceError):
        client.step([seq.append(1, reserve=10**8)])


@pytest.mark.parametrize("mask", [
    attnd.BlockMask(0, [[0]]),
    attnd.BlockMask(16, []),
    attnd.BlockMask(1, [[0]]),
    attnd.BlockMask(16, [[1]]),
    attnd.BlockMask(16, [[0, 0]]),
])
def test_a_bad_block_mask_is_refused(step: attnd.Step, mask: attnd.BlockMask) -> None:
    with pytest.raises(attnd.InvalidError) as e:
        step.attend(0, q, k, v, block_mask=mask)
    assert e.value.field == "block_mask"


def test_buffers_are_refused(client: attnd.Client, model: attnd.Model, step: attnd.Step) -> None:
    small = model.buffers(ROWS - 1)
    other = client.open_model("arguments-b", **GEOMETRY).buffers(ROWS)
    attend: Any = step.attend
    for field, call in (
        ("rows", lambda: attend(0, buffers=small)),
        ("buffers", lambda: attend(0, buffers=other)),
        ("buffers", lambda: attend(0, q, buffers=model.buffers(ROWS))),
        ("max_rows", lambda: model.buffers(-1)),
    ):
        with pytest.raises(attnd.InvalidError) as e:
            call()
        assert e.value.field == field


BAD_CONNECTS = {
    "transport": ("transport", attnd.ErrorCode.EINVAL, dict(transport="udp")),
    "timeout": ("timeout", attnd.ErrorCode.EINVAL, dict(timeout=-1.0)),
    "spin": ("spin_us", attnd.ErrorCode.EINVAL, dict(spin_us=-1)),
    "secret": ("secret", attnd.ErrorCode.EINVAL, dict(session=attnd.Session(1, b"short"))),
    "NUL": ("tenant", attnd.ErrorCode.EINVAL, dict(tenant="a\0")),
}


@pytest.mark.parametrize("what", BAD_CONNECTS)
def test_bad_connects(daemon: Any, what: str) -> None:
    field, code, opts = BAD_CONNECTS[what]
    bad: Any = opts
    with pytest.raises(attnd.Error) as e:
        attnd.connect(daemon.url, **bad)
    assert (e.value.code, e.value.field) == (code, field)


def test_a_block_mask_of_another_type_is_refused(step: attnd.Step) -> None:
    bad: Any = (16, [[0]])
    with pytest.raises(TypeError, match="^block_mask: tuple is no attnd.BlockMask"):
        step.attend(0, q, k, v, block_mask=bad)


def test_a_ring_needs_a_local_url() -> None:
    with pytest.raises(attnd.Error) as e:
        attnd.connect("tcp://127.0.0.1:1", transport="ring")
    assert e.value.code == attnd.ErrorCode.ENOTSUP


def test_errors_are_python_errors_and_travel() -> None:
    error = attnd.ConnectionError(attnd.ErrorCode.ECONN, "url", "nobody", 3)
    assert isinstance(error, ConnectionError) and str(error) == "ECONN: url: nobody"
    told = attnd.InvalidError(attnd.ErrorCode.EINVAL, "head_dim", "head_dim: not a whole number")
    assert str(told) == "EINVAL: head_dim: not a whole number"
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), copy.code, copy.field, copy.text, copy.detail) == (
        attnd.ConnectionError,
        -16,
        "url",
        "nobody",
        3,
    )
    assert issubclass(attnd.TimeoutError, TimeoutError)
    assert issubclass(attnd.InvalidError, ValueError)
