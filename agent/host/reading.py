"""Reading small kernel files into facts: one unreadable attribute is Unknown for itself alone."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from agent.core.fact import Absent, Fact, Known, Unknown

T = TypeVar("T")
U = TypeVar("U")

PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")
_LIMIT = 1 << 20  # sysfs and proc text is small; more than this is not what we came for


def unreadable(path: Path, error: OSError) -> Unknown:
    """What to say of a file that is there and cannot be read."""
    hint = "; need root" if error.errno in (errno.EACCES, errno.EPERM) else ""
    return Unknown(f"{path}: {error.strerror or error}{hint}", "NeedRoot" if hint else "Unreadable")


def read_text(path: Path) -> Fact[str]:
    """The file's text without surrounding blanks. Absent: no such file."""
    try:
        with path.open("rb") as file:
            return Known(file.read(_LIMIT).decode(errors="replace").strip())
    except (FileNotFoundError, NotADirectoryError):
        return Absent(f"no {path}")
    except OSError as error:
        return unreadable(path, error)


def read_link_name(path: Path) -> Fact[str]:
    """The last component of what a symlink names, as of a ``driver`` link. Absent: no link."""
    try:
        return Known(os.path.basename(os.readlink(path)))  # noqa: PTH115, PTH119 - nothing is resolved, only read
    except (FileNotFoundError, NotADirectoryError):
        return Absent(f"no {path}")
    except OSError as error:
        return unreadable(path, error)


def convert(fact: Fact[T], parse: Callable[[T], Fact[U]]) -> Fact[U]:
    """Parse a Known value; a value that does not parse is Unknown, never a crash."""
    if not isinstance(fact, Known):
        return fact
    try:
        return parse(fact.value)
    except ValueError:
        return Unknown(f"cannot make sense of {str(fact.value)[:80]!r}", "Unparsable")


def read_int(path: Path) -> Fact[int]:
    """A decimal or 0x number."""
    return convert(read_text(path), lambda text: Known(int(text, 0)))


def names_in(path: Path) -> tuple[str, ...]:
    """Sorted names in a directory; none when it is not there. Raises OSError when it cannot be read."""
    try:
        return tuple(sorted(entry.name for entry in path.iterdir()))
    except (FileNotFoundError, NotADirectoryError):
        return ()
