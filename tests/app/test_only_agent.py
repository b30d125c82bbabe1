"""Two agents must never act on one host. The commands run in a mount namespace of their own, with a /run of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent.app import only_agent as module
from agent.app.only_agent import only_agent
from agent.app.paths import paths_for
from agent.core.errors import TerminalError

IN_A_RUN_OF_ITS_OWN = """
import ctypes, subprocess, sys
from agent.app.paths import HOST_LOCK
from agent.host.lockfile import InstanceLock
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):  # CLONE_NEWNS; MS_REC | MS_PRIVATE
    sys.exit(77)
if libc.mount(b"none", b"/run", b"tmpfs", 0, None):
    sys.exit(77)
HOST_LOCK.parent.mkdir(parents=True)
with InstanceLock(HOST_LOCK):
    sys.exit(subprocess.run([sys.executable, "-m", "agent.app.main", *sys.argv[1:]], timeout=60).returncode)
"""


@pytest.fixture(autouse=True)
def host_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "run/gpu-host-agent/host.lock"
    monkeypatch.setattr(module, "HOST_LOCK", path)
    return path


def test_a_real_host_has_one_agent_whatever_their_roots(tmp_path: Path, host_lock: Path):
    first, second = (paths_for(str(tmp_path / name), None, "real") for name in ("a", "b"))
    with only_agent("real", first):
        with pytest.raises(TerminalError, match=str(host_lock)) as refused, only_agent("real", second):
            pytest.fail("a second agent acts on the same host")
        assert refused.value.reason == "AlreadyRunning"
    with only_agent("real", second):
        assert host_lock.read_text() == f"{os.getpid()}\n"


def test_simulated_hosts_have_one_agent_for_each_root_and_are_in_no_real_ones_way(
    tmp_path: Path, host_lock: Path
):
    real, first, second = (paths_for(str(tmp_path / name), None, "sim") for name in ("real", "a", "b"))
    with (
        only_agent("real", real), only_agent("sim", first), only_agent("sim", second),
        pytest.raises(TerminalError, match=str(first.lock)), only_agent("sim", first),
    ):  # fmt: skip
        pytest.fail("a second agent uses the same state")
    host_lock.unlink()
    with only_agent("sim", first):
        assert not host_lock.exists()


@pytest.mark.parametrize("command", ["run", "apply"])
def test_every_command_that_acts_is_refused_beside_an_agent_with_another_root(tmp_path: Path, command: str):
    done = subprocess.run(
        [sys.executable, "-c", IN_A_RUN_OF_ITS_OWN, command, "--host", "real", "--root", str(tmp_path / "x")],
        check=False, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    if done.returncode == 77:
        pytest.skip("a mount namespace needs root")
    assert done.returncode == 1, done.stderr
    assert "another agent is running" in done.stderr
    assert "/run/gpu-host-agent/host.lock" in done.stderr
    assert not (tmp_path / "x").exists()
