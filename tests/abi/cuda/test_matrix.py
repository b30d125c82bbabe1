"""What an operator sees: the self-test of four stand-in GPUs from the children to the page."""

from pathlib import Path

from agent.app.selftest_view import render_p2p
from agent.app.terminal import Style
from agent.core.fact import Known
from agent.core.observation import Observation
from agent.loop.prove import judge_test
from tests.abi.cuda.self_test import self_test
from tests.abi.cuda.stub import ADDRESSES, CudaStub, Value, needs_compiler

pytestmark = needs_compiler
QUIET = Observation(kernel_events=Known(()))


async def page(folder: Path, state: dict[str, Value], count: int = 4) -> str:
    stub = CudaStub(folder)
    for index in range(count):
        stub.add(index, ADDRESSES[index])
    stub.set(state)
    gpus = ADDRESSES[:count]
    verdict = judge_test(gpus, await self_test(stub, gpus), QUIET, QUIET, 1.0)
    return render_p2p(verdict, QUIET, Style(on=False), profile="", full=False, columns=120)


async def test_every_cell_of_the_matrix_is_its_ordered_pair(tmp_path: Path):
    state: dict[str, Value] = {
        "fault.0.1.copy": "zeros", "peer.3.0": 0, "gbps.2.3": 5, "gbps.1.0.concurrent": 1, "error.kernel.3.2": 719,
    }  # fmt: skip
    text = await page(tmp_path, state)
    rows = [line.split() for line in text.splitlines()]
    matrix = [
        ["1", ".", "CC++C", "+++++", "24/24", "+u+uu", "24/-"],
        ["2", "+++++", "24/1", ".", "+++++", "24/24", "+++++", "24/24"],
        ["3", "+++++", "24/24", "+++++", "24/24", ".", "+++++", "5/5"],
        ["4", "u+u+u", "+++++", "24/24", "++EE-", "24/-", "."],
    ]
    start = rows.index(["from", "\\", "to", "1", "2", "3", "4"]) + 1
    assert rows[start : start + 4] == matrix
    words = " ".join(text.split())
    assert f"{ADDRESSES[0]} -> {ADDRESSES[1]}: copy-push, copy-pull, concurrent: corrupt: zeros" in words
    assert f"{ADDRESSES[3]} -> {ADDRESSES[2]}: store, load: error: " in words
    assert "no faster than staging; 5 GB/s, by way of the host 11 GB/s" in words
    assert "collapses under concurrency; 1 GB/s while all pairs send" in words
    assert "control, GPU to GPU by way of the host: 12 of 12 right, 11 to 11 GB/s" in words
    assert "Verdict: CORRUPT: " in words
    assert "--seed 1" in words


async def test_a_page_about_right_data_says_so_and_what_it_does_not_show(tmp_path: Path):
    text = await page(tmp_path, {}, count=2)
    words = " ".join(text.split())
    assert "Verdict: GOOD: all 2 ordered pairs good; peer transfers may be used" in words
    assert "Kernel log: no page faults" in words
    assert "What this test cannot see" in words
    assert "Wrong:" not in text
