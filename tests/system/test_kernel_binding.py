"""Binding on a real kernel: the agent is the guest's service, and the spec is edited. Tests follow one another."""

from collections.abc import Iterator

import pytest

from tests.system.operating import Operated
from tests.system.vm.machine import AUDIO, GPUS, PCI, VirtualMachine

pytestmark = pytest.mark.system

_RUN = "/run/systemd/system"


@pytest.fixture(scope="module")
def host() -> Iterator[Operated]:
    with VirtualMachine(iommu="amd") as vm:
        operated = Operated(vm)
        operated.start()
        yield operated


@pytest.fixture(autouse=True)
def _no_unbind_of_a_card_in_use(host: Operated) -> Iterator[None]:
    yield
    assert host.kernel_saw_no_unbind_in_use(), "law 1: the agent asked the driver for a card in use"


def audio_of(gpu: str) -> str:
    return AUDIO[GPUS.index(gpu)]


def put(host: Operated, vfio: list[str]) -> None:
    """Where a test starts from; nothing happens when the test before it has ended there."""
    host.edit(vfio)
    host.wait_bound(vfio)


def triggers(host: Operated, after: int) -> list[str]:
    return [str(done["trigger"]) for done in host.passes()[after:]]


def add_unit(host: Operated, name: str, command: str = "exec sleep infinity") -> None:
    text = f"[Service]\nExecStart=/bin/bash -c '{command}'\n"
    host.vm.put(f"{_RUN}/{name}", text)
    host.vm.check("systemctl daemon-reload")


def start_unit(host: Operated, name: str) -> int:
    """Its main pid."""
    host.vm.check(f"systemctl start {name}")
    return int(host.vm.check(f"systemctl show -P MainPID {name}"))


def start_holder(host: Operated, name: str, node: str) -> int:
    """A unit that has a device node open, if there is one; its pid once it has."""
    add_unit(host, name, f"[ ! -e {node} ] || exec 3<>{node}; exec sleep infinity")
    pid = start_unit(host, name)
    host.wait(
        lambda: host.vm.run(f"readlink /proc/{pid}/fd/3").out.strip() == node, f"{name} to have {node} open"
    )
    return pid


def invocation(host: Operated, unit: str) -> str:
    return host.vm.check(f"systemctl show -P InvocationID {unit}").strip()


def test_B4_B5_four_of_eight_cards_move_whole_when_the_spec_says_so(host):
    host.forget_writes()
    host.edit(GPUS[4:])
    host.wait_bound(GPUS[4:])
    moved = [f for gpu, audio in zip(GPUS[4:], AUDIO[4:], strict=True) for f in (gpu, audio)]
    # Of each function: first the override, so that nothing can take it in between; and nothing is written twice.
    assert host.writes() == [(file, f) for f in moved for file in ("override", "unbind", "probe")]


def test_the_other_four_follow_and_a_virtual_machine_could_have_all(host):
    host.edit(GPUS)
    host.wait_bound(GPUS)
    for number in (1, 8):
        holder = host.vm.hold_vfio(GPUS[number - 1])
        host.vm.release(holder)


def test_B14_without_a_card_on_nvidia_nvml_is_not_opened_and_no_module_is_loaded(host):
    host.vm.check("modprobe -r nvidia_uvm nvidia")
    host.forget_nvml_calls()
    host.restart()
    host.wait_bound(GPUS)
    host.wait_passes(2)
    host.vm.check("agent status -o json")
    assert host.nvml_calls() == []
    assert not host.vm.names("/sys/module/nvidia")
    assert not host.vm.names("/dev/nvidiactl")


def test_D6_a_card_comes_back_alone_with_its_module_and_has_the_first_minor_number(host):
    host.edit(GPUS[:7])
    host.wait_bound(GPUS[:7])
    assert host.nvml_calls(), "the trace of NVML's calls tells nothing, so it proved nothing above"
    assert host.minors() == {GPUS[7]: 0}


def test_all_eight_come_back_with_their_audio_functions_and_without_an_override(host):
    host.edit(())
    host.wait_bound(())
    assert host.minors() == {GPUS[7]: 0} | {gpu: n for n, gpu in enumerate(GPUS[:7], 1)}


def test_B3_D6_a_foreign_holder_is_named_and_its_card_left_alone_until_it_lets_go(host):
    held, other = GPUS[2], GPUS[3]  # /dev/nvidia3 is the third card: its index is 2
    pid = start_holder(host, "exporter.service", "/dev/nvidia3")
    host.forget_writes()
    host.edit([held, other])
    found = host.wait_condition("DriversBound", "False", "Held", text=held)
    assert f"{held}: pid {pid} (sleep), unit exporter.service holds /dev/nvidia3" in found["message"]
    host.wait(lambda: host.vm.driver(other) == "vfio-pci", "the card that nobody holds to move")
    host.wait_passes(2)
    assert {write.device for write in host.writes()} == {other, audio_of(other)}
    assert host.vm.links([held, audio_of(held)]) == {held: "nvidia", audio_of(held): "snd_hda_intel"}
    host.vm.check("systemctl stop exporter.service")
    host.wait_bound([held, other])


def test_B7_a_card_that_a_virtual_machine_has_open_is_not_written_to_also_by_a_restarted_agent(host):
    held, other = GPUS[3], GPUS[2]
    pid = host.vm.hold_vfio(held)
    intents = host.intents()
    host.forget_writes()
    host.edit([other])
    found = host.wait_condition("DriversBound", "False", "Held", text=f"{held}: pid {pid} ")
    assert "/dev/vfio/" in found["message"]
    host.restart()
    host.wait_passes(2)
    assert host.condition("DriversBound")["reason"] == "Held"
    assert host.writes() == []
    assert [i for i in host.intents()[len(intents) :] if "write-rules" not in i] == []
    host.vm.release(pid)
    host.wait_bound([other])


def test_B3_a_holder_that_the_spec_lets_the_agent_stop_is_stopped_and_exactly_that_started_again(host):
    gpu = GPUS[4]
    start_holder(host, "exporter.service", f"/dev/nvidia{host.minors()[gpu]}")
    add_unit(host, "bystander.service")
    start_unit(host, "bystander.service")
    add_unit(host, "idle.service")
    units = ["exporter.service", "bystander.service", "idle.service"]
    before = {unit: invocation(host, unit) for unit in units}
    done = len(host.intents())
    host.edit([gpu], quiesce=units)
    host.wait_bound([gpu])
    after = {unit: invocation(host, unit) for unit in units}
    assert after["exporter.service"] not in {"", before["exporter.service"]}
    assert after["bystander.service"] == before["bystander.service"]
    assert after["idle.service"] == before["idle.service"] == ""
    states = host.vm.run(f"systemctl is-active {' '.join(units)}").out.split()
    assert states == ["active", "active", "inactive"]
    intents = [i.removeprefix("driver-binding/") for i in host.intents()[done:]]
    order = ["quiesce/exporter.service", f"bind/{gpu}", "restore-unit/exporter.service"]
    assert [i for i in intents if i in order] == order
    host.vm.check("systemctl stop exporter.service bystander.service")


def test_B2_persistence_mode_goes_off_before_its_card_moves(host):
    gpu = GPUS[5]
    host.vm.write(f"/proc/driver/nvidia/gpus/{gpu}/persistence", "1")
    host.forget_nvml_calls()
    done = len(host.intents())
    host.edit([GPUS[4], gpu])
    host.wait_bound([GPUS[4], gpu])
    intents = [i.removeprefix("driver-binding/") for i in host.intents()[done:]]
    order = [f"persistence-off/{gpu}", f"bind/{gpu}"]
    assert [i for i in intents if i in order] == order
    assert [c for c in host.nvml_calls() if "SetPersistence" in c] == [
        f"nvmlDeviceSetPersistenceMode {gpu} 0"
    ]


def test_B6_a_bind_that_did_nothing_is_seen_and_the_card_goes_back_whole_to_the_driver_it_had(host):
    gpu = GPUS[5]
    put(host, [GPUS[4], gpu])
    host.vm.module_parameter("fail_probe", "5")
    host.edit([GPUS[4]])
    host.wait_condition(
        "DriversBound", "False", "Backoff", text=f"{gpu} was probed for nvidia, and its driver is none"
    )
    for address in (gpu, audio_of(gpu)):
        assert (host.vm.driver(address), host.vm.override(address)) == ("vfio-pci", "vfio-pci")
    host.vm.module_parameter("fail_probe", "0")
    host.wait_bound([GPUS[4]])


def test_B8_a_bind_that_did_nothing_leaves_no_override_on_a_card_without_a_driver(host):
    gpu = GPUS[0]
    put(host, [GPUS[4]])
    host.vm.module_parameter("fail_probe", "5")
    host.vm.write(f"{PCI}/{gpu}/driver/unbind", gpu)
    host.wait_condition("DriversBound", "False", "Backoff", text=f"{gpu} was probed for nvidia")
    assert (host.vm.driver(gpu), host.vm.override(gpu)) == (None, "")
    host.vm.module_parameter("fail_probe", "0")
    host.wait_bound([GPUS[4]])


def test_B8_an_override_that_somebody_left_behind_is_cleared_and_the_card_left_where_it_is(host):
    gpu = GPUS[1]
    put(host, [GPUS[4]])
    host.forget_writes()
    host.vm.write(f"{PCI}/{gpu}/driver_override", "vfio-pci")
    host.wait(lambda: host.vm.override(gpu) == "", "the override to be gone")
    host.wait_bound([GPUS[4]])
    assert host.writes() == [("override", gpu)] * 2, "the test's own and the agent's"


def test_a_card_that_is_removed_and_found_again_is_noticed_and_bound_as_before(host):
    gpu, audio = GPUS[4], AUDIO[4]
    put(host, [gpu])
    generation = host.status()["spec"]["generation"]
    host.edit([gpu], resync="1h")  # so that only the kernel's own events can have told
    host.wait(lambda: host.status()["spec"]["generation"] > generation, "the new spec", by_itself=True)
    seen = len(host.passes())
    for address in (gpu, audio):
        host.vm.write(f"{PCI}/{address}/remove", "1")
    host.wait_condition("DriversBound", "False", "DeviceMissing", text=gpu, by_itself=True)
    host.vm.write("/sys/bus/pci/rescan", "1")
    host.wait_bound([gpu], by_itself=True)
    # A resync there is all the same, now and then: the watchdog wants to be fed.
    told = [trigger for trigger in triggers(host, seen) if trigger not in {"resync", "file changed"}]
    assert told[0] == "uevent"


def test_a_card_that_is_pulled_and_pushed_in_again_is_noticed_and_bound_as_before(host):
    gpu = GPUS[4]
    put(host, [gpu])
    host.vm.unplug(4)
    host.wait_condition("DriversBound", "False", "DeviceMissing", text=gpu)
    host.vm.plug(4)
    host.wait_bound([gpu])


def test_B9_ids_that_would_take_every_identical_card_are_named_with_what_to_do(host):
    put(host, [GPUS[4]])
    host.vm.put("/etc/modprobe.d/passthrough.conf", "options vfio-pci ids=10de:2bb5,10de:22e8\n")
    found = host.wait_condition("PlatformReady", "False", "IdenticalCards")
    assert "options vfio-pci ids=10de:2bb5,10de:22e8" in found["message"] + found["next_step"]
    host.vm.check("rm /etc/modprobe.d/passthrough.conf")
    host.wait_bound([GPUS[4]])


def test_D9_the_module_that_cuda_needs_is_loaded_and_tried_again_where_modprobe_fails(host):
    service = {"runtime": "sglang", "unit": "model.service", "gpus": "nvidia", "p2p": "off"}
    host.vm.check("modprobe -r nvidia_uvm")
    host.vm.put("/etc/modprobe.d/broken.conf", "install nvidia_uvm /bin/false\n")
    done = len(host.intents())

    def tries() -> int:
        tried: list[str] = host.intents()[done:]
        return tried.count("modules/load/nvidia_uvm")

    host.edit([GPUS[4]], rest={"services": {"model": {**service, "args": {"model-path": "/models/none"}}}})
    host.wait(lambda: tries() >= 2, "two attempts to load nvidia_uvm")
    assert host.condition("ModulesLoaded")["reason"] == "ModuleMissing"
    assert not host.vm.names("/sys/module/nvidia_uvm")
    host.vm.check("rm /etc/modprobe.d/broken.conf")
    host.wait(lambda: not host.condition("ModulesLoaded"), "the agent to say no more of nvidia_uvm")
    assert host.vm.names("/dev/nvidia-uvm") and host.vm.names("/sys/module/nvidia_uvm")
    loaded = tries()
    host.wait_passes(2)
    assert tries() == loaded
