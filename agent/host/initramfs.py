"""What the initramfs holds of GPU drivers, their options and udev rules, as the tool that made it lists it.

A module that is loaded from the initramfs takes its devices before any rule on the root file system is read, and has
the options that the initramfs was made with. Sources: initramfs-tools(7), lsinitramfs(8), lsinitrd(1).
"""

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path

from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.observation import Initramfs
from agent.host.command import run_command
from agent.host.file_calls import FileCalls

DEADLINE = 60.0  # seconds for one listing, once for each image
PATIENCE = 2.0  # seconds that one read waits for it; the next read finds what it found
_GPU_MODULE = re.compile(r"/((?:nvidia|vfio|nouveau|snd_hda_intel)[\w-]*)\.ko(?:\.(?:xz|zst|gz))?$")
_FILE = re.compile(r"^(?:\./)?(?:main/)?((?:usr/)?(?:etc|lib|run)/(?:modprobe\.d|udev/rules\.d)/\S+)$")


@dataclass(frozen=True, slots=True)
class Tool:
    """One family of tools: where its image of a kernel release is, what lists it and what makes it anew."""

    image: str
    program: str
    rebuild: str


TOOLS = (
    Tool("boot/initrd.img-{release}", "usr/bin/lsinitramfs", "update-initramfs -u"),
    Tool("boot/initramfs-{release}.img", "usr/bin/lsinitrd", "dracut --force"),
)


class InitramfsReader:
    """Lists the image once for each change of it (path, time of change and size), also where that fails.

    A listing takes seconds: it goes on beside the reads, so that a start of the daemon does not wait for it.
    """

    def __init__(self, root: Path, patience: float = PATIENCE) -> None:
        self._root = root
        self._patience = patience
        self._files = FileCalls("initramfs")
        self._listing: tuple[tuple[str, int, int], asyncio.Task[Fact[Initramfs]]] | None = None

    async def read(self, release: str) -> Fact[Initramfs]:
        """Absent: this kernel has no image that is known here. Unknown while it is being listed. Raises nothing."""
        for tool in TOOLS:
            image = self._root / tool.image.format(release=release)
            try:
                stat = await self._files.run(str(image), image.stat, PATIENCE)
            except FileNotFoundError:
                continue
            except OSError as error:
                return Unknown(f"{image}: {error.strerror or error}", "Unreadable")
            key = (str(image), stat.st_mtime_ns, stat.st_size)
            if self._listing is None or self._listing[0] != key:
                if self._listing is not None:
                    self._listing[1].cancel()
                self._listing = (key, asyncio.create_task(self._list(tool, image)))
            done, _ = await asyncio.wait({self._listing[1]}, timeout=self._patience)
            return done.pop().result() if done else Unknown(f"{image} is still being listed", "NotObserved")
        return Absent(f"no initramfs of {release} in /boot")

    async def _list(self, tool: Tool, image: Path) -> Fact[Initramfs]:
        program = self._root / tool.program
        if not program.exists():
            return Unknown(
                f"{image} is there and /{tool.program} is not, so it cannot be listed", "NotSupported"
            )
        try:
            done = await run_command((str(program), str(image)), DEADLINE)
        except OSError as error:  # TimeoutError is one
            return Unknown(f"{image} cannot be listed: {error}", "ListingFailed")
        if done.status != 0:
            return Unknown(f"{image} cannot be listed: {done.stderr.strip()[:120]}", "ListingFailed")
        shown = "/" + str(image.relative_to(self._root))
        return Known(parse_listing(done.stdout, shown, tool.rebuild))


def parse_listing(text: str, image: str, rebuild: str) -> Initramfs:
    """One path a line (lsinitramfs), or ``ls -l`` lines (lsinitrd)."""
    named = (line.split(" -> ")[0].split() for line in text.splitlines())
    paths = [words[-1] for words in named if words]
    modules = {m[1].replace("-", "_") for path in paths if (m := _GPU_MODULE.search(path))}
    files = {"/" + m[1].removeprefix("usr/") for path in paths if (m := _FILE.match(path))}
    return Initramfs(image, rebuild, tuple(sorted(modules)), tuple(sorted(files)))
