"""Connections that come and go, threads, sessions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any, List

import attnd
import numpy as np
import pytest
from conftest import Daemon
from reference import attention

GEOMETRY: Any = dict(layers=1, q_heads=2, kv_heads=1, head_dim=8, dtype="f32")


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def qkv(seed: int, rows: int) -> Any:
    return normal(seed, rows, 2, 8), normal(seed + 1, rows, 1, 8), normal(seed + 2, rows, 1, 8)


def prompt(model: attnd.Model, seq: attnd.Sequence, rows: int = 5) -> None:
    q, k, v = qkv(1, rows)
    out = model.prefill([seq.append(rows)], q, k, v)
    np.testing.assert_allclose(out, attention(q, k, v, 0)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_daemon_restarts(own_daemon: Any, transport: str, how: int) -> None:
    with attnd.connect(own_daemon.url, transport=transport, timeout=10) as client:
        model = client.open_model("restart", **GEOMETRY)
        seq = model.sequence()
        prompt(model, seq)
        step = client.step([seq])
        buffers = model.buffers(2)
        session = client.session
        own_daemon.end(how)
        with pytest.raises(attnd.ConnectionError):
            step.attend(0, *qkv(4, 1))
        with pytest.raises(attnd.ConnectionError):
            client.open_model("more", **GEOMETRY)
        own_daemon.start()
        assert client.reconnect() is False
        assert client.session.id != session.id and client.transport == transport
        for stale in (
            lambda: step.attend(0, *qkv(4, 1)),
            step.commit,
            seq.fork,
            lambda: client.step([seq]),
            model.sequence,
            lambda: model.buffers(1),
            model.close,
        ):
            with pytest.raises(attnd.StaleError):
                stale()
        buffers.q[:] = 1  # its memory is still there
        model = client.open_model("restart", **GEOMETRY)
        seq = model.sequence()
        prompt(model, seq)
        with client.step([seq]) as step, pytest.raises(attnd.StaleError):
            step.attend(0, buffers=buffers)
        assert client.reconnect() is True, "nothing is lost"


def connect_soon(url: str, transport: str) -> attnd.Client:
    """Connects to a daemon whose next worker may yet have to start."""
    until = time.monotonic() + 5
    while True:
        try:
            return attnd.connect(url, transport=transport)
        except attnd.ConnectionError:
            assert time.monotonic() < until
            time.sleep(0.02)


def test_killed_worker(transport: str) -> None:
    kept_daemon = Daemon("--set", "cache.memory=64MiB", keeper=True)
    try:
        with attnd.connect(kept_daemon.url, transport=transport) as client:
            session = client.session
            model = client.open_model("killed", **GEOMETRY)
            seq = model.sequence()
            prompt(model, seq)
            step = client.step([model.sequence()])
            buffers = model.buffers(1)
            kept_daemon.kill_worker()
            with pytest.raises(attnd.ConnectionError):
                while True:
                    client.admin("stats")
            with connect_soon(kept_daemon.url, transport) as other:
                (known,) = other.admin("model_list")["models"]
                assert known == {"model": model.id, "name": "killed", "tenant": "default"}
            assert client.reconnect() is True
            (known,) = client.admin("model_list")["models"]
            assert known["name"] == "killed" and known["layers"] == model.layers
            assert client.session.id == session.id and client.transport == transport
            _, k, v = qkv(1, 5)
            q = normal(9, 1, 2, 8)
            with client.step([seq.read()]) as again:
                assert again.committed == (5,)
                want = attention(q, k, v, 4)[0]
                np.testing.assert_allclose(again.attend(0, q), want, rtol=1e-5, atol=1e-5)
                if transport == "ring":  # their memory belongs to the ring that is lost
                    with pytest.raises(attnd.StaleError):
                        again.attend(0, buffers=buffers)
            with pytest.raises(attnd.StaleError):
                step.commit()
    finally:
        kept_daemon.remove()


def test_no_daemon(transport: str) -> None:
    with pytest.raises(attnd.ConnectionError):
        attnd.connect("ipc:///tmp/attnd-nobody-is-here", transport=transport, timeout=0.3)


def test_session_of_a_daemon_that_is_gone(own_daemon: Any, transport: str) -> None:
    with attnd.connect(own_daemon.url, transport=transport) as client:
        session = client.session
    own_daemon.end()
    own_daemon.start()
    with pytest.raises(attnd.StaleError):
        attnd.connect(own_daemon.url, transport=transport, session=session)


def attach(model: attnd.Model, name: str) -> attnd.Sequence:
    """Attaches what a client kept that has just closed: the daemon may yet have to hear of that."""
    until = time.monotonic() + 5
    while True:
        try:
            return model.attach(name)
        except attnd.BusyError:
            assert time.monotonic() < until
            time.sleep(0.02)


def test_kept_sequence_is_attached_by_another_client(daemon: Any, transport: str) -> None:
    name = f"kept-{transport}"
    with attnd.connect(daemon.url, transport=transport) as client:
        model = client.open_model("kept", **GEOMETRY)
        seq = model.sequence()
        prompt(model, seq)
        seq.keep(name, ttl=60)
    with attnd.connect(daemon.url, transport=transport) as client:
        model = client.open_model("kept", **GEOMETRY)
        with attach(model, name) as seq:
            assert len(seq) == 5
            _, k, v = qkv(1, 5)
            q = normal(9, 1, 2, 8)
            with client.step([seq.read()]) as step:
                want = attention(q, k, v, 4)[0]
                np.testing.assert_allclose(step.attend(0, q), want, rtol=1e-5, atol=1e-5)


def test_a_sequence_has_a_priority(client: attnd.Client) -> None:
    model = client.open_model("kept", **GEOMETRY)
    with model.sequence(priority=9) as seq, model.sequence() as other:
        listed = {int(s["seq"], 16): s["priority"] for s in client.admin("seq_list")["sequences"]}
        assert listed[seq.id] == 9 and listed[other.id] == 0
    with pytest.raises(attnd.InvalidError, match="priority"):
        model.sequence(priority=256)


def test_a_session_frees_its_sequences(daemon: Any, transport: str) -> None:
    def in_use(of: attnd.Client) -> int:
        return int(of.admin("stats")["blocks"]["in_use"])

    with attnd.connect(daemon.url) as watcher:
        before = in_use(watcher)
        client = attnd.connect(daemon.url, transport=transport)
        model = client.open_model("frees", **GEOMETRY)
        prompt(model, model.sequence())
        assert in_use(watcher) > before
        client.close()
        client.close()  # once more does no harm
        until = time.monotonic() + 5
        while in_use(watcher) > before and time.monotonic() < until:
            time.sleep(0.02)
        assert in_use(watcher) == before
        for closed in (model.sequence, client.reconnect, lambda: client.limits):
            with pytest.raises(attnd.ConnectionError):
                closed()


def test_a_client_that_is_forgotten_closes(daemon: Any, transport: str) -> None:
    with attnd.connect(daemon.url) as watcher:
        before = int(watcher.admin("stats")["sessions"])
        client = attnd.connect(daemon.url, transport=transport)
        del client
        until = time.monotonic() + 5
        while int(watcher.admin("stats")["sessions"]) > before:
            assert time.monotonic() < until
            time.sleep(0.02)


def test_threads(client: attnd.Client) -> None:
    model = client.open_model("threads", **GEOMETRY)
    bad: List[BaseException] = []

    def talk(seed: int) -> None:
        try:
            k, v = np.empty((0, 1, 8)), np.empty((0, 1, 8))
            with model.sequence() as seq:
                for token in range(20):
                    q, new_k, new_v = qkv(100 * seed + token, 1)
                    k, v = np.concatenate([k, new_k]), np.concatenate([v, new_v])
                    with client.step([seq], deadline=5) as step:
                        out = step.attend(0, q, new_k, new_v)
                        step.commit()
                    want = attention(q, k, v, token)[0]
                    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
        except BaseException as e:
            bad.append(e)

    threads = [threading.Thread(target=talk, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not bad, bad


ROOM = (40 << 20) // (2 * 64 * 4)  # tokens of a head of 64 in 40 of 64 MiB


def waiting_step(client: attnd.Client, deadline: float) -> Any:
    """Two sequences of which the pool has room for one: the second step waits."""
    model = client.open_model("waiting", **{**GEOMETRY, "head_dim": 64})
    first = client.step([model.sequence().append(1, reserve=ROOM)])
    request = attnd.Request(client)
    ended: List[Any] = []

    def wait() -> None:
        try:
            with client.step([model.sequence().append(1, reserve=ROOM)], deadline=deadline,
                             request=request):
                ended.append(None)
        except attnd.Error as e:
            ended.append(e)

    thread = threading.Thread(target=wait)
    thread.start()
    while request.id.value == 0:
        time.sleep(0.01)
    time.sleep(0.1)
    return first, request, thread, ended


def test_a_step_that_waits_is_cancelled(client: attnd.Client) -> None:
    first, request, thread, ended = waiting_step(client, 20)
    request.cancel()
    thread.join(10)
    assert [e.code for e in ended] == [attnd.ErrorCode.ECANCELED]
    first.cancel()


def test_a_step_waits_for_blocks_while_others_run(client: attnd.Client) -> None:
    first, _, thread, ended = waiting_step(client, 20)
    assert thread.is_alive() and client.admin("stats")  # the wait holds nobody up
    first.cancel()
    thread.join(10)
    assert ended == [None]


def test_close_waits_for_calls(daemon: Any, transport: str) -> None:
    client = attnd.connect(daemon.url, transport=transport)
    _, _, thread, ended = waiting_step(client, 0.5)
    client.close()
    thread.join(10)
    assert [e.code for e in ended] == [attnd.ErrorCode.ENOSPC]


def test_a_child_of_fork_has_no_client(daemon: Any, transport: str) -> None:
    with attnd.connect(daemon.url, transport=transport) as client:
        model = client.open_model("fork", **GEOMETRY)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                model.sequence()
            except attnd.ConnectionError:
                client.close()
                status = 0
            os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        prompt(model, model.sequence())  # the parent's is as it was


def test_an_interpreter_ends_with_clients_open(daemon: Any, transport: str) -> None:
    program = f"""
import attnd, threading
client = attnd.connect({daemon.url!r}, transport={transport!r})
model = client.open_model("exit", layers=1, q_heads=1, kv_heads=1, head_dim=64, dtype="f32")
buffers = model.buffers(3)
room = {ROOM}
step = client.step([model.sequence().append(1, reserve=room)])
def wait(): client.step([model.sequence().append(1, reserve=room)], deadline=20)
threading.Thread(target=wait, daemon=True).start()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=15)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_admin(client: attnd.Client) -> None:
    assert "scheduler" in client.admin("stats")
    with pytest.raises(attnd.Error) as e:
        client.admin("attend")
    assert e.value.code == attnd.ErrorCode.ENOTSUP
    assert client.limits.step_rows >= 1024
