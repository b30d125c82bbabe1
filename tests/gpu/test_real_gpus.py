"""On real GPUs, with NVIDIA's own libraries: what the stand-ins for them cannot prove.

The GPUs must be idle: the self-test refuses those that something uses. Nothing is set and no GPU is reset.
"""

import json
import sys
from dataclasses import fields

import pytest

from agent.app.selftest_users import GOOD, NOT_GOOD
from agent.core.fact import Known, Unknown
from agent.host.nvml import ChildNvml
from agent.host.p2p_test import ChildP2PTest
from tests.gpu.commands import run

pytestmark = pytest.mark.gpu
ALWAYS_THERE = ("uuid", "minor", "name", "memory_total", "memory_used", "pids", "link_gen", "link_width")


async def test_nvml_tells_every_fact_of_every_gpu_or_why_not(one_gpu: tuple[str, ...]):
    nvml = await ChildNvml().read()
    assert isinstance(nvml, Known), nvml
    assert isinstance(nvml.value.driver_version, Known)
    assert set(one_gpu) <= set(nvml.value.gpus)
    for address in one_gpu:
        gpu = nvml.value.gpus[address]
        assert isinstance(gpu, Known), gpu
        facts = {f.name: getattr(gpu.value, f.name) for f in fields(gpu.value)}
        assert [name for name in ALWAYS_THERE if not isinstance(facts[name], Known)] == []
        unread = [name for name, fact in facts.items() if isinstance(fact, Unknown) and not fact.reason]
        assert unread == []


async def test_a_single_gpu_passes_its_control_and_has_no_pair(one_gpu: tuple[str, ...]):
    result = await ChildP2PTest().run(one_gpu[:1], lambda _line: None, seed=1)
    assert result.controls_ok, result.control_detail
    assert {control.path for control in result.controls} == {"host-bounce"}
    assert result.paths == ()


@pytest.mark.parametrize("full", [False, True], ids=["quick", "full"])
async def test_the_self_test_of_all_gpus_judges_every_pair_over_every_path(
    two_gpus: tuple[str, ...], full: bool
):
    """Good or bad is for the host to say; what must hold is that the test could judge, and left nothing out."""
    options = ["--gpus", ",".join(two_gpus), "-o", "json", *(["--full"] if full else [])]
    status, out, err = await run(sys.executable, "-m", "agent.app.main", "selftest", "p2p", *options)
    assert status in {GOOD, NOT_GOOD}, err
    verdict = json.loads(out)
    assert verdict["controls_ok"], verdict["control_detail"]
    assert not verdict["simulated"]
    paths = {(p["source"], p["destination"], p["path"]) for p in verdict["paths"] if p["result"] != "not-run"}
    pairs = [(a, b) for a in two_gpus for b in two_gpus if a != b]
    assert {(a, b) for a, b, _ in paths} == set(pairs)
    if verdict["result"] == "good":
        assert len(paths) == 5 * len(pairs)


async def test_the_same_seed_finds_the_same(two_gpus: tuple[str, ...]):
    first, second = [await ChildP2PTest().run(two_gpus[:2], lambda _line: None, seed=7) for _ in range(2)]
    said = [{(p.source, p.destination, p.path, p.result) for p in r.paths} for r in (first, second)]
    assert said[0] == said[1]
