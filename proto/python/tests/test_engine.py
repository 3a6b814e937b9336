"""Attention in this process, over the daemon's arena."""

from __future__ import annotations

import os
from typing import Any, Dict, List

import attnd
import numpy as np
import pytest
from conftest import BUILD, Daemon

ENGINES = BUILD / "attention/libattn.so"
needs_engines = pytest.mark.skipif(not ENGINES.exists(), reason="no libattn.so")


def talk(client: attnd.Client) -> List[Any]:
    rng = np.random.default_rng(1)
    model = client.open_model("m", layers=2, q_heads=4, kv_heads=2, head_dim=16, dtype="f32")
    seq = model.sequence()
    outs = []
    for rows in (20, 1, 1, 3):
        with client.step([seq.append(rows)], deadline=5.0) as step:
            for layer in range(2):
                q, k, v = (rng.standard_normal((rows, h, 16), dtype=np.float32) for h in (4, 2, 2))
                outs.append(step.attend(layer, q, k, v))
            step.commit()
    return outs


@needs_engines
def test_outputs_have_the_bits_of_the_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTND_ENGINES", str(ENGINES))
    daemon = Daemon("--set", "cache.memory=64MiB", "--set", "compute.deterministic=on", "--set",
                    f"server.in_process_uids={os.getuid()}")
    with attnd.connect(daemon.url) as there, attnd.connect(daemon.url, engine="cpu") as here:
        for a, b in zip(talk(there), talk(here)):
            assert np.array_equal(a, b)
    daemon.remove()


@needs_engines
def test_who_is_not_named_gets_no_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTND_ENGINES", str(ENGINES))
    daemon = Daemon("--set", "cache.memory=64MiB")
    with pytest.raises(attnd.Error) as e:
        attnd.connect(daemon.url, engine="cpu")
    assert e.value.code == attnd.ErrorCode.EPERM and e.value.field == "engine"
    daemon.remove()


@needs_engines
def test_without_a_gpu_there_is_no_service_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTND_ENGINES", str(ENGINES))
    daemon = Daemon("--set", "cache.memory=64MiB")  # on the CPU, whatever the client has
    with pytest.raises(attnd.Error) as e:
        attnd.connect(daemon.url, engine="cuda", mode="service")
    assert e.value.code == attnd.ErrorCode.ENOTSUP
    daemon.remove()


@pytest.mark.parametrize("options, field", [
    ({"engine": "foo"}, "engine"),
    ({"mode": "service"}, "mode"),
    ({"mode": "service", "engine": "cpu"}, "mode"),
    ({"mode": "client", "engine": "cuda"}, "mode"),
    ({"engine": "cpu", "region_bytes": 1 << 20}, "region_bytes"),
    ({"region_bytes": 1 << 20}, "region_bytes"),
])
def test_options_that_make_no_sense_are_refused(options: Dict[str, Any], field: str) -> None:
    with pytest.raises(attnd.Error) as e:
        attnd.connect("ipc:///nonexistent/s", **options)
    assert e.value.code == attnd.ErrorCode.EINVAL and e.value.field == field


@pytest.mark.parametrize("options, why", [
    ({"region_bytes": 4096}, "there is no engine"),
    ({"engine": "cpu", "region_bytes": 4096}, "'cpu' attends in process"),
    ({"engine": "cpu", "mode": "service"}, "in-process of cpu and cuda, service of cuda"),
    ({"engine": "gpu"}, "none of cpu, cuda"),
    ({"transport": "messages"}, "none of auto, nng, ring"),
])
def test_options_that_are_refused_say_what_there_is(options: Dict[str, Any], why: str) -> None:
    with pytest.raises(attnd.Error, match=why):
        attnd.connect("ipc:///nonexistent/s", **options)


def test_an_engine_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTND_ENGINES", "/nonexistent/libattn.so")
    with pytest.raises(attnd.Error) as e:
        attnd.connect("ipc:///nonexistent/s", engine="cpu")
    assert e.value.code == attnd.ErrorCode.ENOTSUP and e.value.field == "engine"


def test_an_engine_without_cuda_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTND_ENGINES", "libc.so.6")
    with pytest.raises(attnd.Error, match="libc.so.6 was built without CUDA"):
        attnd.connect("ipc:///nonexistent/s", engine="cuda")
