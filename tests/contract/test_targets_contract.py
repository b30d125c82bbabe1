"""What every place where services run owes its callers about files and secrets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.host.local_target import LocalTarget
from agent.ports import TargetPort
from agent.sim.unitfile import environment_file
from tests.contract.hosts import simulated
from tests.host.target_places import place

FOLDER = "/t/target-contract"
FILE = f"{FOLDER}/a 'file'"
PLACES = ["simulated host", "simulated container", "local", "shell-busybox", "shell-dash", "shell-bash"]


@asynccontextmanager
async def made(kind: str, folder: Path) -> AsyncIterator[TargetPort]:
    sort, _, rest = kind.replace(" ", "-").partition("-")
    if sort == "simulated":
        async with simulated(folder) as subject:
            yield subject.ports.targets("host" if rest == "host" else "lxc:129")
    elif sort == "local":
        yield LocalTarget(folder)
    else:
        yield place("tree", rest, folder).target()


@pytest.fixture(params=PLACES)
async def target(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[TargetPort]:
    async with made(request.param, tmp_path) as port:
        yield port


@pytest.mark.parametrize(
    "text", ["", "one line", "two\nlines\n", "\n\n", "'\"$(id)`\\ ünïcode ✓\r\n", "x" * 200_000]
)
async def test_a_file_reads_back_as_it_was_written(target: TargetPort, text: str) -> None:
    assert await target.read_file(FILE) is None
    assert not await target.exists(FILE)
    await target.write_file(FILE, "something before")
    await target.write_file(FILE, text)
    assert await target.read_file(FILE) == text
    assert await target.exists(FILE)
    assert await target.exists(FOLDER)
    await target.remove_file(FILE)
    await target.remove_file(FILE)
    assert await target.read_file(FILE) is None
    assert not await target.exists(FILE)


@pytest.mark.parametrize("ending", ["", "\n", "\r\n", "\n\n"])
async def test_a_secret_is_the_one_line_of_its_file(target: TargetPort, ending: str) -> None:
    await target.write_file(FILE, f"s3cret-value {ending}")
    await target.install_secrets(f"{FOLDER}/s.env", {"TOKEN": FILE, "OTHER": FILE})
    text = await target.read_file(f"{FOLDER}/s.env")
    assert text is not None
    assert text.count("\n") == 2
    read = {name: value.rstrip(" ") for name, value in environment_file(text).items()}
    assert read == {"TOKEN": "s3cret-value", "OTHER": "s3cret-value"}


async def test_secrets_are_installed_all_or_none(target: TargetPort) -> None:
    await target.write_file(FILE, "two\nlines\n")
    await target.write_file(f"{FOLDER}/good", "good")
    for bad in (FILE, "/nowhere/token"):
        with pytest.raises(OSError):
            await target.install_secrets(f"{FOLDER}/s.env", {"GOOD": f"{FOLDER}/good", "BAD": bad})
        assert not await target.exists(f"{FOLDER}/s.env")
