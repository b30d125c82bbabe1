"""Files that never answer: a FUSE file system whose server says nothing, in a mount namespace of the test's own."""

import asyncio
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agent.host.file_calls import FileCalls
from agent.host.local_target import LocalTarget

PATIENCE = 30.0

# argv: a directory for the mount. Everything but the last part, which each test brings, is what it takes to be hung.
HUNG = """
import asyncio, ctypes, os, sys
from pathlib import Path
at = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):  # CLONE_NEWNS; MS_REC | MS_PRIVATE
    sys.exit(77)
try:
    server = os.open("/dev/fuse", os.O_RDWR)
except OSError:
    sys.exit(77)
options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
if libc.mount(b"hung", at.encode(), b"fuse", 0, options):
    sys.exit(77)
"""


def run_hung(program: str, at: Path) -> str:
    """What the program printed. It must have come to its end with a call still waiting."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", HUNG + program, str(at)], check=False, text=True, timeout=PATIENCE, capture_output=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        pytest.fail("the process did not end")
    if done.returncode == 77:
        pytest.skip("mounting a FUSE file system needs root and /dev/fuse")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_B1_a_model_path_that_never_answers_stalls_itself_alone_and_the_process_ends(tmp_path: Path):
    said = run_hung(
        """
from agent.host import local_target
local_target._READ_DEADLINE = 0.3
async def main():
    target = local_target.LocalTarget()
    for path in (at + "/model", at + "/model", "/etc"):
        try:
            print(await target.exists(path))
        except OSError as error:
            print(type(error).__name__, error.filename == path)
    print((await target.facts()).reachable)
asyncio.run(main())
""",
        tmp_path,
    )
    assert said.splitlines()[:3] == ["TimeoutError True", "OSError True", "True"]


def test_S11_a_spec_that_never_answers_leaves_the_one_in_force_and_the_process_ends(tmp_path: Path):
    said = run_hung(
        """
from agent.host import spec_file
spec_file.DEADLINE = 0.3
async def main():
    source = spec_file.FileSpecSource(Path(at) / "spec.yaml", strict=False)
    for _ in range(2):
        try:
            await source.read()
        except OSError as error:
            print(error.strerror)
asyncio.run(main())
""",
        tmp_path,
    )
    assert said.splitlines() == [
        "no answer for 0.3 s; is its file system there?",
        "an earlier call has not returned; is its file system there?",
    ]


def test_S11_a_watched_file_that_never_answers_holds_up_nothing_else_and_the_process_ends(tmp_path: Path):
    said = run_hung(
        """
from agent.host.watch import watch
async def main():
    async def follow():
        async for _ in watch((Path(at) / "spec.yaml",), asyncio.Event()):
            print("a change")
    following = asyncio.create_task(follow())
    await asyncio.sleep(0.3)
    print("still here")
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
asyncio.run(main())
""",
        tmp_path,
    )
    assert said.splitlines() == ["still here"]


async def test_as_many_calls_as_there_are_paths_may_be_under_way():
    calls, go = FileCalls("test"), threading.Event()
    running = [asyncio.create_task(calls.run(str(n), go.wait, PATIENCE)) for n in range(20)]
    await asyncio.sleep(0)
    go.set()
    assert await asyncio.gather(*running) == [True] * 20


async def test_a_path_takes_calls_again_once_the_hung_one_has_returned():
    calls, go = FileCalls("test"), threading.Event()
    with pytest.raises(TimeoutError, match="no answer"):
        await calls.run("/a", go.wait, 0.01)
    with pytest.raises(OSError) as refused:
        await calls.run("/a", go.wait, 0.01)
    assert refused.value.errno == errno.EBUSY
    assert await calls.run("/b", lambda: 1, PATIENCE) == 1
    go.set()
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                assert await calls.run("/a", lambda: 2, PATIENCE) == 2
                break
            except BlockingIOError:
                await asyncio.sleep(0.01)
            except OSError as error:
                assert error.errno == errno.EBUSY
                await asyncio.sleep(0.01)


async def test_a_call_that_was_given_up_on_by_its_caller_counts_as_hung():
    calls, go = FileCalls("test"), threading.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await calls.run("/a", go.wait, PATIENCE)
    with pytest.raises(OSError, match="an earlier call has not returned"):
        await calls.run("/a", go.wait, PATIENCE)
    go.set()


async def test_what_the_call_itself_raises_comes_back_as_it_is():
    def gone() -> None:
        raise TimeoutError(errno.ETIMEDOUT, "the server said so")

    calls = FileCalls("test")
    for _ in range(2):
        with pytest.raises(TimeoutError, match="the server said so"):
            await calls.run("/a", gone, PATIENCE)


async def test_a_process_that_does_not_show_its_arguments_is_waited_for_no_longer_than_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agent.host.local_target._READ_DEADLINE", 0.05)
    (tmp_path / "proc/7").mkdir(parents=True)
    os.mkfifo(tmp_path / "proc/7/cmdline")
    with pytest.raises(TimeoutError):
        await LocalTarget(tmp_path).process(7)
