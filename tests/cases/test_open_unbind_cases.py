"""Law 2 across a kill: an unbind that may have been written is not written again until it is proved to have returned."""

from pathlib import Path

from agent.loop.store import Store
from tests.cases.hardware import (
    CONFIDENTIAL,
    at_any_speed,
    driver,
    is_ready,
    killed_at,
    shown,
    unbinds,
    writes_about,
)
from tests.rig import Rig, rig


def gone(host: Rig) -> str:
    """The first card whose unbind was written."""
    return next(w.split()[1] for w in host.world.writes if w.startswith("pci.unbind"))


def state_cannot_be_told(host: Rig, address: str) -> None:
    with host.world.change() as state:
        state.added_faults.append({"on": "pci.unbind_state", "target": address, "errno": "EIO"})


def state_can_be_told_again(host: Rig) -> None:
    with host.world.change() as state:
        state.added_faults.clear()


async def test_law_2_an_unbind_is_remembered_before_it_is_written_and_until_it_has_returned(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, spec=at_any_speed()) as host:
        await killed_at(host, "pci.unbind")
        card = gone(host)
        assert card in Store(host.agent.paths.state).memory.unbinding
        await host.converge()
        assert {driver(host, a) for a in CONFIDENTIAL} == {"vfio-pci"}
        assert host.memory.unbinding == {}
        assert unbinds(host, card) == 1
        await is_ready(host)


async def test_law_2_where_nothing_tells_what_became_of_an_unbind_the_card_is_left_alone_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, spec=at_any_speed()) as host:
        await killed_at(host, "pci.unbind")
        card = gone(host)
        state_cannot_be_told(host, card)
        before = writes_about(host, card)
        await host.converge()
        await host.restart()
        await host.converge()
        assert writes_about(host, card) == before
        assert {driver(host, a) for a in CONFIDENTIAL if a != card} == {"vfio-pci"}
        condition = host.condition("DriversBound")
        assert (condition.status, condition.reason) == ("False", "RebootRequired")
        assert "returned" in condition.message
        assert "reboot" in condition.next_step
        assert "RebootRequired" in shown(host, card).note
        assert host.condition("GpusHealthy").status == "False"
        assert host.status().ready == "False"
        state_can_be_told_again(host)
        await host.converge()
        assert driver(host, card) == "vfio-pci"
        assert unbinds(host, card) == 1
        await is_ready(host)
