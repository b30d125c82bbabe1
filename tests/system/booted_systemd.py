"""A real systemd as PID 1 in namespaces of its own, over this machine's files and out of reach of everything else.

``ring.sh`` makes it: an overlay of the root whose changes live in memory; its own mounts, processes, IPC, host name,
cgroups and network; its own /tmp, /run, /dev, and a view of /sys that cannot be written. It ends when its PID 1 is
killed, or when the process that booted it dies.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

from tests.system.requirements import need, need_programs, need_root

REPOSITORY = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("ring.sh")
BOOT = 60.0  # seconds from nothing to a booted system
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CONSOLE = 64 << 10  # bytes of the console that are kept
# Where the ring has this tree and the environment of this Python: no /tmp and no home, which sandboxes hide.
TREE = "/opt/gpu-host-agent/tree"
PYTHON = "/opt/gpu-host-agent/venv/bin/python" if sys.prefix != sys.base_prefix else sys.executable
AGENT = f"""#!/bin/sh
export PYTHONPATH={TREE} PYTHONDONTWRITEBYTECODE=1
exec {PYTHON} -m agent.app.main "$@"
"""


class RingError(Exception):
    """The ring did not boot, or a command in it failed that was expected to succeed."""


def need_booted_systemd() -> None:
    """Skip, or fail in CI, where a ring cannot be booted."""
    need_root()
    need(Path("/lib/systemd/systemd").exists(), "needs systemd: apt-get install systemd")
    need_programs(
        unshare="util-linux", nsenter="util-linux", setpriv="util-linux", dbus_daemon="dbus", ps="procps"
    )
    kinds = Path("/proc/filesystems").read_text().split()
    for kind in ("overlay", "cgroup2", "tmpfs"):
        need(kind in kinds, f"needs the file system {kind} in this machine's kernel: modprobe {kind}")


class BootedSystemd:
    """Raises RingError where it does not boot in time."""

    def __init__(self) -> None:
        self.name = f"gpu-host-agent-ring-{uuid.uuid4().hex[:12]}"
        self.work = Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
        self._master, slave = os.openpty()
        self._console = bytearray()
        self._launcher = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private", "--"),
                *("sh", str(SCRIPT), "enter", str(self.work), self.name, os.ttyname(slave), *_shared()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        threading.Thread(target=self._drain, daemon=True).start()
        self.pid = 0  # of the ring's PID 1, in this machine's count
        try:
            self._wait_for_boot()
        except BaseException:
            self.close()
            raise

    def run(self, argv: list[str], timeout: float = 30.0, stdin: str = "") -> tuple[int, str]:
        """A command as root in the ring, outside every unit: (status, stdout and stderr). 124: it took too long."""
        inside = ["env", "-i", f"PATH={PATH}", "LANG=C.UTF-8", "HOME=/", "SYSTEMD_PAGER=", "SYSTEMD_COLORS=0"]
        done = subprocess.run(
            [
                *(
                    "nsenter",
                    f"--target={self.pid}",
                    "--mount",
                    "--uts",
                    "--ipc",
                    "--net",
                    "--pid",
                    "--cgroup",
                ),
                *("--", *inside),
                *("timeout", "--kill-after=2", f"{timeout}", *argv),
            ],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout + 20,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def do(self, *argv: str, timeout: float = 30.0, stdin: str = "") -> str:
        """``run`` for a command that must succeed: its output."""
        status, out = self.run(list(argv), timeout, stdin)
        if status != 0:
            raise RingError(f"{' '.join(argv)[:200]}: status {status}\n{out}")
        return out

    def put(self, path: str, text: str, mode: int = 0o644) -> None:
        """A file in the ring, with the directories above it."""
        self.do("install", "-D", "-m", f"{mode:o}", "/dev/stdin", path, stdin=text)

    def read(self, path: str) -> str:
        return self.do("cat", path)

    def show(self, unit: str) -> dict[str, str]:
        """Every property of a unit, as ``systemctl show`` writes it."""
        lines = self.do("systemctl", "show", "--all", unit).splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def journal(self, unit: str) -> str:
        return self.do("journalctl", "--no-pager", "--output=cat", f"--unit={unit}")

    def close(self) -> None:
        """End every process of the ring, and leave nothing behind. Raises RingError where something stays."""
        if self._launcher.poll() is None:
            # Everything in the ring dies with its PID 1, and the launcher ends when that is gone for good.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid or self._launcher.pid, signal.SIGKILL)
        self._launcher.wait(30)
        os.close(self._master)
        clean(self.work, self.name)

    def _wait_for_boot(self) -> None:
        end = time.monotonic() + BOOT
        state = "not started"
        while state not in ("running", "degraded"):
            if time.monotonic() > end or self._launcher.poll() is not None:
                raise RingError(f"the ring did not boot: {state}\n{self.console()}")
            time.sleep(0.1)
            self.pid = self.pid or _systemd_below(self._launcher.pid)
            if self.pid:
                state = self.run(["systemctl", "is-system-running", "--wait"], BOOT)[1].strip()
        self.put("/usr/local/bin/agent", AGENT, 0o755)

    def console(self) -> str:
        """What the ring wrote to its console last."""
        return self._console.decode(errors="replace")

    def _drain(self) -> None:
        try:
            while data := os.read(self._master, 4096):
                self._console += data
                del self._console[:-_CONSOLE]
        except OSError:
            return  # EIO: nobody has the other end open any more; EBADF: closed


def clean(work: Path, name: str) -> None:
    """Remove what a ring that has ended leaves: its cgroup and its directory. Raises RingError where it cannot."""
    script = ["unshare", "--mount", "--propagation", "private", "--", "sh", str(SCRIPT), "clean"]
    done = subprocess.run([*script, str(work), name], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise RingError(f"the cgroup {name} is still in use: {done.stderr}")
    shutil.rmtree(work)


def _shared() -> list[str]:
    """The agent of this tree and the Python that runs it: "WHERE=PLACE IN THE RING"."""
    shared = [f"{REPOSITORY}={TREE}"]
    if sys.prefix != sys.base_prefix:
        shared.append(f"{sys.prefix}={Path(PYTHON).parents[1]}")
    if sys.base_prefix != "/usr":
        shared.append(f"{sys.base_prefix}={sys.base_prefix}")
    return shared


def _systemd_below(parent: int) -> int:
    """The child of a process that is a systemd; 0 while there is none. Others come and go before it."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            child_of = int(stat.read_text().rpartition(")")[2].split()[1])
            if child_of == parent and (stat.parent / "exe").readlink().name == "systemd":
                return int(stat.parent.name)
        except OSError:
            continue  # it ended meanwhile
    return 0
