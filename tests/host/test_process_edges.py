"""Edges that touch other processes: the instance lock, sd_notify, commands with a deadline, abandoned reads."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agent.core.errors import TerminalError
from agent.host.command import run_command
from agent.host.lockfile import InstanceLock
from agent.host.notify import SystemdNotify, watchdog_seconds
from agent.host.scan import MAX_ABANDONED, Scan

HOLD = "import fcntl, os, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); f.write(f'{os.getpid()}\\n'); f.flush(); print('held', flush=True); sys.stdin.read()"


def test_a_second_agent_is_told_the_pid_of_the_first(tmp_path: Path):
    path = tmp_path / "agent.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        with pytest.raises(TerminalError, match=f"pid {first.pid} holds") as refused:
            InstanceLock(path).acquire()
        assert refused.value.reason == "AlreadyRunning"
        first.kill()
    with InstanceLock(path):  # the kernel dropped the lock with its process
        assert path.read_text() == f"{os.getpid()}\n"
    with InstanceLock(path):
        pass


def test_the_lock_file_is_for_its_owner_alone(tmp_path: Path):
    with InstanceLock(tmp_path / "lock"):
        assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


def test_states_reach_the_notify_socket_as_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify = SystemdNotify()
        notify.send("READY=1")
        notify.send("STATUS=8 GPUs · all good")
        assert manager.recv(100) == b"READY=1"
        assert manager.recv(100).decode() == "STATUS=8 GPUs · all good"
        notify.close()


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "180000000"}, 180.0),
        ({"WATCHDOG_USEC": "180000000", "WATCHDOG_PID": str(os.getpid())}, 180.0),
        ({"WATCHDOG_USEC": "180000000", "WATCHDOG_PID": "1"}, 0.0),
        ({"WATCHDOG_USEC": "soon"}, 0.0),
    ],
)
def test_how_long_systemd_waits_for_a_sign_of_life(
    environment: dict[str, str], seconds: float, monkeypatch: pytest.MonkeyPatch
):
    for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert watchdog_seconds() == seconds


def test_without_a_notify_socket_nothing_happens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify = SystemdNotify()
    notify.send("READY=1")
    notify.close()


async def test_a_command_gives_status_and_output():
    done = await run_command([sys.executable, "-c", "import sys; print('out'); sys.exit(3)"], 30)
    assert (done.status, done.stdout) == (3, "out\n")


async def test_a_command_past_its_deadline_is_killed():
    with pytest.raises(TimeoutError, match="did not end within"):
        await run_command([sys.executable, "-c", "import time; time.sleep(600)"], 0.1)


async def test_a_command_that_is_not_there_raises():
    with pytest.raises(FileNotFoundError):
        await run_command(["/nonexistent/systemctl"], 5)


async def test_reads_that_hang_are_abandoned_and_do_not_pile_up():
    release = threading.Event()
    scan: Scan[bool] = Scan("hanging read")
    for _ in range(MAX_ABANDONED):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(scan.run(lambda: release.wait(60)), 0.01)
    with pytest.raises(TimeoutError, match="earlier reads have not returned"):
        await scan.run(lambda: True)
    release.set()
    async with asyncio.timeout(30):
        while True:
            try:
                assert await scan.run(lambda: True)
                break
            except TimeoutError:
                await asyncio.sleep(0.01)


async def test_what_a_read_raises_reaches_its_caller():
    def fail() -> None:
        raise PermissionError("no")

    with pytest.raises(PermissionError):
        await Scan[None]("failing read").run(fail)
