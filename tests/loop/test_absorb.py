"""What an observation teaches the memory: who the cards are, and which of them are lost for this boot."""

from dataclasses import replace

from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.kernel_log import Folded, fold
from agent.core.memory import Memory, Quarantine, Unbinding
from agent.core.observation import Gpu, KernelEvent, Nvml, Observation, Pci, PciFunction, Platform
from agent.loop.absorb import absorb

ADDRESS, OTHER = "0000:01:00.0", "0000:11:00.0"
FIRST_BOOT = Known("boot-1")


def card(address: str = ADDRESS, serial: str = "aa") -> PciFunction:
    return PciFunction(
        address, 0x10DE, 0x2BB5, 0x030200, driver=Known("nvidia"), serial=Known(serial), slot=Known("1")
    )


def shown(address: str = ADDRESS, uuid: str = "GPU-1") -> Gpu:
    return Gpu(address, 0, Known(0), Known(uuid), Known("model"), serial=Known("board"))


def seen(
    *functions: PciFunction, gpus: dict[str, Fact[Gpu]] | None = None, boot: Fact[str] = FIRST_BOOT
) -> Observation:
    nvml: Fact[Nvml] = (
        Known(Nvml(Known("590"), gpus=gpus)) if gpus is not None else Absent("no GPU on nvidia")
    )
    pci = Known(Pci({f.address: f for f in functions}))
    return Observation(Platform(boot_id=boot), pci, nvml, kernel_events=Known(()))


def lost(address: str = ADDRESS) -> KernelEvent:
    line = f"NVRM: Xid (PCI:{address}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    (event,) = fold(Folded(), [(1.0, line)], None).events
    return event


def test_a_card_is_remembered_as_it_was_first_seen() -> None:
    memory = absorb(Memory(), seen(card(), gpus={ADDRESS: Known(shown())}), 5.0)
    found = memory.identities[ADDRESS]
    assert (found.uuid, found.serial, found.board, found.slot) == ("GPU-1", "aa", "board", "1")


def test_the_same_memory_comes_back_when_there_is_nothing_new() -> None:
    obs = seen(card(), gpus={ADDRESS: Known(shown())})
    memory = absorb(Memory(), obs, 5.0)
    assert absorb(memory, obs, 99.0) is memory


def test_another_card_at_a_known_address_is_not_learned() -> None:
    memory = absorb(Memory(), seen(card(), gpus={ADDRESS: Known(shown())}), 5.0)
    other = seen(card(serial="bb"), gpus={ADDRESS: Known(shown(uuid="GPU-2"))})
    assert absorb(memory, other, 6.0).identities == memory.identities


def test_a_uuid_is_added_to_a_card_first_seen_without_one() -> None:
    memory = absorb(Memory(), seen(card()), 5.0)
    assert memory.identities[ADDRESS].uuid == ""
    memory = absorb(memory, seen(card(), gpus={ADDRESS: Known(shown())}), 6.0)
    assert memory.identities[ADDRESS].uuid == "GPU-1"


def test_a_uuid_outlives_the_card_s_move_to_another_driver() -> None:
    memory = absorb(Memory(), seen(card(), gpus={ADDRESS: Known(shown())}), 5.0)
    away = seen(replace(card(), driver=Known("vfio-pci")))
    assert absorb(memory, away, 6.0).identities[ADDRESS].uuid == "GPU-1"


def test_nothing_is_learned_of_a_card_that_shows_neither_uuid_nor_serial() -> None:
    nameless = replace(card(), serial=Unknown("config space is unreadable"))
    assert absorb(Memory(), seen(nameless), 5.0).identities == {}


def test_an_unreadable_pci_tree_forgets_nobody() -> None:
    memory = absorb(Memory(), seen(card(), gpus={ADDRESS: Known(shown())}), 5.0)
    blind = replace(seen(card()), pci=Unknown("it did not answer"))
    assert absorb(memory, blind, 6.0) is memory


def test_what_is_no_gpu_is_no_card() -> None:
    audio = replace(card("0000:01:00.1"), class_code=0x040300)
    assert absorb(Memory(), seen(audio), 5.0).identities == {}


def test_D4_a_card_that_the_kernel_log_calls_lost_is_quarantined_with_its_line() -> None:
    obs = replace(seen(card()), kernel_events=Known((lost(),)))
    entry = absorb(Memory(), obs, 5.0).quarantine[ADDRESS]
    assert (entry.reason, entry.boot_id, entry.at) == ("GpuLost", "boot-1", 5.0)
    assert "fallen off the bus" in entry.message


def test_D4_a_card_that_nvml_calls_lost_is_quarantined_and_its_neighbour_is_not() -> None:
    gpus: dict[str, Fact[Gpu]] = {ADDRESS: Unknown("GPU is lost", "GpuLost"), OTHER: Known(shown(OTHER))}
    memory = absorb(Memory(), seen(card(), card(OTHER, "bb"), gpus=gpus), 5.0)
    assert set(memory.quarantine) == {ADDRESS}


def test_a_card_that_nvml_cannot_read_otherwise_is_not_lost() -> None:
    gpus: dict[str, Fact[Gpu]] = {ADDRESS: Unknown("Unknown Error", "NvmlUnknownError")}
    assert absorb(Memory(), seen(card(), gpus=gpus), 5.0).quarantine == {}


def test_a_quarantine_keeps_its_first_reason_and_time() -> None:
    obs = replace(seen(card()), kernel_events=Known((lost(),)))
    memory = absorb(Memory(), obs, 5.0)
    assert absorb(memory, obs, 9.0) is memory


def test_another_boot_ends_a_quarantine() -> None:
    memory = absorb(Memory(), replace(seen(card()), kernel_events=Known((lost(),))), 5.0)
    assert absorb(memory, seen(card(), boot=Known("boot-2")), 6.0).quarantine == {}


def test_an_unknown_boot_ends_no_quarantine() -> None:
    memory = absorb(Memory(), replace(seen(card()), kernel_events=Known((lost(),))), 5.0)
    assert absorb(memory, seen(card(), boot=Unknown("not readable")), 6.0).quarantine == memory.quarantine


UNBINDING = Unbinding(boot_id="boot-1", at=1.0)


def asked(**states: Fact[str]) -> Observation:
    return replace(seen(card()), unbinds={ADDRESS: states["state"]})


def test_what_was_quarantined_while_the_boot_was_unknown_is_kept_for_this_boot() -> None:
    entry = Quarantine(address=ADDRESS, reason="RebootRequired", message="stuck", boot_id="", at=1.0)
    memory = absorb(Memory(quarantine={ADDRESS: entry}), seen(card()), 5.0)
    assert memory.quarantine[ADDRESS].boot_id == "boot-1"
    assert absorb(memory, seen(card(), boot=Known("boot-2")), 6.0).quarantine == {}


def test_law_2_an_unbind_left_open_is_closed_only_by_proof_or_another_boot() -> None:
    memory = Memory(unbinding={ADDRESS: UNBINDING})
    for state in ("none", "done", "failed: EBUSY"):
        assert absorb(memory, asked(state=Known(state)), 5.0).unbinding == {}
    assert absorb(memory, seen(card(), boot=Known("boot-2")), 5.0).unbinding == {}
    for proof in (asked(state=Known("running")), asked(state=Unknown("EIO")), seen(card())):
        assert absorb(memory, proof, 5.0).unbinding == memory.unbinding
    pending = replace(asked(state=Known("none")), pci=Known(Pci({ADDRESS: card()}, {}, (ADDRESS,))))
    assert absorb(memory, pending, 5.0).unbinding == memory.unbinding
    blind = replace(asked(state=Known("none")), pci=Unknown("EIO"))
    assert absorb(memory, blind, 5.0).unbinding == memory.unbinding
