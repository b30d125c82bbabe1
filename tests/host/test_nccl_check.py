"""The NCCL check run for real: our script, processes and sockets; only torch is the tests' own stand-in."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from agent.core.nccl_verdict import NcclRun, judge
from agent.host.nccl_check import TargetNcclCheck, script
from agent.host.target_names import BY_PID_1
from agent.ports import NcclSteps

STAND_IN = Path(__file__).parents[1] / "selftest/fake_torch"
SMALL = {"backend": "gloo", "world": 3, "sizes": [1, 70000], "repeats": 1, "first": 20.0, "step": 1.0}


@pytest.fixture(autouse=True)
def _private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield
    assert not list(tmp_path.glob("gpu-host-agent-nccl.*")), "something is left behind"


async def steps(env: Mapping[str, str] | None = None, limit: float = 60.0, **request: object) -> NcclSteps:
    whole = {"PYTHONPATH": str(STAND_IN), **(env or {})}
    return await TargetNcclCheck().run("host", sys.executable, whole, {**SMALL, **request}, limit)


async def run(fault: str = "", limit: float = 60.0, **request: object) -> NcclRun:
    told = await steps({"FAKE_TORCH_FAULT": fault} if fault else {}, limit, **request)
    return judge(told.steps, 3, p2p=False, ended=told.ended)


async def test_every_collective_and_every_ordered_pair_is_tried_and_good() -> None:
    told = await steps(repeats=2)
    found = judge(told.steps, 3, p2p=False, ended=told.ended)
    assert (found.result, found.detail, found.findings) == ("good", "", ())
    assert found.torch == "0.0-fake"
    sends = {(s.source, s.destination) for s in told.steps if s.what == "send" and s.wrong == 0}
    assert sends == {(a, b) for a in range(3) for b in range(3) if a != b}
    tried = {(s.what, s.size, s.repeat, s.rank) for s in told.steps if s.wrong == 0 and s.what != "send"}
    expected = {
        (w, n, k, r)
        for w in ("all_reduce", "all_gather")
        for n in (1, 70000)
        for k in (0, 1)
        for r in range(3)
    }
    assert tried == expected


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("wrong:all_reduce:1", "all_reduce of 1 elements: 1 elements wrong on rank 1; the first at 0"),
        ("wrong:all_gather:2", "all_gather of 1 elements: 1 elements wrong on rank 2, the part of rank 0"),
        ("swap:all_reduce:0", "all_reduce of 70000 elements"),
        (
            "wrong:recv:2",
            "send from rank 0 to 2 (70000 elements): 1 elements wrong on rank 2; the first at 69999",
        ),
        ("drop:recv:1", "70000 elements wrong on rank 1; the first at 0: -559038737 instead of"),
    ],
)
async def test_wrong_data_is_found_and_named(fault: str, said: str) -> None:
    found = await run(fault)
    assert found.result == "corrupt"
    assert said in found.detail


@pytest.mark.parametrize("sort", ["hang", "deaf"])
async def test_P2_a_hang_is_named_by_its_step_and_ranks_and_leaves_nobody(sort: str) -> None:
    found = await run(f"{sort}:all_gather:1")
    assert found.result == "hung"
    assert (
        "all_gather of 1 elements (ranks" in found.detail
        or "all_gather of 1 elements (rank 1)" in found.detail
    )
    assert "no process said anything for 1 s" in found.detail
    assert found.left == ()


async def test_a_hang_at_the_end_is_no_success() -> None:
    found = await run("hang:destroy:0")
    assert (found.result, found.detail) == ("hung", "leave (rank 0): no process said anything for 1 s")


async def test_a_hang_before_all_have_joined_has_the_longer_deadline() -> None:
    found = await run("hang:init:1", first=2.0)
    assert found.result == "hung"
    assert (
        found.detail
        == "init (rank 1), all_reduce of 1 elements (ranks 0, 2): no process said anything for 2 s"
    )


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("die:all_reduce:2", "rank 2 in all_reduce of 1 elements: killed by signal 9 (SIGKILL)"),
        (
            "exit:all_gather:1",
            "rank 1 in all_gather of 1 elements: ended with status 7: terminate called after",
        ),
        ("raise:all_reduce:0", "rank 0 in all_reduce of 1 elements: RuntimeError: unhandled cuda error"),
    ],
)
async def test_who_dies_or_fails_is_named_with_its_last_words(fault: str, said: str) -> None:
    found = await run(fault)
    assert found.result == "error"
    assert any(said.partition(": ")[2] in finding for finding in found.findings)
    assert found.detail.startswith(said)


async def test_an_interpreter_without_torch_says_so() -> None:
    told = await steps({"PYTHONPATH": ""}, limit=60.0)
    found = judge(told.steps, 3, p2p=False, ended=told.ended)
    assert found.result == "not-run"
    assert "in import: ModuleNotFoundError: No module named 'torch'" in found.detail


async def test_an_interpreter_that_is_not_there_is_an_error_with_its_path() -> None:
    with pytest.raises(OSError, match="/no/such/python"):
        await TargetNcclCheck().run("host", "/no/such/python", {}, SMALL, 10.0)


async def test_the_whole_time_is_bounded_although_every_step_is_quick() -> None:
    told = await steps({"FAKE_TORCH_FAULT": "hang:all_reduce:1"}, limit=2.0, step=50.0)
    found = judge(told.steps, 3, p2p=False, ended=told.ended)
    assert found.result == "hung"
    assert found.detail.endswith("it did not end within 2 s")


async def test_values_reach_the_check_whatever_is_in_them_and_are_on_no_command_line() -> None:
    odd = "a'b\"c $HOME `x` \\ %s {}"
    text = script("/usr/bin/python3", {"ODD": odd}, SMALL, 5.0)
    run_line = next(line for line in text.splitlines() if "timeout -k" in line)
    assert "ODD" not in run_line
    told = await steps({"NCCL_P2P_DISABLE": "1", "FAKE_TORCH_ECHO": odd})
    assert judge(told.steps, 3, p2p=False).torch.endswith(odd)


async def test_nccls_log_is_read_and_sglangs_defaults_hold_where_nobody_sets_others() -> None:
    via = "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"
    told = await steps({"FAKE_TORCH_LOG": via, "NCCL_NVLS_ENABLE": "1", "NCCL_DEBUG": "WARN"})
    found = judge(told.steps, 3, p2p=True)
    assert (found.result, [route.via for route in found.routes]) == ("good", ["P2P/CUMEM"])
    assert found.warnings == ("NCCL_DEBUG=INFO NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=1 NCCL_P2P_DISABLE=None",)
    off = judge(told.steps, 3, p2p=False)
    assert off.result == "error"
    assert "P2P is off, and NCCL's log shows that it uses P2P: rank 0 -> 1 via P2P/CUMEM" in off.detail


async def test_the_agents_own_environment_is_none_of_the_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    told = await steps()
    assert "NCCL_P2P_DISABLE=None" in judge(told.steps, 3, p2p=True).warnings[0]


async def test_behind_pid_1_the_check_has_as_long_as_it_may_take(tmp_path: Path) -> None:
    """Whatever enters a container is ended by PID 1 after a time, which questions never take."""
    starter = tmp_path / "systemd-run"
    starter.write_text(
        '#!/bin/sh\necho "$@" >"$0.said"\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n'
    )
    starter.chmod(0o755)
    prefix = ("env", f"PATH={tmp_path}:{os.environ['PATH']}", *BY_PID_1)
    env = {"PYTHONPATH": str(STAND_IN)}
    told = await TargetNcclCheck(lambda _name: prefix).run("lxc:129", sys.executable, env, SMALL, 300.0)
    assert judge(told.steps, 3, p2p=False).result == "good"
    assert "--property=RuntimeMaxSec=330" in starter.with_suffix(".said").read_text()


async def test_an_agent_that_is_killed_leaves_nothing_running(tmp_path: Path) -> None:
    """The check is in a session of its own: it has to find out by itself that nobody listens."""
    program = (
        "import asyncio, sys; from tests.host.test_nccl_check import steps;"
        "asyncio.run(steps({'FAKE_TORCH_FAULT': 'hang:all_reduce:1'}, step=300.0))"
    )
    agent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, start_new_session=True)
    async with asyncio.timeout(60):
        while not (dirs := list(tmp_path.glob("gpu-host-agent-nccl.*/rendezvous.0"))):
            await asyncio.sleep(0.05)
    running = _inside(dirs[0].parent)
    assert len(running) >= 4
    os.killpg(agent.pid, signal.SIGKILL)
    await agent.wait()
    async with asyncio.timeout(60):
        while dirs[0].parent.exists() or any(Path(f"/proc/{pid}/cwd").exists() for pid in running):
            await asyncio.sleep(0.1)


def _inside(directory: Path) -> list[str]:
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if link.resolve() == directory:
                found.append(link.parent.name)
        except OSError:
            continue
    return found
