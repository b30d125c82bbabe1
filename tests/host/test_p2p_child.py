"""A child of the P2P self-test that does not do as it should: other programs in its place, real processes."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from agent.host.p2p_child import Deadlines, Ended, child_env, left_behind, run_child
from agent.host.p2p_wire import Begin, PairRequest

ONE, TWO = "0000:01:00.0", "0000:11:00.0"
REQUEST = PairRequest(source=ONE, destination=TWO, paths=("copy-push",), seed=1, full=False)
STEP = {"what": "pair", "path": "copy-push", "source": ONE, "destination": TWO}
BEGIN = f"print({json.dumps({'step': 'begin', **STEP})!r}, flush=True)\n"
END = f"print({json.dumps({'step': 'end', **STEP, 'result': 'good'})!r}, flush=True)\n"
PATIENT = Deadlines(30.0, 30.0)


async def run(folder: Path, program: str, deadlines: Deadlines = PATIENT, within: float = 60.0) -> Ended:
    """``program`` in place of the worker."""
    package = folder / "agent" / "selftest"
    package.mkdir(parents=True)
    for directory in (package.parent, package):
        (directory / "__init__.py").touch()
    (package / "p2p_worker.py").write_text(program)
    seen: list[Begin] = []
    until = asyncio.get_running_loop().time() + within
    ended = await run_child(REQUEST, {"PYTHONPATH": str(folder)}, deadlines, until, seen.append)
    assert [begin.path for begin in seen] == ["copy-push"] * program.count('"begin"')
    return ended


async def test_steps_that_are_told_are_taken_and_an_ordinary_end_needs_no_words(tmp_path: Path):
    ended = await run(tmp_path, BEGIN + END)
    assert [(end.path, end.result) for end in ended.ends] == [("copy-push", "good")]
    assert (ended.open, ended.why, ended.hung, ended.stuck) == (None, "", False, "")


async def test_a_status_is_told_with_the_last_words_on_stderr(tmp_path: Path):
    ended = await run(tmp_path, "import sys\nsys.stderr.write('a\\nno such luck\\n')\nsys.exit(3)\n")
    assert (ended.why, ended.hung) == ("the child ended with status 3: no such luck", False)


async def test_the_kernels_signal_is_told_by_name_and_the_open_step_is_known(tmp_path: Path):
    ended = await run(tmp_path, BEGIN + "import os\nos.kill(os.getpid(), 9)\n")
    assert (ended.why, ended.hung) == ("the child was killed by SIGKILL", False)
    assert ended.open is not None


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print('hello', flush=True)\nimport time\ntime.sleep(60)\n", "what is no step"),
        ("print('x' * (1 << 20), flush=True)\nimport time\ntime.sleep(60)\n", "a line that has no end"),
    ],
)
async def test_a_child_that_talks_nonsense_is_ended_and_that_is_said(program: str, said: str, tmp_path: Path):
    ended = await run(tmp_path, program)
    assert said in ended.why
    assert (ended.hung, ended.stuck) == (False, "")


async def test_a_step_beyond_its_deadline_is_a_hang_and_a_child_deaf_to_SIGTERM_is_killed(tmp_path: Path):
    deaf = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    ended = await run(tmp_path, f"{deaf}{BEGIN}time.sleep(60)\n", Deadlines(2.0, 2.0))
    assert ended.hung
    assert ended.why.startswith("no end within 2 s (pid ")
    assert "state S" in ended.why
    assert (ended.open is not None, ended.stuck) == (True, "")


async def test_the_time_of_the_whole_test_bounds_each_step(tmp_path: Path):
    ended = await run(tmp_path, f"{BEGIN}import time\ntime.sleep(60)\n", within=1.0)
    assert ended.hung
    assert "the whole test's time was over" in ended.why


def test_what_would_change_the_programs_view_of_the_gpus_is_not_handed_down(monkeypatch: pytest.MonkeyPatch):
    unwanted = (
        "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_INJECTION64_PATH", "NCCL_P2P_DISABLE", "NVIDIA_VISIBLE_DEVICES",
    )  # fmt: skip
    for name in unwanted:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    env = child_env({"LD_LIBRARY_PATH": "/opt"})
    assert not set(unwanted) & env.keys()
    assert (env["CUDA_DEVICE_ORDER"], env["CUDA_CACHE_DISABLE"], env["LD_LIBRARY_PATH"]) == (
        "PCI_BUS_ID",
        "1",
        "/opt",
    )


def process(proc: Path, pid: int, parent: int, program: str, *words: str) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "cmdline").write_bytes("\0".join((program, *words, "")).encode())
    (folder / "stat").write_text(f"{pid} (a ) name) D {parent} 0 0\n")
    (folder / "wchan").write_text("nv_wait")
    (folder / "exe").symlink_to(program)


def worker(*gpus: str) -> tuple[str, ...]:
    return ("-P", "-m", "agent.selftest.p2p_worker", json.dumps({"mode": "concurrent", "gpus": gpus}))


def test_children_of_an_agent_that_has_ended_and_our_own_are_known_by_their_gpus(tmp_path: Path):
    python = "/usr/bin/python3"
    process(tmp_path / "proc", 1, 0, "/usr/lib/systemd/systemd")
    process(tmp_path / "proc", 70, 1, python, *worker(ONE))
    process(tmp_path / "proc", 71, os.getpid(), python, *worker(TWO))
    found = left_behind(tmp_path, (ONE, TWO, "0000:21:00.0"))
    assert found.keys() == {ONE, TWO}
    assert "pid 70, state D in nv_wait" in found[ONE]


def test_a_self_test_that_goes_on_beside_this_one_is_nothing_left_behind(tmp_path: Path):
    python = "/usr/bin/python3"
    process(tmp_path / "proc", 60, 1, python, "-m", "agent.app.main", "selftest", "p2p")
    process(tmp_path / "proc", 70, 60, python, *worker(ONE))
    assert left_behind(tmp_path, (ONE,)) == {}
