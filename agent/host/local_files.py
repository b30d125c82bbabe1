"""Files of ours on this host: written whole or not at all, and secrets that nobody else can read."""

import contextlib
import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from agent.core.render import unwritable

FILE_MODE, SECRET_MODE = 0o644, 0o600
_DIRECTORY_MODE, _SECRET_DIRECTORY_MODE = 0o755, 0o700
_MAX_SECRET = 16 << 10  # bytes
_ESCAPED = '\\"`$'  # man 5 systemd.exec, EnvironmentFile=: these are meant literally in double quotes after a backslash


def write_atomically(
    path: Path, data: bytes, mode: int = FILE_MODE, directory_mode: int = _DIRECTORY_MODE
) -> None:
    """A reader finds the old content or the new. A symlink at ``path`` is replaced, never followed. Raises OSError."""
    _make_directories(path.parent, directory_mode)
    # One agent writes here, so one name will do; it ends in no suffix that systemd, udev or modprobe would read.
    temporary = path.parent / f".{path.name}.gpu-host-agent"
    _unlink(temporary)  # of an agent that was killed while it wrote
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, SECRET_MODE)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), mode)  # whatever the umask
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        _unlink(temporary)
        raise
    _sync_directory(path.parent)


def remove(path: Path) -> None:
    """The file or symlink itself; a missing one is fine. Raises OSError."""
    if not _unlink(path):
        return
    _sync_directory(path.parent)


def secret_lines(sources: Mapping[str, Path]) -> bytes:
    """An EnvironmentFile with one VARIABLE="value" line for each file.

    Raises OSError: a file that cannot be read, or a value that systemd would not take as it is. No message holds a value.
    """
    return "".join(f'{variable}="{_value(path)}"\n' for variable, path in sources.items()).encode()


def _value(path: Path) -> str:
    """In the same words as for a container or another machine."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise _unfit("not a regular file", path)  # a FIFO would be waited for
    with path.open("rb") as file:
        data = file.read(_MAX_SECRET + 1)
    if len(data) > _MAX_SECRET:
        raise _unfit(f"larger than {_MAX_SECRET >> 10} KiB", path)
    try:
        text = data.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise _unfit("not UTF-8", path) from None
    if "\n" in text:
        raise _unfit("a secret has one line", path)
    # systemd passes over a value that holds one of these, and the service would start without it.
    if any(unwritable(ord(character)) for character in text if character != "\t"):
        raise _unfit("control characters", path)
    return "".join(f"\\{character}" if character in _ESCAPED else character for character in text)


def _unfit(why: str, path: Path) -> OSError:
    return OSError(errno.EINVAL, why, str(path))


def _make_directories(path: Path, mode: int) -> None:
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=mode)
            directory.chmod(mode)  # whatever the umask


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _sync_directory(path: Path) -> None:
    """The new name survives a power cut, too."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_secrets(path: Path, sources: Mapping[str, Path]) -> None:
    """``secret_lines`` into a file of mode 0600, in directories that only root may enter."""
    write_atomically(path, secret_lines(sources), SECRET_MODE, _SECRET_DIRECTORY_MODE)
