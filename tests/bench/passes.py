"""The cost of a pass that finds nothing to do, beside the bare reads of the same facts."""

import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agent.core.render import DROP_IN
from agent.kinds.module_options import MODPROBE_CONF
from agent.kinds.rebind import UDEV_RULES
from agent.ports import Ports
from agent.sim.profile import synthetic_profile
from tests.rig import Rig, recipe, rig

ROUNDS = 40


async def noop_pass() -> dict[str, Any]:
    """Eight GPUs, the first recipe, converged and serving."""
    with tempfile.TemporaryDirectory() as folder:
        async with rig(Path(folder), spec=recipe()) as agent:
            await agent.converge()
            return await _compare(
                agent, ["0000:01:00.0", "0000:11:00.0", "0000:61:00.0", "0000:71:00.0"], service=True
            )


async def linearity() -> dict[str, Any]:
    """The same spec over 8 and over 1,000 synthetic GPUs, without services."""
    few, many = await _synthetic(8), await _synthetic(1000)
    per_few, per_many = few["pass_ms"] / 8, many["pass_ms"] / 1000
    return {
        "pass_8_ms": few["pass_ms"],
        "pass_1000_ms": many["pass_ms"],
        "raw_1000_ms": many["raw_ms"],
        "ratio_to_raw_reads_1000": many["ratio_to_raw_reads"],
        "per_gpu_ratio_1000_to_8": round(per_many / per_few, 3),
    }


async def _synthetic(gpus: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        half = gpus // 2
        spec = {
            "gpus": {
                "a": {"select": {"numaNode": 0, "count": half}, "driver": "nvidia"},
                "b": {"select": {"numaNode": 1, "count": gpus - half}, "driver": "nvidia"},
            }
        }
        document = {
            "apiVersion": "gpu-host/v1",
            "kind": "GpuHost",
            "metadata": {"name": "synthetic"},
            "spec": spec,
        }
        async with rig(Path(folder), spec=json.dumps(document), profile=synthetic_profile(gpus)) as agent:
            await agent.converge()
            pci = await agent.host.ports.pci.read()
            return await _compare(agent, [a for a, f in pci.functions.items() if f.is_gpu], service=False)


async def _compare(agent: Rig, gpus: list[str], *, service: bool) -> dict[str, Any]:
    """Passes and raw reads in turn, so that a noisy machine disturbs both alike; medians."""
    ports = agent.host.ports
    functions = [
        a
        for a in (await ports.pci.read()).functions
        if a.rpartition(".")[0] in {g.rpartition(".")[0] for g in gpus}
    ]
    passes, raws = [], []
    for _ in range(ROUNDS):
        passes.append(await _timed(agent.one_pass))
        raws.append(await _timed(lambda: _raw_reads(ports, functions, service=service)))
    assert not agent.results[-1].plan
    pass_ms, raw_ms = statistics.median(passes) * 1000, statistics.median(raws) * 1000
    return {
        "pass_ms": round(pass_ms, 3),
        "raw_ms": round(raw_ms, 3),
        "ratio_to_raw_reads": round(pass_ms / raw_ms, 2),
    }


async def _timed(work: Callable[[], Awaitable[object]]) -> float:
    begun = time.perf_counter()
    await work()
    return time.perf_counter() - begun


async def _raw_reads(ports: Ports, functions: list[str], *, service: bool) -> None:
    """What the observer reads, read one after the other and thrown away."""
    await ports.platform.read()
    await ports.pci.read()
    await ports.nvml.read()
    await ports.kernel_log.read("")
    await ports.holders.read(functions)
    host = ports.targets("host")
    await host.read_file(UDEV_RULES)
    await host.read_file(MODPROBE_CONF)
    if not service:
        return
    await host.unit("nvidia-persistenced.service")
    target = ports.targets("lxc:129")
    await target.facts()
    unit = await target.unit("sglang-qwen.service")
    await target.read_file(DROP_IN.format(unit="sglang-qwen.service"))
    await target.exists("/models/Qwen3.5-122B-A10B")
    process = await target.process(unit.main_pid)
    assert process is not None
