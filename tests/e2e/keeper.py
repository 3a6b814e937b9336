#!/usr/bin/env python3
"""Plays systemd to attnd: a notify socket, a descriptor store, restarts.

    keeper.py ATTND DECODER

A decoder generates text while attnd is stopped and started again as `systemctl restart` does it;
then attnd is started with descriptors that are not what they should be.
"""
import array
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

ATTND, DECODER = sys.argv[1:3]
FLAGS = ["--set", "cache.memory=16MiB", "--set", "cache.slab=1MiB", "--set", "compute.threads=1"]


class Systemd:
    """The service manager's side of sd_notify, and one unit."""

    def __init__(self, folder):
        self.folder = folder
        self.store = {}
        self.seen = set()
        self.path = folder + "/notify"
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(self.path)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        while True:
            data, ancillary, _, _ = self.sock.recvmsg(4096, 1024)
            fds = array.array("i")
            for _, kind, body in ancillary:
                if kind == socket.SCM_RIGHTS:
                    fds.frombytes(body[: len(body) // 4 * 4])
            lines = dict(line.split("=", 1) for line in data.decode().split("\n") if "=" in line)
            self.seen |= set(lines)
            name = lines.get("FDNAME", "stored")
            if "FDSTOREREMOVE" in lines:
                self.store.pop(name, None)
            if "FDSTORE" in lines:
                self.store[name] = fds.pop(0)
            for fd in fds:
                os.close(fd)

    def start(self, fds=None, flags=FLAGS):
        fds = dict(self.store if fds is None else fds)

        def child():
            high = [os.dup2(fd, 100 + i) for i, fd in enumerate(fds.values())]
            for i, fd in enumerate(high):
                os.dup2(fd, 3 + i)
                os.set_inheritable(3 + i, True)
            os.environ["LISTEN_PID"] = str(os.getpid())

        env = dict(os.environ, NOTIFY_SOCKET=self.path, LISTEN_FDS=str(len(fds)),
                   LISTEN_FDNAMES=":".join(fds), WATCHDOG_USEC="200000")
        code = ("import os,sys; os.environ['LISTEN_PID']=str(os.getpid());"
                "os.environ['WATCHDOG_PID']=str(os.getpid()); os.execv(sys.argv[1], sys.argv[1:])")
        self.log = open(self.folder + "/log", "a")
        before = self.log.tell()
        self.unit = subprocess.Popen(
            [sys.executable, "-c", code, ATTND, "--listen", f"ipc://{self.folder}/s", *flags],
            env=env, preexec_fn=child, close_fds=False, stdout=subprocess.PIPE, stderr=self.log)
        line = self.unit.stdout.readline().decode()
        assert line.startswith("attnd ready"), (line, self.whole_log())
        return self.whole_log()[before:]

    def whole_log(self):
        with open(self.folder + "/log") as f:
            return f.read()

    def stop(self):
        self.unit.send_signal(signal.SIGTERM)
        status = self.unit.wait(20)
        assert status == 0, status
        self.unit.stdout.close()


def memfd(size, sealed):
    import fcntl
    fd = os.memfd_create("bad", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if sealed:
        fcntl.fcntl(fd, 1033, 2 | 4)  # F_ADD_SEALS: shrink, grow
    return fd


def other_version(ledger, size):
    """A ledger of version 99, in both of its heads."""
    fd = memfd(size, True)
    for at in (0, 4096):
        head = bytearray(os.pread(ledger, 4096, at))
        head[8:12] = (99).to_bytes(4, "little")
        os.pwrite(fd, head, at)
    return fd


def restarts(systemd):
    url = f"ipc://{systemd.folder}/s"
    systemd.start()
    want = subprocess.run([DECODER, "ring", url, "3"], capture_output=True, check=True).stdout
    running = [subprocess.Popen([DECODER, how, url, "3", "25"], stdout=subprocess.PIPE)
               for how in ("ring", "nng")]
    try:
        restart(systemd, running, want)
    finally:
        for p in running:
            p.kill()


def restart(systemd, running, want):
    for _ in range(2):
        time.sleep(0.4)
        assert all(p.poll() is None for p in running), "a decoder ended too soon"
        systemd.stop()
        log = systemd.start()
        assert "recovered" in log and "2 sequences" in log, (log, systemd.whole_log())
    for p in running:
        got = p.communicate(timeout=60)[0]
        assert p.returncode == 0 and got == want, (p.returncode, got, want)
    deadline = time.time() + 5
    while "WATCHDOG" not in systemd.seen and time.time() < deadline:
        time.sleep(0.05)
    assert {"READY", "STATUS", "STOPPING", "WATCHDOG", "FDSTORE"} <= systemd.seen, systemd.seen
    systemd.stop()


def damage(systemd):
    good = dict(systemd.store)
    size = os.fstat(good["ledger"]).st_size
    arena = os.fstat(good["arena"]).st_size
    cases = [
        ({"arena": good["arena"], "ledger": memfd(4096, True)}, "no ledger"),
        ({"arena": good["arena"], "ledger": memfd(size, False)}, "no ledger"),
        ({"arena": good["arena"], "ledger": os.open("/dev/null", os.O_RDWR)}, "no ledger"),
        ({"arena": good["arena"], "ledger": other_version(good["ledger"], size)},
         "it has version 99"),
        ({"ledger": good["ledger"]}, "was not handed over"),
        ({"arena": memfd(4096, True), "ledger": good["ledger"]}, "4096 bytes, not"),
        ({"arena": memfd(arena, False), "ledger": good["ledger"]}, "not sealed"),
    ]
    for fds, line in cases:
        systemd.store = dict(fds)
        log = systemd.start()
        assert "the cache starts empty" in log and line in log, (line, log)
        out = subprocess.run([DECODER, "ring", f"ipc://{systemd.folder}/s", "3"],
                             capture_output=True, check=True).stdout
        assert out.count(b" ") == 99, out
        systemd.stop()
        log = systemd.start()  # what it made in their place is in the store
        assert "recovered" in log, log
        systemd.stop()
    systemd.store = {"arena": good["arena"]}
    assert "starts empty" not in systemd.start()
    systemd.stop()


def worker_of(keeper):
    """The pid of the keeper's child, None while it has none."""
    with open(f"/proc/{keeper}/task/{keeper}/children") as f:
        pids = f.read().split()
    return int(pids[0]) if pids else None


def crash_loop(systemd):
    """Three workers die before they are ready: the fourth begins with an empty cache."""
    systemd.start()
    fds = [os.stat(fd).st_ino for fd in systemd.store.values()]
    killed = {worker_of(systemd.unit.pid)}  # this one was ready, and does not count
    os.kill(*killed, signal.SIGKILL)
    deadline = time.time() + 20
    while len(killed) < 4:
        assert time.time() < deadline, "the keeper starts no worker"
        pid = worker_of(systemd.unit.pid)
        if pid and pid not in killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    line = systemd.unit.stdout.readline().decode()
    assert line.startswith("attnd ready"), line
    text = systemd.whole_log()
    assert "3 starts in a row failed: the cache is given up" in text, text
    deadline = time.time() + 5
    while time.time() < deadline and len(systemd.store) < 2:
        time.sleep(0.02)
    assert all(os.stat(fd).st_ino not in fds for fd in systemd.store.values())
    systemd.stop()


def write(path, **values):
    """Writes a configuration: keys of [server] in spin_us, of [cache] in memory."""
    with open(path + ".new", "w") as f:
        f.write("[server]\nspin_us = {spin_us}\n[cache]\nmemory = {memory}\nslab = 1MiB\n"
                "[compute]\nthreads = 1\n".format(**values))
    os.rename(path + ".new", path)


def wait_for(what, systemd):
    deadline = time.time() + 20
    while not what():
        assert time.time() < deadline, systemd.whole_log()
        time.sleep(0.002)


def status(url):
    attnctl = os.path.join(os.path.dirname(ATTND), "attnctl")
    return subprocess.run([attnctl, "-s", url, "--json", "status"], capture_output=True,
                          check=True).stdout.replace(b" ", b"").replace(b"\t", b"")


def kill_worker(systemd):
    """Kills the worker, and returns the pid of the next."""
    old = worker_of(systemd.unit.pid)
    os.kill(old, signal.SIGKILL)
    wait_for(lambda: worker_of(systemd.unit.pid) not in (None, old), systemd)
    return worker_of(systemd.unit.pid)


def edit(systemd, conf):
    """Edits the file beside six deaths; every worker must be the only one of its start."""
    kept = {name: os.fstat(fd).st_ino for name, fd in systemd.store.items()}
    write(conf, spin_us=52, memory="16MiB")
    systemd.unit.send_signal(signal.SIGHUP)
    wait_for(lambda: "server.spin_us = 52, was 51" in systemd.whole_log(), systemd)
    write(conf, spin_us="x", memory="16MiB")
    systemd.unit.send_signal(signal.SIGHUP)
    wait_for(lambda: "nothing was reloaded" in systemd.whole_log(), systemd)
    for i in range(6):
        if i == 4:
            write(conf, spin_us=53, memory="64MiB")
        pid = kill_worker(systemd)
        if i == 5:
            systemd.unit.send_signal(signal.SIGHUP)
        assert systemd.unit.stdout.readline().startswith(b"attnd ready"), systemd.whole_log()
        assert worker_of(systemd.unit.pid) == pid, systemd.whole_log()
    wait_for(lambda: "server.spin_us = 53, was 52" in systemd.whole_log(), systemd)
    assert "cache.memory = 64MiB takes effect at the next start, it is 16MiB" in systemd.whole_log()
    assert {name: os.fstat(fd).st_ino for name, fd in systemd.store.items()} == kept


def edits(systemd):
    """Workers die while the file is wrong, then while it has other sizes: all of them go on with
    what was in force, and with the cache.  A SIGHUP that comes between two reaches the second."""
    conf = systemd.folder + "/conf"
    write(conf, spin_us=51, memory="16MiB")
    systemd.start(fds={}, flags=["--config", conf])
    url = f"ipc://{systemd.folder}/s"
    want = subprocess.run([DECODER, "ring", url, "3"], capture_output=True, check=True).stdout
    running = subprocess.Popen([DECODER, "ring", url, "3", "25"], stdout=subprocess.PIPE)
    try:
        wait_for(lambda: b'"sequences":1' in status(url), systemd)
        time.sleep(0.1)  # it knows, too, that it has one
        edit(systemd, conf)
        got = running.communicate(timeout=60)[0]
    finally:
        running.kill()
    assert running.returncode == 0 and got == want, (running.returncode, got, want)
    systemd.stop()


with tempfile.TemporaryDirectory(prefix="attnd_keeper_") as where:
    unit = Systemd(where)
    try:
        restarts(unit)
        damage(unit)
        crash_loop(unit)
        edits(unit)
    finally:
        if unit.unit.poll() is None:
            unit.unit.kill()
print("keeper: 2 restarts under load, 8 kinds of wrong descriptors, a crash loop, "
      "6 deaths beside an edited configuration")
