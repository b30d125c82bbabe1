"""The facts of a GPU beyond what it is called, through the real pynvml in the real child (needs a C compiler)."""

from pathlib import Path

import pytest

from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.gpu_facts import P2PCapability, RemappedRows
from agent.core.observation import NOT_READ, Gpu, Nvml
from agent.host.nvml import ChildNvml
from tests.abi.nvml.stub import needs_compiler
from tests.host.nvml_rig import A, C, Rig, known, two_gpus, unknown_gpu
from tests.host.trees import Tree

pytestmark = needs_compiler
EIGHT = tuple(f"0000:{0x11 + 0x20 * place:02x}:00.0" for place in range(8))
P2P, VBIOS = "nvmlDeviceGetP2PStatus", "nvmlDeviceGetVbiosVersion"
P2P_ONCE = 2 * 3 * 2  # lines of the trace: two ways, three uses, and a line for each of the two GPUs


@pytest.fixture
def host(tree: Tree) -> Rig:
    return two_gpus(tree)


@pytest.fixture
def full(tree: Tree) -> Rig:
    rig = Rig(tree)
    for place, address in enumerate(EIGHT):
        rig.add(address, place)
    return rig


async def read(nvml: ChildNvml) -> Nvml:
    answer = await nvml.read()
    assert isinstance(answer, Known)
    return answer.value


def peers(gpu: Fact[Gpu]) -> dict[str, P2PCapability]:
    p2p = known(gpu).p2p
    assert isinstance(p2p, Known)
    return dict(p2p.value)


async def test_facts_of_the_card_are_translated(host: Rig):
    host.stub.set(
        {
            "gpu0.vbios": "98.02.55.00.01",
            "gpu0.serial": "1794240000011",
            "gpu0.bar1_total": 128 << 30,
            "gpu0.link_width": 8,
            "gpu0.replays": 7,
            "gpu0.clock_graphics": 2430,
            "gpu0.clock_memory": 14001,
            "gpu0.graphics_processes": "77:1 76:-",
            "gpu0.compute_mode": 3,
        }
    )
    first = await host.gpu(A)
    assert (first.vbios, first.serial) == (Known("98.02.55.00.01"), Known("1794240000011"))
    assert first.bar1_total == Known(128 * 1024)
    assert (first.link_width, first.max_link_width, first.replays) == (Known(8), Known(16), Known(7))
    assert (first.graphics_clock, first.memory_clock) == (Known(2430), Known(14001))
    assert (first.pids, first.graphics_pids) == (Known(()), Known((76, 77)))
    assert first.compute_mode == Known("exclusiveProcess")


async def test_ecc_and_mig_are_told_as_they_are_and_as_they_will_be(host: Rig):
    host.stub.set({"gpu0.ecc": 1, "gpu0.ecc_pending": 0, "gpu0.mig": 0, "gpu0.mig_pending": 1})
    gpus = (await host.read()).gpus
    first = known(gpus[A])
    assert (first.ecc_mode, first.ecc_pending) == (Known(value=True), Known(value=False))
    assert (first.mig_mode, first.mig_pending) == (Known(value=False), Known(value=True))
    assert isinstance(known(gpus[C]).ecc_mode, Absent)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (0, ()),
        (0x1, ("idle",)),
        (0x48, ("hardware slowdown", "hardware thermal slowdown")),
        (0x80, ("hardware power brake",)),
        (0x24, ("software power cap", "software thermal slowdown")),
        (0x10000, ("reason 0x10000",)),
    ],
)
async def test_what_holds_the_clocks_down_is_told_in_words(host: Rig, mask: int, words: tuple[str, ...]):
    host.stub.set({"gpu0.clock_reasons": mask})
    assert (await host.gpu(A)).clock_reasons == Known(words)


async def test_older_forms_of_a_question_serve_where_the_driver_lacks_the_newest(tree: Tree):
    newest = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetGraphicsRunningProcesses_v3")
    rig = two_gpus(tree, newest)
    rig.stub.set({"gpu0.clock_reasons": 4, "gpu0.graphics_processes": "4242:1"})
    first = await rig.gpu(A)
    assert (first.clock_reasons, first.graphics_pids) == (Known(("software power cap",)), Known((4242,)))


async def test_remapped_rows_tell_what_waits_and_what_failed(host: Rig):
    host.stub.set(
        {
            "gpu0.rows_correctable": 3,
            "gpu0.rows_uncorrectable": 2,
            "gpu0.rows_pending": 1,
            "gpu1.rows_failed": 1,
        }
    )
    gpus = (await host.read()).gpus
    assert known(gpus[A]).remapped_rows == Known(RemappedRows(3, 2, pending=True, failed=False))
    assert known(gpus[C]).remapped_rows == Known(RemappedRows(0, 0, pending=False, failed=True))


async def test_all_field_values_of_a_gpu_take_one_call(host: Rig):
    await host.read()
    assert len(host.stub.calls("nvmlDeviceGetFieldValues")) == 2


@pytest.mark.parametrize(
    ("field", "name"), [(230, "recovery_action"), (94, "replays"), (144, "remapped_rows")]
)
async def test_a_field_that_the_driver_does_not_know_is_unknown_for_itself_alone(
    host: Rig, field: int, name: str
):
    host.stub.set({f"gpu.field.{field}.code": 2})
    first = await host.gpu(A)
    fields = {n: getattr(first, n) for n in ("recovery_action", "replays", "remapped_rows")}
    assert {n: f.code for n, f in fields.items() if isinstance(f, Unknown)} == {name: "NvmlFunctionNotFound"}


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"cc.feature": 0}, Known("off")),
        ({"cc.feature": 1, "cc.environment": 2}, Known("on (production)")),
        ({"cc.feature": 1, "cc.environment": 1, "cc.devtools": 1}, Known("on (simulation, developer tools)")),
        ({}, Absent("not supported by this GPU")),
    ],
)
async def test_the_state_of_confidential_computing_is_told(
    host: Rig, state: dict[str, str | int | None], told: Fact[str]
):
    host.stub.set(state)
    assert (await host.read()).confidential_compute == told


async def test_a_driver_without_confidential_computing_leaves_it_unknown(tree: Tree):
    fact = (await two_gpus(tree, ("nvmlSystemGetConfComputeState",)).read()).confidential_compute
    assert isinstance(fact, Unknown)
    assert fact.code == "NvmlFunctionNotFound"


async def test_P4_p2p_status_is_asked_for_each_direction_and_each_use(host: Rig):
    host.stub.set({"p2p.0.1.read": 4, "p2p.0.1.atomics": 5, "p2p.1.0.write": 3})
    gpus = (await host.read()).gpus
    ok = Known("ok")
    assert peers(gpus[A]) == {C: P2PCapability(Known("disabled by registry key"), ok, Known("not supported"))}
    assert peers(gpus[C]) == {A: P2PCapability(ok, Known("topology not supported"), ok)}


async def test_P9_among_eight_gpus_the_one_direction_that_nvml_refuses_is_found(full: Rig):
    full.stub.set({"p2p.2.7": 1})
    gpus = (await full.read()).gpus
    refused = [
        (source, destination)
        for source in EIGHT
        for destination, way in peers(gpus[source]).items()
        if way != P2PCapability(Known("ok"), Known("ok"), Known("ok"))
    ]
    assert refused == [(EIGHT[2], EIGHT[7])]
    assert sum(len(peers(gpus[source])) for source in EIGHT) == 56


async def test_a_p2p_status_that_nvml_does_not_know_is_unknown_and_not_a_word(host: Rig):
    host.stub.set({"p2p.0.1.write": 6})
    write = peers((await host.read()).gpus[A])[C].write
    assert isinstance(write, Unknown)


@pytest.mark.parametrize("place", [0, 3, 7])
async def test_D4_one_of_eight_lost_at_its_opening_hides_nothing_of_the_others(full: Rig, place: int):
    full.stub.set({f"gpu{place}.code": 15})
    gpus = (await full.read()).gpus
    assert set(gpus) == set(EIGHT)
    assert unknown_gpu(gpus[EIGHT[place]]).code == "GpuLost"
    rest = [address for address in EIGHT if address != EIGHT[place]]
    for address in rest:
        assert set(peers(gpus[address])) == set(rest) - {address}
        assert known(gpus[address]).remapped_rows == Known(RemappedRows(0, 0, pending=False, failed=False))


async def test_D4_one_of_eight_lost_between_two_questions_keeps_what_it_said_before(full: Rig):
    lost = ("nvmlDeviceGetEccMode", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetFieldValues", VBIOS, P2P)
    full.stub.set({f"gpu3.call.{name}": 15 for name in lost})
    gpus = (await full.read()).gpus
    gone = known(gpus[EIGHT[3]])
    assert (gone.minor, gone.name) == (Known(3), Known("Stub"))
    for fact in (gone.ecc_mode, gone.memory_used, gone.recovery_action, gone.remapped_rows, gone.vbios):
        assert isinstance(fact, Unknown)
        assert fact.code == "GpuLost"
    for address in EIGHT:
        if address != EIGHT[3]:
            others = {peer: way for peer, way in peers(gpus[address]).items() if peer != EIGHT[3]}
            assert set(others.values()) == {P2PCapability(Known("ok"), Known("ok"), Known("ok"))}
            assert isinstance(known(gpus[address]).memory_used, Known)


async def test_what_only_a_card_or_a_driver_changes_is_not_asked_at_each_reading(host: Rig):
    host.stub.set({"gpu.vbios": "98.02"})
    nvml = host.nvml()
    first, second = await read(nvml), await read(nvml)
    assert first == second
    assert (len(host.stub.calls(P2P)), len(host.stub.calls(VBIOS))) == (P2P_ONCE, 2)


async def test_after_a_while_it_is_asked_again(host: Rig):
    nvml = ChildNvml(host.tree.root, 60.0, host.stub.env, lasting_every=0.0)
    await read(nvml)
    host.stub.set({"p2p": 4})
    way = peers((await read(nvml)).gpus[A])[C]
    assert way.read == Known("disabled by registry key")


async def test_a_gpu_that_nvidia_takes_anew_makes_it_asked_again(host: Rig):
    nvml = host.nvml()
    await read(nvml)
    host.stub.set({"gpu.vbios": "99.00"})
    _bind_again(host.tree.root / f"sys/bus/pci/drivers/nvidia/{A}")
    assert known((await read(nvml)).gpus[A]).vbios == Known("99.00")


def _bind_again(link: Path) -> None:
    """Another link to the same device. The old one lives on while the new one is made, so that their inodes differ."""
    link.with_name("new").symlink_to(link.readlink())
    link.with_name("new").replace(link)


@pytest.mark.parametrize("code", [10, 15, 999])
async def test_a_fault_that_may_go_away_is_asked_for_at_the_next_reading(host: Rig, code: int):
    nvml = host.nvml()
    host.stub.set({"gpu.vbios": "98.02", f"gpu1.call.{VBIOS}": code})
    assert isinstance(known((await read(nvml)).gpus[C]).vbios, Unknown)
    host.stub.set({f"gpu1.call.{VBIOS}": None})
    assert known((await read(nvml)).gpus[C]).vbios == Known("98.02")


async def test_what_an_old_driver_does_not_know_is_not_asked_for_again_and_again(tree: Tree):
    rig = two_gpus(tree, (VBIOS,))
    nvml = rig.nvml()
    await read(nvml)
    await read(nvml)
    assert len(rig.stub.calls(P2P)) == P2P_ONCE


async def test_D4_the_way_to_a_gpu_that_was_lost_since_is_not_told_from_memory(full: Rig):
    nvml = full.nvml()
    before = await read(nvml)
    assert EIGHT[5] in peers(before.gpus[EIGHT[0]])
    full.stub.set({"gpu5.code": 15})
    after = await read(nvml)
    assert set(peers(after.gpus[EIGHT[0]])) == set(EIGHT) - {EIGHT[0], EIGHT[5]}


async def test_D4_a_gpu_that_stays_lost_does_not_make_it_asked_each_time_and_one_that_comes_back_does(
    full: Rig,
):
    nvml = full.nvml()
    full.stub.set({"gpu.vbios": "98.02", "gpu5.code": 15})
    await read(nvml)
    await read(nvml)
    assert len(full.stub.calls(VBIOS)) == 7
    full.stub.set({"gpu5.code": None})
    at_once = known((await read(nvml)).gpus[EIGHT[5]])
    assert (at_once.vbios, at_once.p2p) == (NOT_READ, NOT_READ)
    later = (await read(nvml)).gpus
    assert known(later[EIGHT[5]]).vbios == Known("98.02")
    assert set(peers(later[EIGHT[0]])) == set(EIGHT[1:])


async def test_a_reading_that_fails_as_a_whole_forgets_nothing(host: Rig):
    nvml = host.nvml()
    await read(nvml)
    host.stub.set({"init.code": 999})
    assert isinstance(await nvml.read(), Unknown)
    host.stub.set({"init.code": None})
    assert isinstance(known((await read(nvml)).gpus[A]).p2p, Known)
    assert len(host.stub.calls(P2P)) == P2P_ONCE
