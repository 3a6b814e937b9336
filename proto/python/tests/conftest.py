"""A real daemon on a folder of its own, of the build that $ATTND_BUILD names (build/release)."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Iterator, List, Optional

import attnd
import pytest

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path(os.environ.get("ATTND_BUILD", ROOT / "build/release"))


class Daemon:
    """attnd on a socket of its own; it can be stopped, killed, and started again there.

    With a keeper its worker can be killed, too, and the cache survives that.
    """

    def __init__(self, *flags: str, keeper: bool = False) -> None:
        self.dir = tempfile.mkdtemp(prefix="attnd-py-")
        self.url = f"ipc://{self.dir}/s"
        self.flags = [*flags, *([] if keeper else ["--no-keeper"])]
        self.process: Optional[subprocess.Popen[bytes]] = None
        self.start()

    def start(self) -> None:
        command: List[str] = [str(BUILD / "attnd"), "--listen", self.url, *self.flags]
        with open(f"{self.dir}/log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        said = b""
        while b"attnd ready" not in said:
            readable, _, _ = select.select([self.process.stdout], [], [], 30)
            chunk = os.read(self.process.stdout.fileno(), 4096) if readable else b""
            if not chunk:
                pytest.fail("the daemon does not start:\n" + Path(self.dir, "log").read_text())
            said += chunk

    def kill_worker(self) -> None:
        assert self.process is not None
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)

    def end(self, how: int = signal.SIGTERM) -> int:
        assert self.process is not None and self.process.stdout is not None
        self.process.send_signal(how)
        status = self.process.wait(20)
        self.process.stdout.close()
        self.process = None
        return status

    def remove(self) -> None:
        if self.process is not None:
            assert self.end() == 0, Path(self.dir, "log").read_text()
        shutil.rmtree(self.dir)


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    d = Daemon("--set", "cache.memory=64MiB")
    yield d
    d.remove()


@pytest.fixture
def own_daemon() -> Iterator[Daemon]:
    """A daemon that the test may end; it does not wait for steps that stay open."""
    d = Daemon("--set", "cache.memory=64MiB", "--set", "server.drain_timeout=0s")
    yield d
    d.remove()


@pytest.fixture(params=["ring", "nng"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(daemon: Daemon, transport: str) -> Iterator[attnd.Client]:
    with attnd.connect(daemon.url, transport=transport) as c:
        assert c.transport == transport
        yield c
