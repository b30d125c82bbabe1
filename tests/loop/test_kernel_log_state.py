"""The kernel log across restarts and boots: every line counts once, and what was lost is said."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agent.app.paths import Paths
from agent.app.readonly import observe_only
from agent.app.wiring import Choice
from agent.core.fact import Known
from agent.core.kernel_log import MAX_RECORDS, MAX_SAMPLE, Folded, fold
from agent.core.kernel_log_state import KernelLogState, from_file, to_file
from agent.core.observation import KernelEvent
from agent.loop.observe import MAX_READS
from agent.loop.store import Store
from agent.ports import KernelLines
from tests.cases.hardware import boots
from tests.cases.operating import kernel_says
from tests.rig import Rig, rig

GPU = "0000:01:00.0"
XID = "NVRM: Xid (PCI:0000:01:00): 13, pid=1, name=python3, Graphics Exception"
FAULT = f"nvidia {GPU}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0003 address=0x80000040 flags=0x0020]"


def saved(agent: Rig) -> Path:
    return agent.agent.paths.state / "kernel-log.json"


def xids(agent: Rig) -> list[int]:
    events = agent.agent.reconciler.observer.kernel_log.folded.events
    return [e.count for e in events if e.sort == "xid"]


async def test_a_restart_goes_on_where_the_log_was_left(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        kernel_says(agent, XID, 3)
        await agent.one_pass()
        with agent.world.change():
            agent.world.state.kernel_log[:] = []  # the kernel has overwritten them
        await agent.restart()
        await agent.one_pass()
        assert xids(agent) == [3]


async def test_a_crash_after_lines_were_seen_and_before_they_were_saved_counts_them_once(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as agent:
        kernel_says(agent, XID, 3)
        await agent.one_pass()
        kernel_says(agent, XID, 2)
        await agent.agent.reconciler.look()  # seen; the pass that would save it never ends
        assert xids(agent) == [5]
        await agent.restart()
        await agent.one_pass()
        assert xids(agent) == [5]


async def test_a_boot_ends_what_the_log_said_of_the_one_before(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        kernel_says(
            agent, "NVRM: Xid (PCI:0000:01:00): 119, pid=1, Timeout after 6s of waiting for RPC response"
        )
        await agent.one_pass()
        assert agent.condition("GpusHealthy").status == "False"
        await boots(agent)
        await agent.one_pass()
        assert agent.condition("GpusHealthy").status == "True"
        assert xids(agent) == []


async def test_P7_a_fault_before_a_restart_still_revokes_and_is_not_forgotten_with_the_log(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as agent:
        kernel_says(agent, FAULT, 5000)
        await agent.one_pass()
        await agent.restart()
        await agent.agent.reconciler.specs.refresh()
        obs = (await agent.agent.reconciler.look()).obs
        assert isinstance(obs.kernel_events, Known)
        assert [(e.address, e.count) for e in obs.kernel_events.value if e.code == 0x20] == [(GPU, 5000)]
        assert saved(agent).stat().st_size < 10_000


async def test_the_file_is_written_only_when_lines_have_come(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        before = saved(agent).stat()
        await agent.one_pass()
        assert saved(agent).stat().st_ino == before.st_ino
        await agent.restart()
        await agent.one_pass()
        assert saved(agent).stat().st_ino == before.st_ino
        kernel_says(agent, XID)
        await agent.one_pass()
        assert saved(agent).stat().st_ino != before.st_ino
        assert saved(agent).stat().st_mode & 0o777 == 0o600


async def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.one_pass()
        saved(agent).unlink()
        saved(agent).mkdir()  # in its place, so that no rename can succeed
        kernel_says(agent, XID, 2)
        await agent.one_pass()
        assert xids(agent) == [2]
        saved(agent).rmdir()
        await agent.one_pass()
        assert from_file(saved(agent).read_bytes()) == agent.agent.reconciler.observer.kernel_log


@pytest.mark.parametrize("text", ["", "{", '{"version": 2}', '{"version": 1, "unheard_of": 1}', "[" * 10_000])
async def test_a_file_that_makes_no_sense_means_reading_the_boot_again(tmp_path: Path, text: str) -> None:
    async with rig(tmp_path) as agent:
        kernel_says(agent, XID, 3)
        await agent.one_pass()
        saved(agent).write_text(text)
        await agent.restart()
        await agent.one_pass()
        assert xids(agent) == [3]


async def test_looking_reads_what_the_agent_saved_and_writes_nothing(tmp_path: Path) -> None:
    paths = Paths(tmp_path, tmp_path / "none.yaml")
    choice = Choice("sim")
    first, _ = await observe_only(choice, paths)
    assert not (paths.state / "kernel-log.json").exists()
    assert isinstance(first.kernel_events, Known)
    async with rig(tmp_path) as agent:
        kernel_says(agent, XID, 3)
        await agent.one_pass()
        with agent.world.change():
            agent.world.state.kernel_log[:] = []
        file = saved(agent).read_bytes(), saved(agent).stat().st_ino
        obs, _ = await observe_only(choice, paths)
        assert isinstance(obs.kernel_events, Known)
        assert [e.count for e in obs.kernel_events.value if e.sort == "xid"] == [3]
        assert (saved(agent).read_bytes(), saved(agent).stat().st_ino) == file


class Torrent:
    """A log that never ends: each read meets its bound."""

    def __init__(self, reads: int) -> None:
        self.left = reads

    async def read(self, cursor: str) -> KernelLines:
        self.left -= 1
        return KernelLines(((1.0, FAULT),), f"boot {self.left}", more=self.left > 0)


@pytest.mark.parametrize(("reads", "unread"), [(MAX_READS, False), (MAX_READS + 1, True)])
async def test_a_flood_is_read_up_to_a_bound_and_what_is_left_is_said(
    tmp_path: Path, reads: int, unread: bool
) -> None:
    async with rig(tmp_path) as agent:
        await agent.agent.reconciler.specs.refresh()
        observer = agent.agent.reconciler.observer
        observer.ports = replace(observer.ports, kernel_log=Torrent(reads))
        obs = (await agent.agent.reconciler.look()).obs
        assert obs.kernel_unread is unread
        assert isinstance(obs.kernel_events, Known)
        await agent.one_pass()
        health = agent.condition("GpusHealthy")
        assert health.status == "True"  # the next pass has read the rest


def test_the_file_stays_small_whatever_the_log_says(tmp_path: Path) -> None:
    lines = [
        (1.0, f"nvidia {n >> 16:04x}:{n >> 8 & 255:02x}:{n & 31:02x}.0: AMD-Vi: Event logged [IO_PAGE_FAULT flags={n:#x} " + "\u00e9" * 900)
        for n in range(30_000)
    ]  # fmt: skip
    store = Store(tmp_path)
    store.save_kernel_log(KernelLogState("boot:30000", fold(Folded(), lines, None)))
    assert len(store.kernel_log.folded.events) <= MAX_RECORDS
    assert (tmp_path / "kernel-log.json").stat().st_size < MAX_RECORDS * (2 * MAX_SAMPLE + 300)


def test_a_saved_position_comes_back_as_it_was() -> None:
    events = (
        KernelEvent("xid", GPU, 3, 1.25, 2.5, "NVRM: \u00e9 \ufffd", 31),
        KernelEvent("page-fault", GPU, 1, 0.1, 0.1, "x", None, "0000:11:00.0"),
    )
    state = KernelLogState("boot:7", Folded(events, "firmware", GPU), 2)
    assert from_file(to_file(state)) == state
    assert set(json.loads(to_file(state))) == {"version", "cursor", "context", "device", "gaps", "events"}


def test_a_file_that_cannot_be_read_is_as_good_as_none(tmp_path: Path) -> None:
    (tmp_path / "kernel-log.json").mkdir()
    assert Store(tmp_path).kernel_log == KernelLogState()
