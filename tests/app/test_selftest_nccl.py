"""``agent selftest nccl``: what is run, what is said of it, and what is refused."""

import argparse
from collections.abc import Mapping
from pathlib import Path

import pytest

from agent.app.nccl_view import render_nccl
from agent.app.paths import paths_for
from agent.app.selftest_nccl import check, chosen, code, nccl
from agent.app.terminal import Style
from agent.app.wiring import Choice
from agent.core.errors import TerminalError
from agent.core.nccl_verdict import NcclStep
from agent.core.resolve import resolve
from agent.core.verdict import PairResult
from agent.ports import NcclSteps
from tests.core.verdicts import converged

VIA_P2P = "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"
VIA_SHM = "NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct"


class Answers:
    """``NcclCheckPort`` that answers by whether NCCL's P2P is off in the environment that it is given."""

    def __init__(self, on: tuple[NcclStep, ...], off: tuple[NcclStep, ...]) -> None:
        self.on, self.off = on, off
        self.asked: list[tuple[str, str, Mapping[str, str], Mapping[str, object]]] = []

    async def run(
        self, target: str, python: str, env: Mapping[str, str], request: Mapping[str, object], limit: float
    ) -> NcclSteps:
        self.asked.append((target, python, env, request))
        return NcclSteps(self.off if env.get("NCCL_P2P_DISABLE") == "1" else self.on)


def good(line: str) -> tuple[NcclStep, ...]:
    done = [NcclStep(step="done", rank=rank) for rank in range(4)]
    return (NcclStep(step="log", line=line), *done, NcclStep(step="finished"))


HUNG = (
    NcclStep(step="begin", rank=0, what="all_reduce", size=1, repeat=0),
    NcclStep(step="hung", detail="30 s"),
)
NO_TORCH = (
    NcclStep(step="begin", rank=0, what="import"),
    NcclStep(step="failed", rank=0, detail="ModuleNotFoundError: No module named 'torch'"),
)


def shown(text: str) -> str:
    return " ".join(text.split())


async def run(answers: Answers, result: PairResult = "good", *, control: bool = False) -> tuple[int, str]:
    """Exit code and page of the recipe's service; ``result`` of the P2P self-test before."""
    inputs = converged(result=result)
    service, revision = chosen("qwen", resolve(inputs).services)
    checked = await check(service, revision, answers, control=control)
    return code(checked), shown(render_nccl(checked, Style(on=False), 100))


async def test_a_good_run_needs_no_control_and_shows_the_way_that_data_took() -> None:
    answers = Answers(on=good(VIA_P2P), off=())
    status, page = await run(answers)
    assert status == 0
    assert "as it is started now, P2P on: GOOD" in page
    assert "transport by NCCL's log: P2P/CUMEM (1 route)" in page
    ((target, python, env, request),) = answers.asked
    assert (target, request) == ("lxc:129", {"world": 4})
    assert python == "/opt/ml-env/bin/python3"
    assert "NCCL_P2P_DISABLE" not in env
    assert env["CUDA_VISIBLE_DEVICES"].count("GPU-") == 4


async def test_a_failure_with_p2p_is_tried_without_and_then_p2p_is_to_blame() -> None:
    status, page = await run(Answers(on=HUNG, off=good(VIA_SHM)))
    assert status == 3
    assert "P2P on: HUNG all_reduce of 1 elements (rank 0): 30 s" in page
    assert "control, P2P off: GOOD" in page
    assert "Only P2P fails: agent selftest p2p --gpus 0000:01:00.0,0000:11:00.0" in page


async def test_where_the_control_fails_too_p2p_is_not_blamed() -> None:
    _, page = await run(Answers(on=HUNG, off=HUNG))
    assert "P2P alone is not the cause" in page
    assert "Only P2P" not in page


async def test_p2p_that_nccl_uses_although_the_verdict_has_it_off_is_no_success() -> None:
    answers = Answers(on=(), off=good(VIA_P2P))
    status, page = await run(answers, "corrupt")
    assert status == 3
    assert (
        "P2P off: ERROR P2P is off, and NCCL's log shows that it uses P2P: rank 0 -> 1 via P2P/CUMEM" in page
    )
    assert len(answers.asked) == 1
    assert answers.asked[0][2]["NCCL_P2P_DISABLE"] == "1"


async def test_P11_the_failure_of_host_memory_comes_with_its_setting() -> None:
    line = "shm.cc:590 NCCL WARN Cuda failure 217 'peer access is not supported between these two devices'"
    _, page = await run(Answers(on=(), off=(NcclStep(step="log", line=line), *HUNG)), "corrupt")
    assert "NCCL_CUMEM_HOST_ENABLE: 0" in page
    assert "NCCL warns: Cuda failure 217" in page


async def test_an_interpreter_without_torch_is_not_judged() -> None:
    status, page = await run(Answers(on=NO_TORCH, off=NO_TORCH))
    assert status == 4
    assert "P2P on: NOT-RUN rank 0 in import: ModuleNotFoundError" in page
    assert "Nothing was tried" in page


async def test_a_control_that_is_asked_for_is_run_after_a_success() -> None:
    status, page = await run(Answers(on=good(VIA_P2P), off=good(VIA_SHM)), control=True)
    assert status == 0
    assert "control, P2P off: GOOD transport by NCCL's log: SHM/direct/direct" in page


async def test_processes_that_cannot_be_ended_are_named() -> None:
    _, page = await run(Answers(on=(*HUNG, NcclStep(step="left", pids=(77, 78))), off=good(VIA_SHM)))
    assert "SIGKILL does not end are left in lxc:129: pids 77, 78" in page


def test_a_service_that_the_spec_does_not_have_is_refused_with_those_it_has() -> None:
    with pytest.raises(TerminalError, match="no service 'llama'") as error:
        chosen("llama", resolve(converged()).services)
    assert error.value.next_step == "services of the spec: qwen"


async def test_a_simulated_host_is_refused(tmp_path: Path) -> None:
    args = argparse.Namespace(service="qwen", control=False, force=False, output="text")
    paths = paths_for(str(tmp_path), None, "sim")
    with pytest.raises(TerminalError, match="a simulated host has no interpreter"):
        await nccl(args, Choice("sim"), paths)
