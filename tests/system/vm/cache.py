"""What is built once and kept between runs, outside the tree: ``${XDG_CACHE_HOME:-~/.cache}/gpu-host-agent-tests``."""

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

_UNUSED = 14 * 24 * 3600.0  # seconds after which what nobody asked for is removed
_KEPT = 4  # of one name: several checkouts may be in use at once


def folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "gpu-host-agent-tests"


def key_of(*parts: str, files: Iterable[Path] = ()) -> str:
    """A name for what is made of these words and files (their names, modes and content)."""
    digest = hashlib.sha256(repr(parts).encode())
    for path in sorted(files):
        digest.update(f"\0{path.name}\0{path.stat().st_mode:o}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def cached(name: str, key: str, build: Callable[[Path], None]) -> Path:
    """The folder ``name``-``key``; where there is none, ``build`` fills one, which is then renamed into place.

    A second caller at the same time waits for the first. A build that fails or is killed leaves nothing that is used.
    """
    place = folder()
    place.mkdir(parents=True, exist_ok=True)
    made = place / f"{name}-{key}"
    with (place / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.is_dir():
            _prune(place, name)
            scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=place))
            try:
                build(scratch)
                scratch.chmod(0o755)
                scratch.rename(made)
            except BaseException:
                shutil.rmtree(scratch, ignore_errors=True)
                raise
        os.utime(made)
    return made


def _prune(place: Path, name: str) -> None:
    """Under the lock: scratch folders of builds that were killed, and results that nobody has used for long."""
    for scratch in place.glob(f".{name}-*"):
        shutil.rmtree(scratch, ignore_errors=True)
    results = [(path.stat().st_mtime, path) for path in place.glob(f"{name}-*") if path.is_dir()]
    for rank, (used, old) in enumerate(sorted(results, reverse=True), 1):
        if rank >= _KEPT or time.time() - used > _UNUSED:
            shutil.rmtree(old, ignore_errors=True)
