"""``systemctl show``: what systemd says of one unit, and every process in its cgroup."""

import os
from collections.abc import Mapping
from pathlib import Path

from agent.core.observation import Unit
from agent.host.command import run_command
from agent.host.reading import names_in

_PROPERTIES = (
    "LoadState,ActiveState,SubState,MainPID,Result,ExecMainStatus,NRestarts,ControlGroup,NeedDaemonReload"
)
_DEADLINE = 10.0


async def show_unit(name: str, root: Path) -> Unit:
    """Raises OSError where systemd does not answer."""
    done = await run_command(("systemctl", "show", f"--property={_PROPERTIES}", "--", name), _DEADLINE)
    if done.status != 0:
        raise OSError(f"systemctl show {name}: {done.stderr.strip()[:200] or f'status {done.status}'}")
    properties = parse_properties(done.stdout)
    return parse_unit(name, properties, cgroup_pids(root, properties.get("ControlGroup", "")))


def parse_properties(text: str) -> dict[str, str]:
    """By name: the order is not the one that was asked for, and not the same in every version."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {name: value for name, found, value in pairs if found}


def parse_unit(name: str, properties: Mapping[str, str], pids: tuple[int, ...]) -> Unit:
    def number(key: str) -> int:
        value = properties.get(key, "")
        return int(value) if value.isdecimal() else 0

    return Unit(
        name=name,
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


def cgroup_pids(root: Path, group: str) -> tuple[int, ...]:
    """Every process in a cgroup and below. A cgroup that does not exist has none; raises OSError otherwise."""
    if not group.strip("/"):
        return ()
    hierarchy = root / "sys/fs/cgroup"
    if not (hierarchy / "cgroup.controllers").exists() and (hierarchy / "systemd").is_dir():
        hierarchy /= "systemd"  # version 1, or hybrid
    pids: set[int] = set()
    waiting = [hierarchy / group.strip("/")]
    while waiting:
        directory = waiting.pop()
        try:
            pids.update(map(int, (directory / "cgroup.procs").read_text().split()))
        except (FileNotFoundError, NotADirectoryError):
            continue  # went away with its last process
        waiting += [directory / name for name in names_in(directory) if os.path.isdir(directory / name)]  # noqa: PTH112
    return tuple(sorted(pids))
