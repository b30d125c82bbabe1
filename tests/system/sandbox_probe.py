"""Run as a service: tries what the agent needs, and what it must not be able to do; writes the outcomes as JSON.

An outcome is "ok", or the name of the error. Every attempt is harmless where it succeeds. Only the standard library.
"""

import ctypes
import errno
import json
import os
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

STATE = Path("/var/lib/gpu-host-agent")
HOME = "/root"
UEVENTS = 15  # NETLINK_KOBJECT_UEVENT
CLONE_NEWNS, MS_BIND, PER_LINUX32, PTRACE_SEIZE = 0x20000, 4096, 8, 0x4206
libc = ctypes.CDLL(None, use_errno=True)


def outcome(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, repr(error))
    return "ok"


def call(function: str, *arguments: object) -> None:
    """A function of the C library that says by -1 that it failed."""
    if getattr(libc, function)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def write(path: str) -> None:
    """A new file that is removed again, or an old one opened for writing and left as it is."""
    there = Path(path).exists()
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    if not there:
        Path(path).unlink()


def something(found: object) -> None:
    """What a sandbox hides is empty for whom DAC_READ_SEARCH lets pass: that is not an error, and still a loss."""
    if not found:
        raise OSError(errno.ENODATA, "there is nothing")


def opened(family: int, kind: int, protocol: int = 0) -> None:
    socket.socket(family, kind, protocol).close()


def uevents() -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, UEVENTS) as heard:
        heard.bind((0, 1))


def open_files(pid: int) -> None:
    links = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    if "/etc/hostname" not in links:
        raise OSError(errno.ENOENT, f"not among {links}")


def switched() -> None:
    path = STATE / "probe"
    path.touch()
    try:
        path.chmod(0o4755)
    finally:
        path.unlink()


def needed(holder: int) -> dict[str, Callable[[], object]]:
    return {
        "write a unit": lambda: write("/etc/systemd/system/probe.conf"),
        "write a udev rule": lambda: write("/etc/udev/rules.d/probe.rules"),
        "write module options": lambda: write("/etc/modprobe.d/probe.conf"),
        "write its state": lambda: write(f"{STATE}/probe"),
        "write its status": lambda: write("/run/gpu-host-agent/probe"),
        "write to a bus in sysfs": lambda: write("/sys/bus/pci/drivers_probe"),
        "read the kernel log": lambda: something(Path("/dev/kmsg").read_bytes()),
        "read another user's open files": lambda: open_files(holder),
        "read another user's file": lambda: Path("/etc/systemd/system/of-nobody.conf").read_bytes(),
        "read a home": lambda: something(list(Path(HOME).iterdir())),
        "list the modules that there are": lambda: something(list(Path("/lib/modules").iterdir())),
        "D-Bus": lambda: socket.socket(socket.AF_UNIX).connect("/run/dbus/system_bus_socket"),
        "IPv4": lambda: opened(socket.AF_INET, socket.SOCK_STREAM),
        "IPv6": lambda: opened(socket.AF_INET6, socket.SOCK_STREAM),
        "hear uevents": uevents,
    }


def refused(holder: int) -> dict[str, Callable[[], object]]:
    return {
        "write a program": lambda: write("/usr/bin/probe"),
        "write a library": lambda: write("/usr/lib/probe"),
        "write the accounts": lambda: write("/etc/passwd"),
        "write the spec": lambda: write("/etc/gpu-host-agent/spec.yaml"),
        "write a boot file": lambda: write("/boot/probe"),
        "write a home": lambda: write(f"{HOME}/probe"),
        "write another's state": lambda: write("/var/lib/probe"),
        "write another user's file": lambda: write("/etc/systemd/system/of-nobody.conf"),
        "make a cgroup": lambda: Path("/sys/fs/cgroup/probe").mkdir(),
        "raw packets": lambda: opened(socket.AF_PACKET, socket.SOCK_RAW),
        "another address family": lambda: opened(socket.AF_VSOCK, socket.SOCK_STREAM),
        "a namespace": lambda: call("unshare", CLONE_NEWNS),
        "a mount": lambda: call("mount", b"/tmp", b"/tmp", None, MS_BIND, None),
        "load a module": lambda: call("init_module", None, 0, b""),
        "unload a module": lambda: call("delete_module", b"probe", 0),
        "trace a process": lambda: call("ptrace", PTRACE_SEIZE, holder, None, None),
        "signal another user's process": lambda: os.kill(holder, 0),
        "give a file away": lambda: os.chown(STATE, 65534, -1),
        "a set-user-ID file": switched,
        "a device node": lambda: os.mknod(STATE / "probe", stat.S_IFBLK | 0o600, os.makedev(259, 0)),
        "real-time scheduling": lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)),
        "another personality": lambda: call("personality", PER_LINUX32),
        "the host's name": lambda: call("sethostname", b"ring", 4),
        "another user": lambda: os.setuid(65534),  # the last: where it succeeds, nothing else would
    }


def main() -> None:
    holder = int(sys.argv[1])
    status = dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line
    )
    found = {
        "needed": {name: outcome(attempt) for name, attempt in needed(holder).items()},
        "refused": {name: outcome(attempt) for name, attempt in refused(holder).items()},
        "status": status,
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
