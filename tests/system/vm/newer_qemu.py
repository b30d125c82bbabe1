"""A newer QEMU than Debian 12's, from trixie-backports, in a private folder: nothing is installed here."""

import functools
import shutil
from pathlib import Path

from tests.system.vm.cache import cached, key_of
from tests.system.vm.debian import BuildError, command

SUITE = "trixie-backports"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


@functools.cache
def newer_qemu() -> Path | None:
    """QEMU 11 in a private folder, run by its own loader: only that reports AMD's IO_PAGE_FAULT. None: not to be had."""
    try:
        return cached("qemu", key_of(SUITE, files=[Path(__file__)]), _fill_qemu)
    except BuildError:
        return None


def _fill_qemu(made: Path) -> None:
    sources = made / "newer.sources"
    uris, suites = "URIs: http://deb.debian.org/debian", f"Suites: trixie {SUITE}"
    sources.write_text(f"Types: deb\n{uris}\n{suites}\nComponents: main\nSigned-By: {_KEYRING}\n")
    root = made / "root"
    bootstrap = [
        "mmdebstrap",
        "--quiet",
        "--mode=root",
        "--variant=extract",
        "--format=directory",
        "--components=main",
    ]
    options = ['--aptopt=Acquire::Languages "none"', f'--aptopt=APT::Default-Release "{SUITE}"']
    namespace = ["unshare", "--mount", "--propagation", "private"]
    what = ["--include=qemu-system-x86,seabios", *options, "trixie", str(root), str(sources)]
    command([*namespace, *bootstrap, *what])
    for useless in ("usr/share/doc", "usr/share/locale", "usr/share/man", "var"):
        shutil.rmtree(root / useless, ignore_errors=True)
