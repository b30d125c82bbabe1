"""The journal: a durable record of intents and outcomes, one JSON object a line.

An intent is fsynced before its effect begins. The journal explains and counts; it never decides alone. A torn last
line, left by a crash, is passed over when reading and cut off before the next write.
"""

import contextlib
import json
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent.core.redact import redact_all
from agent.loop.store import own_state, write_all

MAX_BYTES = 4 << 20
KEPT_IN_MEMORY = 32  # records that ``tail`` can give without reading the file again


class Journal:
    """Append-only, rotated once at 4 MiB (the older half stays beside it as ``journal.jsonl.1``)."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._heal()
        self._tail = deque(read(path), maxlen=KEPT_IN_MEMORY)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _heal(self) -> None:
        if not self._path.exists() or self._path.stat().st_size == 0:
            return
        with self._path.open("rb+") as file:
            data = file.read()
            if not data.endswith(b"\n"):
                file.truncate(data.rfind(b"\n") + 1)

    def append(self, at: float, event: str, **fields: Any) -> None:
        """Write one record and fsync it. ``event``: intent, outcome, phase, generation, request, note.

        Raises StateError when it cannot be written; then nothing of it is.
        """
        record = {"at": round(at, 3), "event": event, **{k: redact_all(v) for k, v in fields.items()}}
        with own_state(self._path):
            self._rotate()
            self._write(json.dumps(record, ensure_ascii=False, default=str).encode() + b"\n")
        self._tail.append(record)

    def _write(self, line: bytes) -> None:
        """The whole line or nothing: what a full disk cuts short must not swallow the next record."""
        end = os.fstat(self._fd).st_size
        try:
            write_all(self._fd, line)
            os.fsync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, end)
            raise

    def _rotate(self) -> None:
        if os.fstat(self._fd).st_size < MAX_BYTES:
            return
        with contextlib.suppress(FileNotFoundError):  # an earlier try came as far as this and no further
            self._path.replace(self._path.with_suffix(".jsonl.1"))
        new = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.close(self._fd)
        self._fd = new

    def tail(self, count: int) -> list[dict[str, Any]]:
        return list(self._tail)[-count:]

    def close(self) -> None:
        os.close(self._fd)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole record of a journal file; lines that are not JSON objects are passed over."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record
