"""The published status read back as plain JSON, and whether anybody still keeps it true.

``status`` must be instant and must work with whatever stands in the file, so nothing here imports the models:
a field that is missing or of another type reads as empty, and every text comes out escaped.
"""

import fcntl
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.app.terminal import escape

KNOWN_VERSION = 1  # agent.core.status.STATUS_VERSION, which is not imported: it would bring pydantic
Document = Mapping[str, Any]
EMPTY: Document = {}


class StatusError(ValueError):
    """There is no status to show; the message says why and what to do."""


def read_status(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The status document. Raises ``StatusError``."""
    where = escape(os.fspath(path))
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise StatusError(
            f"{where}: there is no status: the agent has not run here since boot, or runs with another --root;"
            " start it with: agent run (or: systemctl start gpu-host-agent)"
        ) from None
    except OSError as error:
        raise StatusError(
            f"{where}: the status cannot be read: {error.strerror}; try as root: agent status"
        ) from error
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StatusError(
            f"{where}: this is not JSON ({escape(str(error))}); the agent replaces it at its next pass,"
            " so look whether it runs: systemctl status gpu-host-agent"
        ) from error
    _check_version(document, where)
    return dict(document)


def _check_version(document: object, where: str) -> None:
    if not isinstance(document, dict) or "version" not in document:
        raise StatusError(
            f'{where}: this is not a status of the agent: expected a JSON object with "version"'
        )
    version = document["version"]
    if version != KNOWN_VERSION:
        raise StatusError(
            f"{where}: status version {escape(str(version)[:20])}, and this command reads version {KNOWN_VERSION}:"
            " the daemon and this command are of different releases; restart the daemon, or use its own command"
        )


def is_alive(lock_path: str | os.PathLike[str], pid: object = 0) -> bool:
    """Whether a daemon holds its lock file. Where the lock may not be opened (only root may): whether ``pid`` lives.

    ``pid`` is the status document's own; anything but a whole number above 0 is nobody's.

    A shared lock is tried and dropped at once, so that two readers never take each other for the daemon.
    """
    try:
        fd = os.open(lock_path, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        return isinstance(pid, int) and pid > 0 and Path(f"/proc/{pid}").exists()
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def text(part: Document, key: str) -> str:
    """A field that is text or a number, safe to print; "" where it is missing."""
    return say(part.get(key))


def say(value: object) -> str:
    """One JSON scalar, safe to print; "" for anything else."""
    return escape(str(value)) if isinstance(value, str | int | float) else ""


def number(part: Document, key: str) -> float | None:
    """A field that is a finite number, else None."""
    value = part.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def section(part: Document, key: str) -> Document:
    """A field that is a mapping, else an empty one."""
    value = part.get(key)
    return value if isinstance(value, dict) else EMPTY


def rows(part: Document, key: str) -> list[Document]:
    """The mappings in a field that is a list."""
    value = part.get(key)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def words(part: Document, key: str) -> list[str]:
    """The items of a field that is a list, in words, safe to print."""
    value = part.get(key)
    return [say(item) for item in value] if isinstance(value, list) else []
