"""attnd.torch on a GPU against scaled dot products in float32.  Needs torch, a GPU and libattn.so."""

from __future__ import annotations

import math
import os
from typing import Any, Iterator, List

import attnd
import pytest
from conftest import BUILD, Daemon

torch = pytest.importorskip("torch")
ENGINES = BUILD / "attention/libattn.so"
if not torch.cuda.is_available() or not ENGINES.exists():
    pytest.skip("no GPU, or no libattn.so", allow_module_level=True)

LAYERS, Q_HEADS, KV_HEADS, DIM = 2, 8, 2, 64


@pytest.fixture(params=["in-process", "service"])
def client(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[attnd.Client]:
    monkeypatch.setenv("ATTND_ENGINES", str(ENGINES))
    daemon = Daemon("--device", "cuda:0", "--set", "cache.memory=256MiB", "--set",
                    f"server.in_process_uids={os.getuid()}")
    with attnd.connect(daemon.url, engine="cuda", mode=str(request.param)) as c:
        yield c
    daemon.remove()


class Mirror:
    """The same tokens, and what attention over them is."""

    def __init__(self) -> None:
        self.k = [torch.empty((0, KV_HEADS, DIM), device="cuda") for _ in range(LAYERS)]
        self.v = [torch.empty((0, KV_HEADS, DIM), device="cuda") for _ in range(LAYERS)]

    def check(self, layer: int, q: Any, k: Any, v: Any, out: Any) -> None:
        self.k[layer] = torch.cat([self.k[layer], k.float()])
        self.v[layer] = torch.cat([self.v[layer], v.float()])
        group = Q_HEADS // KV_HEADS
        keys, values = (t[layer].repeat_interleave(group, 1) for t in (self.k, self.v))
        x = torch.einsum("ihd,jhd->hij", q.float(), keys) / math.sqrt(DIM)
        n, total = q.shape[0], keys.shape[0]
        seen = torch.arange(total, device="cuda") <= torch.arange(n, device="cuda")[:, None] + total - n
        p = x.masked_fill(~seen, -math.inf).softmax(-1)
        want = torch.einsum("hij,jhd->ihd", p, values)
        assert (out.float() - want).abs().max() < 0.02  # some ulp of bf16 around 1


def random(rows: int) -> List[Any]:
    return [torch.randn((rows, h, DIM), device="cuda", dtype=torch.bfloat16)
            for h in (Q_HEADS, KV_HEADS, KV_HEADS)]


def test_outputs_are_those_of_attention(client: attnd.Client) -> None:
    import attnd.torch as at

    model = client.open_model("m", layers=LAYERS, q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=DIM,
                              dtype="bf16")
    seqs, mirrors = [model.sequence(), model.sequence()], [Mirror(), Mirror()]
    for rows in (40, 1, 1, 5):
        step = client.step([s.append(rows) for s in seqs], deadline=5.0)
        for layer in range(LAYERS):
            q, k, v = random(2 * rows)
            out = at.attend(step, layer, q, k, v)
            for i, mirror in enumerate(mirrors):
                at_rows = slice(i * rows, (i + 1) * rows)
                mirror.check(layer, q[at_rows], k[at_rows], v[at_rows], out[at_rows])
        step.commit()
    with pytest.raises(attnd.Error) as e:
        client.step(seqs, deadline=5.0).attend(0, *[t.cpu().view(torch.uint16) for t in random(2)])
    assert e.value.field == "q"


def test_a_graph_follows_growing_sequences(client: attnd.Client) -> None:
    import attnd.torch as at

    model = client.open_model("m", layers=LAYERS, q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=DIM,
                              dtype="bf16")
    seq, mirror = model.sequence(), Mirror()
    inputs = [random(1) for _ in range(LAYERS)]
    step = client.step([seq], deadline=5.0)
    graph = at.Graph(step, lambda s: [at.attend(s, i, *inputs[i]) for i in range(LAYERS)])
    for _ in range(100):
        for tensors in inputs:
            for t in tensors:
                t.normal_()
        graph.replay(step)
        for layer in range(LAYERS):
            q, k, v = inputs[layer]
            mirror.check(layer, q, k, v, graph.result[layer])
        step = client.step([seq], deadline=5.0, commit=step)
    assert step.committed == (100,)


def test_tensors_of_the_region_are_used_where_they_are(client: attnd.Client) -> None:
    import attnd.torch as at

    if client.mode != "service":
        with pytest.raises(attnd.Error) as e:
            at.empty(client, (1,), torch.bfloat16)
        assert e.value.field == "mode"
        return
    rows = 9
    model = client.open_model("m", layers=LAYERS, q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=DIM,
                              dtype="bf16")
    seq, mirror = model.sequence(), Mirror()
    qkv = at.empty(client, (rows, Q_HEADS + 2 * KV_HEADS, DIM), torch.bfloat16)
    out = at.empty(client, (rows, Q_HEADS, DIM), torch.bfloat16)
    assert qkv.data_ptr() % 256 == 0 and out.data_ptr() % 256 == 0
    q, k, v = qkv.split([Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
    for _ in range(3):
        step = client.step([seq.append(rows)], deadline=5.0)
        for layer in range(LAYERS):
            qkv.normal_()
            assert at.attend(step, layer, q, k, v, out=out) is out
            mirror.check(layer, q, k, v, out)
        step.commit()
    with pytest.raises(attnd.NoSpaceError):
        at.empty(client, (1 << 40,), torch.bfloat16)
    for _ in range(100):  # what goes is used again
        at.empty(client, (16 << 20,), torch.bfloat16)


def test_what_went_wrong_comes_out_at_the_commit(client: attnd.Client) -> None:
    import attnd.torch as at

    if client.mode != "service":
        return
    model = client.open_model("m", layers=LAYERS, q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=DIM,
                              dtype="bf16")
    step = client.step([model.sequence().append(3)], deadline=5.0)
    at.attend(step, LAYERS, *random(3))  # there is none
    torch.cuda.current_stream().synchronize()
    with pytest.raises(attnd.InvalidError):
        step.commit()
    step.cancel()
