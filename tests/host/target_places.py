"""Places with a real shell and real files, as a container or another machine has them.

``tools``: busybox in a directory tree of its own behind chroot, or this machine's own commands. systemctl, journalctl
and nvidia-smi in them are small scripts that write down how they were called.
"""

import os
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.host.command_target import CommandTarget

SYSTEMCTL = """#!/bin/sh
echo "systemctl $*" >>"@/calls"
for name do :; done
case $1 in
  show)
    wanted=$(for word do case $word in --property=*) echo "${word#*=}" ;; esac; done)
    { cat "@/units/$name" 2>/dev/null || printf 'Id=%s\\nLoadState=not-found\\nActiveState=inactive\\n' "$name"; } |
      grep -E "^($(echo "$wanted" | tr , '|'))="
    ;;
  *) [ -e "@/units/$name" ] || [ "$name" = daemon-reload ] || { echo "Unit $name not loaded." >&2; exit 5; } ;;
esac
"""
JOURNALCTL = """#!/bin/sh
echo "journalctl $*" >>"@/calls"
cat "@/journal"
"""
COUNTED = """#!/bin/sh
echo "$*" >>"{log}"
exec "$@"
"""


@dataclass(frozen=True)
class Place:
    root: Path  # of what the target's paths name
    prefix: tuple[str, ...]
    home: str  # a directory for tests, as the target names it
    log: Path  # one line for each command sent there
    name: str = "lxc:129"

    def target(self) -> CommandTarget:
        return CommandTarget(self.name, self.prefix)

    def at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def write(self, path: str, text: str | bytes) -> Path:
        at = self.at(path)
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_bytes(text.encode() if isinstance(text, str) else text)
        return at

    def tool(self, name: str, script: str) -> None:
        program(self.at(f"{self.home}/bin/{name}"), script.replace("@/", f"{self.home}/"))

    def unit(self, name: str, text: str) -> None:
        self.write(f"{self.home}/units/{name}", text)

    def calls(self) -> list[str]:
        calls = self.at(f"{self.home}/calls")
        return calls.read_text().splitlines() if calls.exists() else []

    def commands(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def place(kind: str, shell: str, folder: Path) -> Place:
    """``kind``: "tree" or "machine"; ``shell``: busybox, dash or bash."""
    made = _tree(folder, shell) if kind == "tree" else _machine(folder, shell)
    made.tool("systemctl", SYSTEMCTL)
    made.tool("journalctl", JOURNALCTL)
    return made


def _machine(folder: Path, shell: str) -> Place:
    binaries = folder / "bin"
    binaries.mkdir()
    (binaries / "sh").symlink_to(_found(shell))
    path = f"PATH={binaries}:{os.environ['PATH']}"
    counted = program(folder / "counted", COUNTED.format(log=folder / "log"))
    return Place(Path("/"), (str(counted), "env", path), str(folder), folder / "log")


def _tree(folder: Path, shell: str) -> Place:
    """A root directory with nothing but busybox and the shell."""
    root, busybox = folder / "root", _found("busybox")
    for name in (
        "bin",
        "dev",
        "proc/self/ns",
        "proc/sys/kernel/random",
        "sys/fs/cgroup",
        "usr/bin",
        "tmp",
        "t",
    ):
        (root / name).mkdir(parents=True)
    shutil.copy(busybox, root / "bin/busybox")
    for applet in subprocess.run(
        [busybox, "--list"], check=True, capture_output=True, text=True
    ).stdout.split():
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")
    if shell != "busybox":
        _copy(_found(shell), root)
    try:
        os.mknod(root / "dev/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError as error:
        pytest.skip(f"a tree of its own needs mknod: {error}")
    chroot = shutil.which("chroot", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or pytest.skip(
        "needs chroot"
    )
    enter = (chroot, str(root), "/bin/env", "-i", "PATH=/t/bin:/bin:/usr/bin")
    if (tried := subprocess.run([*enter, "true"], check=False, capture_output=True, text=True)).returncode:
        pytest.skip(f"a tree of its own needs chroot: {tried.stderr.strip()}")
    counted = program(folder / "counted", COUNTED.format(log=folder / "log"))
    return Place(root, (str(counted), *enter), "/t", folder / "log")


def _copy(shell: str, root: Path) -> None:
    listed = subprocess.run(["ldd", shell], check=True, capture_output=True, text=True).stdout
    for word in listed.split():
        if word.startswith("/"):
            at = root / word.lstrip("/")
            at.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(word, at)
    (root / "bin/sh").unlink()
    shutil.copy(shell, root / "bin/sh")


def _found(name: str) -> str:
    if (path := shutil.which(name)) is None:
        pytest.skip(f"{name} is not installed")
    return os.path.realpath(path)
