"""S11 with real files. Each test waits for what must come, with a generous deadline, and times nothing."""

import asyncio
import os
import shutil
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.host.watch import watch

PATIENCE = 20.0


class Seen:
    """What a reader that reads at every trigger has seen, in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.texts: list[str] = []
        self.triggers = 0
        self._news = asyncio.Event()

    def trigger(self) -> None:
        self.triggers += 1
        try:
            self.texts.append(self._path.read_text())
        except OSError:
            self.texts.append("(missing)")
        self._news.set()

    async def until(self, text: str) -> None:
        async with asyncio.timeout(PATIENCE):
            while not self.texts or self.texts[-1] != text:
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def watching(path: Path):
    stop = asyncio.Event()
    seen = Seen(path)

    async def run() -> None:
        async for _ in watch([path], stop):
            seen.trigger()

    task = asyncio.create_task(run())
    await asyncio.sleep(0.2)
    try:
        yield seen
    finally:
        stop.set()
        async with asyncio.timeout(PATIENCE):
            await task


def save(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    os.replace(new, path)  # noqa: PTH105


async def test_S11_five_saves_by_rename_in_a_second_end_with_the_last_one_seen(tmp_path: Path):
    path = tmp_path / "spec.yaml"
    path.write_text("0")
    async with watching(path) as seen:
        for number in range(1, 6):
            save(path, str(number))
            await asyncio.sleep(0.2)
        await seen.until("5")
        assert 1 <= seen.triggers <= 6


async def test_S11_saves_further_apart_are_all_seen(tmp_path: Path):
    path = tmp_path / "spec.yaml"
    path.write_text("0")
    async with watching(path) as seen:
        for number in range(1, 4):
            save(path, str(number))
            await seen.until(str(number))


async def test_S11_a_file_deleted_and_back_is_seen_both_times(tmp_path: Path):
    path = tmp_path / "spec.yaml"
    path.write_text("a")
    async with watching(path) as seen:
        path.unlink()
        await seen.until("(missing)")
        path.write_text("b")
        await seen.until("b")


async def test_S11_a_config_map_style_swap_is_seen(tmp_path: Path):
    volume = tmp_path / "volume"
    volume.mkdir()
    swap(volume, "v1", "one")
    (volume / "spec.yaml").symlink_to("..data/spec.yaml")
    path = tmp_path / "spec.yaml"
    path.symlink_to(volume / "spec.yaml")
    async with watching(path) as seen:
        for version, text in (("v2", "two"), ("v3", "three")):
            swap(volume, version, text)
            await seen.until(text)


def swap(volume: Path, version: str, text: str) -> None:
    """A new directory beside the old, then ``..data`` renamed onto it, then the old one removed."""
    before = volume / "..data"
    previous = before.resolve() if before.is_symlink() else None
    (volume / f"..{version}").mkdir()
    (volume / f"..{version}/spec.yaml").write_text(text)
    (volume / "..new").symlink_to(f"..{version}")
    os.replace(volume / "..new", volume / "..data")  # noqa: PTH105
    if previous is not None:
        shutil.rmtree(previous)


@pytest.mark.parametrize(
    "remove", [shutil.rmtree, lambda d: d.rename(d.with_name("away"))], ids=["deleted", "moved"]
)
async def test_S11_a_directory_deleted_and_made_again_is_watched_again(
    tmp_path: Path, remove: Callable[[Path], object]
):
    directory = tmp_path / "etc" / "agent"
    directory.mkdir(parents=True)
    path = directory / "spec.yaml"
    path.write_text("a")
    async with watching(path) as seen:
        remove(directory)
        await seen.until("(missing)")
        directory.mkdir()
        save(path, "b")
        await seen.until("b")
        save(path, "c")
        await seen.until("c")


async def test_a_file_in_a_directory_that_does_not_exist_yet_is_seen_when_it_comes(tmp_path: Path):
    path = tmp_path / "not" / "yet" / "spec.yaml"
    async with watching(path) as seen:
        path.parent.mkdir(parents=True)
        path.write_text("a")
        await seen.until("a")


async def test_other_files_in_the_directory_wake_nobody(tmp_path: Path):
    path = tmp_path / "spec.yaml"
    path.write_text("a")
    async with watching(path) as seen:
        (tmp_path / "other").write_text("x")
        save(tmp_path / "another", "y")
        await asyncio.sleep(0.5)
        assert seen.triggers == 0
        save(path, "b")
        await seen.until("b")


async def test_cancelling_one_watch_does_not_stop_the_daemon(tmp_path: Path):
    stop = asyncio.Event()

    async def run() -> None:
        async for _ in watch([tmp_path / "spec.yaml"], stop):
            pass

    task = asyncio.create_task(run())
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not stop.is_set()
