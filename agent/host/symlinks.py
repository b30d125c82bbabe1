"""The way from a path to its file: every directory entry that is looked up, through every symlink."""

import os
from pathlib import Path

_MAX_HOPS = 40  # as the kernel


def entries_to(path: Path) -> tuple[Path, ...]:
    """Directory entries from the root down, in the order in which the kernel looks them up.

    None of their parents is a symlink. The way ends at the file, or at the first entry that is missing. For a
    config-map style directory this goes over ``..data``, whose replacement changes the file without touching it.
    """
    waiting = list(reversed(Path(os.path.abspath(path)).parts[1:]))  # noqa: PTH100 - symlinks must stay
    here = Path("/")
    seen: list[Path] = []
    hops = 0
    while waiting:
        part = waiting.pop()
        if part == "..":
            here = here.parent
            continue
        entry = here / part
        seen.append(entry)
        try:
            target = Path(os.readlink(entry)) if entry.is_symlink() else None  # noqa: PTH115
        except OSError:
            return tuple(seen)
        if target is None:
            if not os.path.lexists(entry):
                return tuple(seen)
            here = entry
            continue
        hops += 1
        if hops > _MAX_HOPS:
            return tuple(seen)
        if target.is_absolute():
            here = Path("/")
        waiting.extend(reversed([p for p in target.parts if p != "/"]))
    return tuple(seen)
