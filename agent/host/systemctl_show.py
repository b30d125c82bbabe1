"""``systemctl show``: what systemd says of one unit, and every process in its cgroup."""

import errno
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from agent.core.observation import Unit
from agent.core.quantity import whole_number
from agent.host.command import run_command
from agent.host.reading import names_in

_PROPERTIES = (
    "Id,LoadState,ActiveState,SubState,MainPID,Result,ExecMainStatus,NRestarts,ControlGroup,NeedDaemonReload,"
    "DropInPaths"
)
_DEADLINE = 10.0


async def show_unit(name: str, root: Path, prefix: tuple[str, ...] = ()) -> Unit:
    """``root`` is where the cgroups of the machine that is asked are seen. Raises OSError where systemd does not answer."""
    argv = (*prefix, "systemctl", "show", f"--property={_PROPERTIES}", "--", name)
    done = await run_command(argv, _DEADLINE)
    if done.status != 0:
        raise OSError(f"systemctl show {name}: {done.stderr.strip()[:200] or f'status {done.status}'}")
    properties = parse_properties(done.stdout)
    unit = parse_unit(name, properties, cgroup_pids(root, properties.get("ControlGroup", "")))
    unread = unread_drop_ins(root, (name, unit.name), properties.get("DropInPaths", "").split())
    return replace(unit, needs_reload=unit.needs_reload or unread)


def parse_properties(text: str) -> dict[str, str]:
    """By name: the order is not the one that was asked for, and not the same in every version."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {name: value for name, found, value in pairs if found}


def parse_unit(name: str, properties: Mapping[str, str], pids: tuple[int, ...]) -> Unit:
    def number(key: str) -> int:
        return whole_number(properties.get(key, "")) or 0

    return Unit(
        name=properties.get("Id") or name,
        load_state=properties.get("LoadState", ""),
        active_state=properties.get("ActiveState", ""),
        sub_state=properties.get("SubState", ""),
        main_pid=number("MainPID"),
        result=properties.get("Result", ""),
        exit_status=number("ExecMainStatus"),
        restarts=number("NRestarts"),
        pids=pids,
        needs_reload=properties.get("NeedDaemonReload") == "yes",
    )


def unread_drop_ins(root: Path, names: Iterable[str], known: Iterable[str]) -> bool:
    """Whether a drop-in lies in /etc that systemd has not read. It does not say so of the first one of a unit: the
    directory is new to it, and NeedDaemonReload looks only into those that it knew at its last reload (systemd 252).
    """
    system = "etc/systemd/system"
    found = {
        f"/{system}/{name}.d/{file}"
        for name in set(names)
        for file in names_in(root / system / f"{name}.d")
        if file.endswith(".conf") and _has_text(root / system / f"{name}.d" / file)
    }
    return bool(found - set(known))


def _has_text(path: Path) -> bool:
    """An empty drop-in, or one that leads to /dev/null, takes another of its name away and is listed nowhere."""
    try:
        return path.is_file() and path.stat().st_size > 0
    except FileNotFoundError:
        return False


# It went away with its last process: before its file was opened, or (ENODEV) between that and the read.
_CGROUP_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENODEV})


def cgroup_pids(root: Path, group: str) -> tuple[int, ...]:
    """Every process in a cgroup and below. A cgroup that does not exist has none; raises OSError otherwise."""
    if not group.strip("/"):
        return ()
    pids: set[int] = set()
    waiting = [cgroup_directory(root, group)]
    while waiting:
        directory = waiting.pop()
        try:
            pids.update(map(int, (directory / "cgroup.procs").read_text().split()))
        except OSError as error:
            if error.errno not in _CGROUP_GONE:
                raise
            continue
        waiting += [directory / name for name in names_in(directory) if os.path.isdir(directory / name)]  # noqa: PTH112
    return tuple(sorted(pids))


def cgroup_directory(root: Path, group: str) -> Path:
    """Where systemd's own hierarchy has that cgroup; with version 1, or hybrid, it has one to itself."""
    hierarchy = root / "sys/fs/cgroup"
    if not (hierarchy / "cgroup.controllers").exists() and (hierarchy / "systemd").is_dir():
        hierarchy /= "systemd"
    return hierarchy / group.strip("/")
