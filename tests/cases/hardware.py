"""What happens to cards, drivers and hosts, in the words of the case tests."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from agent.core.status import GpuStatus
from agent.kinds.rebind import UDEV_RULES
from agent.sim import events
from agent.sim.merge import merge
from agent.sim.scenario import Do
from tests.cases.operating import INFERENCE, qwen
from tests.rig import Rig, recipe

CONFIDENTIAL = ("0000:81:00.0", "0000:91:00.0", "0000:e1:00.0", "0000:f1:00.0")
SHIFT = {
    "0000:01": "0000:11", "0000:11": "0000:21", "0000:61": "0000:71", "0000:71": "0000:81",
    "0000:81": "0000:91", "0000:91": "0000:a1", "0000:e1": "0000:f1", "0000:f1": "0001:01",
}  # fmt: skip

# Where a host is benchmarked twice, the second figure must not fail for the noise of a busy machine.
ANY_SPEED = {"throughput": "99%", "latencyP50": "9900%", "latencyP95": "9900%"}

NOTHING_FOR_NVIDIA = recipe(
    services=None, gpus={"inference": None, "confidential": {"select": [*INFERENCE, *CONFIDENTIAL]}}
)


def at_any_speed(**changes: Any) -> str:
    """The recipe without the comparison with earlier figures: these cases are not about speed."""
    return recipe(**merge(qwen(gate={"regression": ANY_SPEED}), changes))


def happens(rig: Rig, **do: Any) -> None:
    """An event of a scenario, now: ``reboot={}``, ``set={...}``, ``vmStart="101"``."""
    with rig.world.change():
        events._do(rig.world, Do.model_validate(do))


def driver(rig: Rig, address: str) -> str:
    """The driver link as the kernel has it, whatever the agent says; "" for none."""
    return rig.world.state.functions[address].driver


def card(rig: Rig, address: str) -> dict[str, str]:
    """The drivers of every function of a card."""
    slot = address.rpartition(".")[0]
    return {a: f.driver for a, f in rig.world.state.functions.items() if a.startswith(slot)}


def override(rig: Rig, address: str) -> str:
    return rig.world.state.functions[address].override


def shown(rig: Rig, address: str) -> GpuStatus:
    return next(g for g in rig.status().gpus if g.address == address)


def writes_about(rig: Rig, *words: str) -> list[str]:
    """Every write of the host's life that names all of these."""
    return [w for w in rig.world.writes if all(word in w.split() or word in w for word in words)]


def unbinds(rig: Rig, address: str) -> int:
    return sum(w.startswith(f"pci.unbind {address} ") for w in rig.world.writes)


def rules(rig: Rig) -> str:
    """The udev rules that the next boot will read."""
    file = rig.world.state.targets["host"].files.get(UDEV_RULES)
    return file.text if file is not None else ""


def host_unit(rig: Rig, name: str) -> str:
    return rig.world.state.targets["host"].units[name].active_state


async def boots(rig: Rig, **do: Any) -> None:
    """The host comes up anew, and with it the agent. ``do``: what else this boot brings, such as ``renumber``."""
    happens(rig, reboot={}, **do)
    await rig.restart()


async def serves(rig: Rig) -> None:
    """The service runs, proved, and answers. A busy machine may miss an answer or two: one look too early is no fault."""
    await _comes_true(rig, lambda: rig.condition("ServiceReady/qwen").status == "True")


async def is_ready(rig: Rig) -> None:
    await _comes_true(rig, lambda: rig.status().ready == "True")


async def _comes_true(rig: Rig, holds: Callable[[], bool]) -> None:
    for _ in range(20):
        if holds():
            return
        await asyncio.sleep(0.1)
        await rig.one_pass()
    raise AssertionError([c for c in rig.status().conditions if c.status != "True"])


async def killed_at(rig: Rig, write: str) -> None:
    """The agent dies as soon as this write has been made, in the middle of its pass; another one takes over."""
    task = asyncio.create_task(rig.one_pass())
    async with asyncio.timeout(10.0):
        while not any(w.startswith(write) for w in rig.world.writes):
            assert not task.done(), f"the pass ended without: {write}"
            await asyncio.sleep(0.002)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await rig.restart()


def everything_said(rig: Rig) -> str:
    """Every word that status, plan and conditions say."""
    return rig.status().model_dump_json()
