"""What arrays may be, and that none is copied."""

from __future__ import annotations

import array
import gc
import sys
from typing import Any, Iterator, Optional, Tuple

import attnd
import numpy as np
import pytest
from attnd import _dlpack
from reference import attention

HEADS, KV_HEADS, DIM, ROWS = 4, 2, 8, 6
rng = np.random.default_rng(8)


def normal(*shape: int) -> Any:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.fixture
def model(client: attnd.Client) -> attnd.Model:
    return client.open_model(
        "arrays", layers=1, q_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, dtype="f32"
    )


@pytest.fixture
def bf16_model(client: attnd.Client) -> attnd.Model:
    return client.open_model(
        "arrays-bf16", layers=1, q_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, dtype="bf16"
    )


@pytest.fixture
def step(client: attnd.Client, model: attnd.Model) -> Iterator[attnd.Step]:
    with model.sequence() as seq, client.step([seq.append(ROWS)]) as s:
        yield s


q, k, v = normal(ROWS, HEADS, DIM), normal(ROWS, KV_HEADS, DIM), normal(ROWS, KV_HEADS, DIM)
want, want_lse = attention(q, k, v, 0)


def check(out: Any) -> None:
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=1e-5, atol=1e-5)


class OnlyDLPack:
    """A tensor of some framework: DLPack, and nothing else."""

    def __init__(self, of: Any, *, old: bool = False, device: int = 1) -> None:
        self.of, self.old, self.device = of, old, device

    def __dlpack__(self, *, max_version: Optional[Tuple[int, int]] = None, **_: Any) -> object:
        if self.old and max_version is not None:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.of.__dlpack__(**({} if self.old else {"max_version": max_version}))

    def __dlpack_device__(self) -> Tuple[int, int]:
        return self.device, 0


def test_strided(step: attnd.Step) -> None:
    fused = np.empty((ROWS, HEADS + 2 * KV_HEADS, DIM), np.float32)  # as a projection makes it
    fused[:, :HEADS], fused[:, HEADS : HEADS + KV_HEADS], fused[:, HEADS + KV_HEADS :] = q, k, v
    views = np.split(fused, [HEADS, HEADS + KV_HEADS], axis=1)
    check(step.attend(0, *views))
    heads_first = [np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2) for x in (q, k, v)]
    check(step.attend(0, *heads_first))
    wide = np.zeros((ROWS, HEADS, 2 * DIM), np.float32)
    wide[..., :DIM] = q
    check(step.attend(0, wide[..., :DIM], k, v))


def test_outputs_of_the_caller(step: attnd.Step) -> None:
    out, lse = np.zeros_like(q), np.zeros((HEADS, ROWS), np.float32)
    got = step.attend(0, q, k, v, out=out, lse=lse)
    assert got[0] is out and got[1] is lse
    check(out)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)


def test_buffer_protocol(step: attnd.Step) -> None:
    def view(x: Any) -> Any:
        return memoryview(array.array("f", x.ravel())).cast("B").cast("f", x.shape)

    out = view(np.zeros_like(q))
    assert step.attend(0, view(q), view(k), view(v), out=out) is out
    check(np.asarray(out))


@pytest.mark.parametrize("old", [False, True])
def test_dlpack(step: attnd.Step, old: bool) -> None:
    out = np.zeros_like(q)
    packed = [OnlyDLPack(x, old=old) for x in (q, k, v)]
    counts = [sys.getrefcount(x) for x in (q, k, v)]
    step.attend(0, *packed, out=OnlyDLPack(out, old=old))
    check(out)
    check(np.from_dlpack(step.attend(0, *packed)))
    gc.collect()
    assert [sys.getrefcount(x) for x in (q, k, v)] == counts, "capsules are given back"


def test_dlpack_strides(step: attnd.Step) -> None:
    turned = [np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2) for x in (q, k, v)]
    check(step.attend(0, *(OnlyDLPack(x) for x in turned)))


def test_dlpack_of_another_device(step: attnd.Step) -> None:
    with pytest.raises(attnd.InvalidError) as e:
        step.attend(0, OnlyDLPack(q, device=2), k, v)
    assert e.value.field == "q"


def test_read_only_dlpack_is_no_output(step: attnd.Step) -> None:
    out = np.zeros_like(q)
    out.flags.writeable = False
    if np.lib.NumpyVersion(np.__version__) < "2.1.0":
        pytest.skip("this NumPy exports nothing that is read-only")
    with pytest.raises(attnd.InvalidError) as e:
        step.attend(0, q, k, v, out=OnlyDLPack(out))
    assert e.value.field == "out"


def test_bfloat16_round_trip(client: attnd.Client, bf16_model: attnd.Model) -> None:
    bits = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in (q, k, v)]
    out = np.zeros(q.shape, np.uint16)
    with bf16_model.sequence() as seq, client.step([seq.append(ROWS)]) as s:
        plain = s.attend(0, *bits).view(np.uint16)
        packed = [attnd.Bfloat16(x) for x in bits]
        s.attend(0, *packed, out=attnd.Bfloat16(out))
    np.testing.assert_array_equal(out, plain)
    assert len(_dlpack._exported) == 0, "capsules that were not consumed are given back"


def test_bfloat16_capsule_says_what_it_is() -> None:
    a = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)[:, :, ::2]
    seen = _dlpack.import_tensor("a", attnd.Bfloat16(a))
    assert (seen.dtype, seen.shape, seen.strides) == ("bf16", (2, 3, 2), (12, 4, 2))
    assert seen.address == a.ctypes.data
    for wrong in (np.zeros(3, np.float32), np.zeros(3, np.int16)):
        with pytest.raises(attnd.InvalidError):
            attnd.Bfloat16(wrong)


def test_bfloat16_by_jax(client: attnd.Client, bf16_model: attnd.Model) -> None:
    jnp = pytest.importorskip("jax.numpy")
    bits = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in (q, k, v)]
    theirs = [jnp.asarray((x.astype(np.uint32) << 16).view(np.float32), jnp.bfloat16) for x in bits]
    with bf16_model.sequence() as seq, client.step([seq.append(ROWS)]) as s:
        plain = s.attend(0, *bits).view(np.uint16)
        got = s.attend(0, *theirs)
        np.testing.assert_array_equal(got.view(np.uint16), plain)
        back = jnp.from_dlpack(attnd.Bfloat16(got))
        assert back.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(back).view(np.uint16), plain)


def test_torch(client: attnd.Client, bf16_model: attnd.Model, step: attnd.Step) -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(x.copy()) for x in (q, k, v)]
    out, lse = step.attend(0, *tensors, lse=True)
    assert isinstance(out, torch.Tensor) and isinstance(lse, torch.Tensor)
    check(out.numpy())
    given = torch.zeros(q.shape)
    assert step.attend(0, *(t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors),
                       out=given) is given
    check(given.numpy())
    with pytest.raises(attnd.InvalidError) as e:
        step.attend(0, tensors[0].clone().requires_grad_(), *tensors[1:])
    assert e.value.field == "q"
    with bf16_model.sequence() as seq, client.step([seq.append(ROWS)]) as s:
        got = s.attend(0, *(t.to(torch.bfloat16) for t in tensors))
        assert got.dtype == torch.bfloat16
        np.testing.assert_allclose(got.float().numpy(), want, rtol=0.02, atol=0.02)


# ---- buffers


def ring_ranges() -> Any:
    """The mappings of rings in this process."""
    with open("/proc/self/maps") as maps:
        lines = [line.split() for line in maps if "memfd:attnd-ring" in line]
    return [tuple(int(x, 16) for x in line[0].split("-")) for line in lines]


def in_a_ring(a: Any) -> bool:
    at = a.ctypes.data
    return any(begin <= at and at + a.nbytes <= end for begin, end in ring_ranges())


def test_buffers_lie_in_the_region(
    client: attnd.Client, model: attnd.Model, step: attnd.Step
) -> None:
    b = model.buffers(8, lse=True)
    assert b.q.shape == (8, HEADS, DIM) and b.k.shape == b.v.shape == (8, KV_HEADS, DIM)
    b.q[:ROWS], b.k[:ROWS], b.v[:ROWS] = q, k, v
    out, lse = step.attend(0, buffers=b)
    check(out)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)
    shared = client.transport == "ring"
    assert [in_a_ring(a) for a in (b.q, b.k, b.v, out, lse)] == [shared] * 5
    assert not out.flags.writeable and not lse.flags.writeable


def test_buffers_hold_bfloat16(client: attnd.Client, bf16_model: attnd.Model) -> None:
    bits = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in (q, k, v)]
    b = bf16_model.buffers(ROWS)
    for to, x in zip((b.q, b.k, b.v), bits):
        to.view(np.uint16)[:] = x
    with bf16_model.sequence() as seq, client.step([seq.append(ROWS)]) as s:
        plain = s.attend(0, *bits).view(np.uint16)
        np.testing.assert_array_equal(s.attend(0, buffers=b).view(np.uint16), plain)
    seen = _dlpack.import_tensor("q", attnd.Bfloat16(b.q))
    assert seen.address == b.q.ctypes.data


def test_arrays_outlive_buffers_and_client(daemon: Any) -> None:
    client = attnd.connect(daemon.url, transport="ring")
    model = client.open_model("arrays-life", layers=1, q_heads=1, kv_heads=1, head_dim=8,
                              dtype="f32")
    b = model.buffers(4)
    row = b.q[2]
    row[:] = 3
    del b
    client.close()
    gc.collect()
    assert len(ring_ranges()) >= 1 and in_a_ring(row)
    row += 1
    np.testing.assert_array_equal(row, np.full((1, 8), 4, np.float32))
    before = len(ring_ranges())
    del row
    gc.collect()
    assert len(ring_ranges()) == before - 1
