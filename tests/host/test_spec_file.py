import asyncio
import os
import threading
from pathlib import Path

import pytest

from agent.core.errors import SpecError
from agent.host.spec_file import MAX_BYTES, FileSpecSource
from agent.host.symlinks import entries_to


def old(path: Path, text: str = "a: 1\n") -> Path:
    """A file that was last written long ago."""
    path.write_text(text)
    os.utime(path, (1e9, 1e9))
    return path


def source(path: Path, *, strict: bool = False) -> FileSpecSource:
    return FileSpecSource(path, strict=strict, owner=os.geteuid())


async def test_the_whole_text_is_read_with_its_origin(tmp_path: Path):
    path = old(tmp_path / "spec.yaml")
    read = await source(path).read()
    assert (read.text, read.origin) == ("a: 1\n", str(path))


async def test_a_missing_file_raises(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        await source(tmp_path / "spec.yaml").read()


async def test_a_large_file_is_refused_with_its_size(tmp_path: Path):
    path = old(tmp_path / "spec.yaml", "x" * (MAX_BYTES + 1))
    with pytest.raises(SpecError, match=f"{MAX_BYTES + 1} bytes; expected at most 64 KiB"):
        await source(path).read()
    assert len((await source(old(path, "x" * MAX_BYTES)).read()).text) == MAX_BYTES


async def test_a_directory_a_pipe_and_a_symlink_loop_are_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("pipe", ""):
        with pytest.raises(SpecError, match="not a regular file"):
            await source(tmp_path / name).read()
    with pytest.raises(OSError, match="loop"):
        await source(tmp_path / "loop").read()


async def test_text_that_is_not_utf8_is_refused_at_its_line(tmp_path: Path):
    path = tmp_path / "spec.yaml"
    path.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(SpecError, match=":2: byte 8 is not UTF-8"):
        await source(path).read()


@pytest.mark.parametrize("who", ["the file", "its directory", "a symlink's directory"])
async def test_a_spec_that_others_can_change_is_refused_with_the_mode_found(tmp_path: Path, who: str):
    (tmp_path / "etc").mkdir(mode=0o755)
    (tmp_path / "links").mkdir(mode=0o755)
    path = old(tmp_path / "etc/spec.yaml")
    link = tmp_path / "links/spec.yaml"
    link.symlink_to(path)
    assert (await source(link, strict=True).read()).text == "a: 1\n"
    place = {"the file": path, "its directory": path.parent, "a symlink's directory": link.parent}[who]
    place.chmod(0o775)
    with pytest.raises(SpecError, match="mode 0775") as refused:
        await source(link, strict=True).read()
    assert f"chmod go-w {place}" in str(refused.value)
    assert (await source(link).read()).text == "a: 1\n"  # a simulated host does not mind


async def test_a_spec_of_another_owner_is_refused(tmp_path: Path):
    path = old(tmp_path / "spec.yaml")
    path.chmod(0o644)
    with pytest.raises(SpecError, match=f"owner {os.geteuid()}"):
        await FileSpecSource(path, strict=True, owner=os.geteuid() + 1).read()


async def test_S11_saves_by_rename_are_never_read_half_way(tmp_path: Path):
    path = old(tmp_path / "spec.yaml", "0" * 5000)
    done = threading.Event()

    def save() -> None:
        number = 0
        while not done.is_set():
            number = (number + 1) % 10
            os.replace(old(tmp_path / "new", str(number) * 5000), path)  # noqa: PTH105

    writer = threading.Thread(target=save)
    writer.start()
    try:
        for _ in range(100):
            text = (await source(path).read()).text
            assert (len(text), len(set(text))) == (5000, 1)
    finally:
        done.set()
        writer.join()


async def test_S11_a_file_written_in_place_is_taken_when_it_is_still(tmp_path: Path):
    path = tmp_path / "spec.yaml"

    async def save() -> None:
        with path.open("w") as file:
            for part in range(20):
                file.write(f"line{part}: 1\n")
                file.flush()
                await asyncio.sleep(0.01)

    saving = asyncio.create_task(save())
    await asyncio.sleep(0.03)
    read = await FileSpecSource(path, strict=False, settle=1.0).read()
    await saving
    assert read.text == path.read_text()


def test_the_way_through_symlinks_names_every_entry_that_is_looked_up(tmp_path: Path):
    (tmp_path / "map/..v1").mkdir(parents=True)
    (tmp_path / "map/..v1/spec.yaml").write_text("a")
    (tmp_path / "map/..data").symlink_to("..v1")
    (tmp_path / "map/spec.yaml").symlink_to("..data/spec.yaml")
    (tmp_path / "spec.yaml").symlink_to(tmp_path / "map/spec.yaml")
    entries = entries_to(tmp_path / "spec.yaml")
    way = [str(e.relative_to(tmp_path)) for e in entries if e.is_relative_to(tmp_path)]
    assert [w for w in way if w not in (".", "map")] == [
        "spec.yaml",
        "map/spec.yaml",
        "map/..data",
        "map/..v1",
        "map/..v1/spec.yaml",
    ]


def test_the_way_ends_at_the_first_entry_that_is_missing(tmp_path: Path):
    assert entries_to(tmp_path / "a/b/c")[-1] == tmp_path / "a"


def test_the_way_around_a_loop_ends(tmp_path: Path):
    (tmp_path / "loop").symlink_to("loop")
    assert entries_to(tmp_path / "loop/x")
