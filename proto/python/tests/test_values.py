"""Outputs against float64 attention."""

from __future__ import annotations

from typing import Any, Dict, Tuple

import attnd
import numpy as np
import pytest
from reference import attention, rope

HEADS, KV_HEADS, DIM = 6, 2, 16
rng = np.random.default_rng(7)
names = (f"values-{i}" for i in range(10**6))


def normal(*shape: int) -> Any:
    return rng.standard_normal(shape).astype(np.float32)


def qkv(rows: int, v_dim: int = DIM) -> Tuple[Any, Any, Any]:
    return normal(rows, HEADS, DIM), normal(rows, KV_HEADS, DIM), normal(rows, KV_HEADS, v_dim)


def open_model(client: attnd.Client, **opts: Any) -> attnd.Model:
    geometry: Dict[str, Any] = dict(
        layers=1, q_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, dtype="f32"
    )
    return client.open_model(next(names), **{**geometry, **opts})


def check(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    assert got.shape == want.shape
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance)


def test_layers_prompt_and_tokens(client: attnd.Client) -> None:
    model = open_model(client, layers=3, v_head_dim=8)
    seq = model.sequence()
    k, v = [np.empty((0, KV_HEADS, DIM))] * 3, [np.empty((0, KV_HEADS, 8))] * 3
    for count in (37, 1, 1, 5):
        with client.step([seq.append(count)], deadline=1) as step:
            assert (step.rows, step.new_rows) == (count, count)
            for layer in (2, 0, 1):
                q, new_k, new_v = qkv(count, 8)
                k[layer] = np.concatenate([k[layer], new_k])
                v[layer] = np.concatenate([v[layer], new_v])
                out, lse = step.attend(layer, q, new_k, new_v, lse=True)
                want, want_lse = attention(q, k[layer], v[layer], seq.length)
                check(out, want)
                check(lse, want_lse)
            before = seq.length
            assert step.commit() == (before + count,)
        assert len(seq) == before + count
    seq.free()
    model.close()


LAYERS: Dict[str, Tuple[attnd.Layer, Dict[str, Any]]] = {
    "scale": (attnd.Layer(softmax_scale=0.6), dict(scale=0.6)),
    "softcap": (attnd.Layer(softcap=1.5), dict(softcap=1.5)),
    "window": (attnd.Layer(window_size=(5, 0)), dict(window=(5, 0))),
    "sinks": (attnd.Layer(sinks=[0.5, -1, 2, 0, 1, 3]), dict(sinks=[0.5, -1, 2, 0, 1, 3])),
    "alibi": (
        attnd.Layer(alibi_slopes=[0.5, 0.25, 0.1, 1, 2, 0]),
        dict(alibi=[0.5, 0.25, 0.1, 1, 2, 0]),
    ),
}


@pytest.mark.parametrize("what", LAYERS)
def test_layer_options(client: attnd.Client, what: str) -> None:
    layer, how = LAYERS[what]
    model = open_model(client, layers=2, per_layer=[attnd.Layer(), layer])
    q, k, v = qkv(21)
    with model.sequence() as seq, client.step([seq.append(21)]) as step:
        check(step.attend(0, q, k, v), attention(q, k, v, 0)[0])
        out, lse = step.attend(1, q, k, v, lse=True)
        want, want_lse = attention(q, k, v, 0, **how)
        check(out, want)
        check(lse, want_lse)
        step.cancel()


def test_not_causal(client: attnd.Client) -> None:
    model = open_model(client, causal=False)
    q, k, v = qkv(9)
    with model.sequence() as seq:
        check(model.prefill([seq.append(9)], q, k, v), attention(q, k, v, 0, causal=False)[0])


@pytest.mark.parametrize("pairs", [False, True])
def test_rope_at_positions(client: attnd.Client, pairs: bool) -> None:
    inv_freq = [1.0, 0.3, 0.1, 0.03]
    model = open_model(client, layer=attnd.Layer(rope=attnd.Rope(inv_freq, 1.2, pairs)))
    positions = [3, 1, 4, 1, 5, 9]
    q, k, v = qkv(6)
    with model.sequence() as seq, client.step([seq.append(6, positions=positions)]) as step:
        turned_q, turned_k = (rope(x, positions, inv_freq, 1.2, pairs) for x in (q, k))
        check(step.attend(0, q, k, v), attention(turned_q, turned_k, v, 0)[0])


def test_batch_with_read_only_rows(client: attnd.Client) -> None:
    model = open_model(client)
    a, b = model.sequence(), model.sequence()
    q, k, v = qkv(12)
    model.prefill([a.append(12)], q, k, v)
    with client.step([b.append(4), a.read(3)]) as step:
        assert (step.rows, step.new_rows, step.committed) == (7, 4, (0, 12))
        q2, k2, v2 = normal(7, HEADS, DIM), *qkv(4)[1:]
        out = step.attend(0, q2, k2, v2)
        check(out[:4], attention(q2[:4], k2, v2, 0)[0])
        check(out[4:], attention(q2[4:], k, v, 9)[0])
        assert step.commit() == (4, 12)


def test_decode(client: attnd.Client) -> None:
    model = open_model(client)
    seqs = [model.sequence() for _ in range(3)]
    have = []
    for i, seq in enumerate(seqs):
        q, k, v = qkv(10 + i)
        model.prefill([seq.append(10 + i)], q, k, v)
        have.append((k, v))
    q, k, v = qkv(3)
    ran = attnd.Ran()
    out, lse = model.decode(seqs, q, k, v, lse=True, ran=ran)
    for i, (old_k, old_v) in enumerate(have):
        all_k, all_v = np.concatenate([old_k, k[i : i + 1]]), np.concatenate([old_v, v[i : i + 1]])
        want, want_lse = attention(q[i : i + 1], all_k, all_v, 10 + i)
        check(out[i : i + 1], want)
        check(lse[:, i : i + 1], want_lse)
        assert seqs[i].length == 11 + i
    assert ran.kernel and ran.batch_rows >= 3


def test_a_layer_that_reads_another(client: attnd.Client) -> None:
    model = open_model(client, layers=2, per_layer=[attnd.Layer(), attnd.Layer(kv_layer=0)])
    q, k, v = qkv(5)
    with model.sequence() as seq, client.step([seq.append(5)]) as step:
        step.attend(0, q, k, v)
        q2 = normal(5, HEADS, DIM)
        check(step.attend(1, q2), attention(q2, k, v, 0)[0])


def test_tree_and_path(client: attnd.Client) -> None:
    model = open_model(client)
    seq = model.sequence()
    q0, k0, v0 = qkv(8)
    model.prefill([seq.append(8)], q0, k0, v0)
    tree = np.zeros((4, 4), bool)  # 0 with children 1 and 2, 2 with child 3
    for i, line in enumerate([[0], [0, 1], [0, 2], [0, 2, 3]]):
        tree[i, line] = True
    q, k, v = qkv(4)
    with client.step([seq.append(4, tree_mask=tree, positions=[8, 9, 9, 10])]) as step:
        out = step.attend(0, q, k, v)
        seen = np.concatenate([np.ones((4, 8), bool), tree], axis=1)
        all_k, all_v = np.concatenate([k0, k]), np.concatenate([v0, v])
        check(out, attention(q, all_k, all_v, 8, causal=False, visible=seen)[0])
        assert step.commit([[0, 2, 3]]) == (11,)
    kept_k, kept_v = np.concatenate([k0, k[[0, 2, 3]]]), np.concatenate([v0, v[[0, 2, 3]]])
    with client.step([seq.read(1)]) as step:
        q = normal(1, HEADS, DIM)
        check(step.attend(0, q), attention(q, kept_k, kept_v, 10)[0])


def test_block_mask(client: attnd.Client) -> None:
    model = open_model(client, block_tokens=16)
    a, b = model.sequence(), model.sequence()
    q, k, v = qkv(60)
    lists = [[0], [1, 2], [], [0, 1], [1]]  # of a's 40 rows in blocks of 16, and of b's 20
    out = None
    with client.step([a.append(40), b.append(20)]) as step:
        out, lse = step.attend(0, q, k, v, lse=True, block_mask=attnd.BlockMask(16, lists))
    for first, count, own in ((0, 40, lists[:3]), (40, 20, lists[3:])):
        rows = slice(first, first + count)
        blocks = np.arange(count) // 16
        seen = np.array([np.isin(blocks, own[i // 16]) for i in range(count)])
        want, want_lse = attention(q[rows], k[rows], v[rows], 0, visible=seen)
        check(out[rows], want)
        check(lse[:, rows], want_lse)


def test_fork_truncate_and_fewer_accepted(client: attnd.Client) -> None:
    model = open_model(client)
    seq = model.sequence()
    q, k, v = qkv(20)
    with client.step([seq.append(20)]) as step:
        step.attend(0, q, k, v)
        assert step.commit([17]) == (17,)
    other = seq.fork()
    assert other.length == 17
    other.truncate(6)
    q = normal(1, HEADS, DIM)
    for s, n in ((seq, 17), (other, 6)):
        with client.step([s.read()]) as step:
            check(step.attend(0, q), attention(q, k[:n], v[:n], n - 1)[0])


def test_step_carries_a_commit(client: attnd.Client) -> None:
    model = open_model(client)
    seq = model.sequence()
    q, k, v = qkv(3)
    one = client.step([seq.append(3)])
    one.attend(0, q, k, v)
    with client.step([seq.read()], commit=one, accepted=[2]) as two:
        assert seq.length == 2 and two.committed == (2,) and not one.is_open
        q = normal(1, HEADS, DIM)
        check(two.attend(0, q), attention(q, k[:2], v[:2], 1)[0])


def test_partial_leaves_sinks_out(client: attnd.Client) -> None:
    model = open_model(client, layer=attnd.Layer(sinks=[1.0] * HEADS))
    q, k, v = qkv(4)
    with model.sequence() as seq, client.step([seq.append(4)]) as step:
        check(step.attend(0, q, k, v, partial=True), attention(q, k, v, 0)[0])


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_sixteen_bits(client: attnd.Client, dtype: str) -> None:
    if dtype == "bf16":
        kind: Any = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    else:
        kind = np.dtype(np.float16)
    model = open_model(client, dtype=dtype)
    q, k, v = (x.astype(kind) for x in qkv(33))
    with model.sequence() as seq, client.step([seq.append(33)]) as step:
        out = step.attend(0, q, k, v)
        assert out.dtype == kind
        # Half a unit in the last place of out, and of the probabilities: 2^-9 or 2^-12, each.
        unit = 2.0**-8 if dtype == "bf16" else 2.0**-11
        check(out, attention(q, k, v, 0)[0], 2 * unit)


def test_bfloat16_as_uint16(client: attnd.Client) -> None:
    model = open_model(client, dtype="bf16")
    exact = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in qkv(9)]
    f, g, h = ((x.astype(np.uint32) << 16).view(np.float32) for x in exact)
    out = np.empty((9, HEADS, DIM), np.uint16)
    with model.sequence() as seq, client.step([seq.append(9)]) as step:
        assert step.attend(0, *exact, out=out) is out
        got = (out.astype(np.uint32) << 16).view(np.float32)
        check(got, attention(f, g, h, 0)[0], 2.0**-7)


def test_float8_cache(client: attnd.Client) -> None:
    layer = attnd.Layer(k_scale=[0.5, 2], v_scale=[1, 0.25])
    model = open_model(client, dtype="f16", kv_dtype="f8e4m3", layer=layer)
    # Multiples of a quarter below 4 in units of the scale: exact in 8 bits.
    q = normal(7, HEADS, DIM).astype(np.float16)
    k = rng.integers(-7, 8, (7, KV_HEADS, DIM)) * 0.25 * np.array([0.5, 2])[:, None]
    v = rng.integers(-7, 8, (7, KV_HEADS, DIM)) * 0.25 * np.array([1, 0.25])[:, None]
    with model.sequence() as seq, client.step([seq.append(7)]) as step:
        out = step.attend(0, q, k.astype(np.float16), v.astype(np.float16))
        check(out, attention(q, k, v, 0)[0], 2.0**-9)
