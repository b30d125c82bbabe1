"""Who a process is, in words an operator can act on: its unit, container or virtual machine, from its cgroup."""

import re
from dataclasses import dataclass

# (pattern in the cgroup path, what to call it). The first match wins.
_CONTAINERS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"/qemu\.slice/(\d+)\.scope"), "VM {}"),
    (re.compile(r"/lxc(?:\.payload)?[./]([^/]+)"), "lxc:{}"),
    (re.compile(r"/docker[-/]([0-9a-f]{12})[0-9a-f]*"), "docker {}"),
    (re.compile(r"/libpod-([0-9a-f]{12})[0-9a-f]*"), "podman {}"),
    (re.compile(r"/cri-containerd[-:]([0-9a-f]{12})[0-9a-f]*"), "containerd {}"),
    (re.compile(r"/machine-qemu\\x2d\d+\\x2d(.+?)\.scope"), "VM {}"),
    (re.compile(r"/systemd-nspawn@([^/]+)\.service"), "machine {}"),
    (re.compile(r"/machine-([^/]+)\.scope"), "machine {}"),
    (re.compile(r"/kubepods[^/]*/.*?([0-9a-f]{12})[0-9a-f]{20,}"), "kubernetes {}"),
)
_UNIT = re.compile(r"[^/]+\.(?:service|scope)")
_VIRTUAL_MACHINES = re.compile(r"kvm|qemu-system-\w*|cloud-hypervis.*|firecracker|qemu-kvm")


@dataclass(frozen=True, slots=True)
class Owner:
    unit: str = ""
    container: str = ""


def owner_of(cgroup: str) -> Owner:
    """From the text of /proc/PID/cgroup. The innermost unit is named: inside a container it is the container's."""
    path = _systemd_path(cgroup)
    units = _UNIT.findall(path)
    for pattern, words in _CONTAINERS:
        match = pattern.search(path)
        if match is not None:
            return Owner(units[-1] if units else "", words.format(match[1].replace("\\x2d", "-")))
    return Owner(units[-1] if units else "")


def is_virtual_machine(command: str) -> bool:
    """By /proc/PID/comm, which the kernel cuts at 15 characters."""
    return _VIRTUAL_MACHINES.fullmatch(command) is not None


def _systemd_path(cgroup: str) -> str:
    """The path in the unified hierarchy, or in systemd's own where cgroups are still version 1."""
    paths = {}
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths["unified" if number == "0" else controllers] = path
    # In hybrid mode both are there and the unified one may be just "/".
    unified = paths.get("unified", "")
    return unified if len(unified) > 1 else paths.get("name=systemd", unified)
