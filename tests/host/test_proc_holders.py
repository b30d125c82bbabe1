import asyncio
import os
from pathlib import Path

import pytest

from agent.core.fact import Fact, Known, Unknown
from agent.core.observation import Holder
from agent.host.holder_owner import Owner, is_virtual_machine, owner_of
from agent.host.proc_holders import ProcHolders
from tests.host.trees import Tree

A, B, C, AUDIO = "0000:01:00.0", "0000:11:00.0", "0000:81:00.0", "0000:81:00.1"


@pytest.fixture
def host(tree: Tree) -> Tree:
    """A and B on nvidia, with minors that are not their order; C and its audio function on vfio-pci, group 12."""
    for address, driver in ((A, "nvidia"), (B, "nvidia"), (C, "vfio-pci"), (AUDIO, "vfio-pci")):
        tree.function(address, 0x030200 if address.endswith(".0") else 0x040300)
        tree.bind(address, driver)
    tree.group(12, "DMA", C, AUDIO)
    for address, minor in ((A, 3), (B, 0)):
        tree.file(
            f"proc/driver/nvidia/gpus/{address}/information", f"Model: \t\t RTX\nDevice Minor: \t {minor}\n"
        )
    tree.file("proc/devices", "Character devices:\n  1 mem\n195 nvidia\n\nBlock devices:\n  7 loop\n")
    return tree


async def read(tree: Tree, *addresses: str) -> dict[str, Fact[tuple[Holder, ...]]]:
    return dict(await ProcHolders(tree.root).read(addresses or (A, B, C, AUDIO)))


async def test_nobody_holds_anything_on_an_idle_host(host: Tree):
    host.process(10, "bash", "/dev/null", "socket:[1]")
    assert await read(host) == {A: Known(()), B: Known(()), C: Known(()), AUDIO: Known(())}


async def test_D6_a_device_node_is_mapped_by_its_minor_never_by_position(host: Tree):
    host.process(10, "python3", "/dev/nvidia3", cgroup="/system.slice/sglang-qwen.service")
    held = await read(host)
    assert held[A] == Known((Holder("process", "/dev/nvidia3", 10, "python3", "sglang-qwen.service"),))
    assert held[B] == Known(())


async def test_B3_a_holder_is_named_with_pid_unit_and_container(host: Tree):
    host.process(77, "dcgm-exporter", "/dev/nvidia0", cgroup="/lxc/129/ns/system.slice/dcgm-exporter.service")
    (holder,) = known(await read(host), B)
    assert holder.describe() == (
        "pid 77 (dcgm-exporter), unit dcgm-exporter.service, container lxc:129 holds /dev/nvidia0"
    )


@pytest.mark.parametrize(
    "node", ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia9"]
)
async def test_a_node_of_no_single_gpu_counts_for_every_gpu_on_nvidia(host: Tree, node: str):
    host.process(10, "nvidia-persiste", node)
    held = await read(host)
    assert [len(known(held, a)) for a in (A, B, C)] == [1, 1, 0]


async def test_B7_a_virtual_machine_holds_its_whole_group(host: Tree):
    host.process(
        500,
        "kvm",
        "/dev/vfio/vfio",
        "/dev/vfio/12",
        "anon_inode:[vfio-device]",
        cgroup="/qemu.slice/101.scope",
    )
    held = await read(host)
    for address in (C, AUDIO):
        assert [(h.kind, h.container) for h in known(held, address)] == [("vm", "VM 101")] * 2
    assert known(held, A) == ()


async def test_a_pending_unbind_still_shows_its_holder_although_the_driver_is_gone(host: Tree):
    (host.root / f"sys/bus/pci/devices/{C}/driver").unlink()
    host.process(500, "qemu-system-x86", "/dev/vfio/12 (deleted)")
    assert [h.what for h in known(await read(host), C)] == ["/dev/vfio/12"]


async def test_a_vfio_device_file_without_its_group_may_be_any_function_on_vfio(host: Tree):
    host.process(500, "python3", "anon_inode:[vfio-device]")
    held = await read(host)
    assert [len(known(held, a)) for a in (A, C, AUDIO)] == [0, 1, 1]


async def test_a_newer_kernel_names_the_device_of_a_vfio_device_file(host: Tree):
    host.process(500, "python3", "anon_inode:[vfio-device]")
    host.file(
        "proc/500/fdinfo/3", f"pos:\t0\nvfio-device-syspath: /sys/devices/pci0000:80/0000:80:01.1/{C}\n"
    )
    held = await read(host)
    assert [len(known(held, a)) for a in (C, AUDIO)] == [1, 0]


async def test_render_nodes_sound_cards_and_vfio_cdevs_are_mapped_through_sysfs(host: Tree):
    host.link("sys/class/drm/renderD128/device", f"sys/bus/pci/devices/{A}")
    host.link("sys/class/sound/card1/device", f"sys/bus/pci/devices/{B}")
    host.link("sys/class/vfio-dev/vfio0/device", f"sys/bus/pci/devices/{C}")
    host.process(10, "Xorg", "/dev/dri/renderD128", "/dev/snd/pcmC1D0p", "/dev/vfio/devices/vfio0")
    held = await read(host)
    assert [known(held, a)[0].what for a in (A, B, C)] == [
        "/dev/dri/renderD128",
        "/dev/snd/pcmC1D0p",
        "/dev/vfio/devices/vfio0",
    ]


async def test_the_console_holds_the_boot_display_unless_it_is_on_vfio(host: Tree):
    for address in (A, C):
        host.file(f"sys/bus/pci/devices/{address}/boot_vga", "1\n")
    held = await read(host)
    assert [h.kind for h in known(held, A)] == ["console"]
    assert known(held, C) == ()


async def test_a_module_in_use_on_top_of_nvidia_holds_every_gpu_on_nvidia(host: Tree):
    host.file("sys/module/nvidia_drm/refcnt", "2\n")
    host.file("sys/module/nvidia_uvm/refcnt", "4\n")
    held = await read(host)
    assert [h.what for h in known(held, A)] == ["nvidia_drm (use count 2)"]
    assert known(held, C) == ()


async def test_in_another_pid_namespace_none_seen_is_unknown_and_one_seen_is_known(host: Tree):
    host.link("proc/self/ns/pid", "pid:[4026532999]")
    host.process(10, "python3", "/dev/nvidia3")
    held = await read(host, A, B)
    assert isinstance(held[A], Known)
    unseen = held[B]
    assert isinstance(unseen, Unknown)
    assert unseen.code == "HoldersUnknown"


async def test_our_own_nvml_child_is_waited_for_and_not_taken_for_a_holder(host: Tree):
    host.process(10, "python3", "/dev/nvidia3")
    child_runs = asyncio.Lock()
    async with child_runs:
        scan = asyncio.create_task(ProcHolders(host.root, child_runs).read([A]))
        await asyncio.sleep(0.05)
        (host.root / "proc/10/fd/3").unlink()
    assert await scan == {A: Known(())}


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("sys/module/nvidia_drm/refcnt", "what the kernel holds"),
        (f"sys/bus/pci/devices/{A}/boot_vga", "what the kernel holds"),
        ("sys/class/graphics/fb0/device", "what the kernel holds"),
        ("sys/class/drm/renderD128/device", "holders cannot be looked for"),
        ("sys/kernel/iommu_groups", "holders cannot be looked for"),
        ("proc/self/ns/pid", "pid namespace"),
    ],
)
async def test_B3_what_the_kernel_shows_of_holders_and_cannot_be_read_leaves_them_unknown(
    host: Tree, file: str, told: str
):
    unreadable(host, file)
    fact = (await read(host, A))[A]
    assert isinstance(fact, Unknown)
    assert (fact.code, told in fact.reason) == ("HoldersUnknown", True), fact


def unreadable(host: Tree, file: str) -> None:
    """No reading of it succeeds, not even root's, and none says that there is no such file."""
    at = host.root / file
    at.parent.mkdir(parents=True, exist_ok=True)
    if at.is_dir():
        at.rename(at.with_name("moved"))
    at.symlink_to(at.name) if file.endswith("groups") else at.mkdir()


async def test_B3_a_device_whose_driver_link_cannot_be_read_may_be_on_nvidia(host: Tree):
    link = host.root / f"sys/bus/pci/devices/{A}/driver"
    link.unlink()
    link.mkdir()
    host.process(10, "nvidia-persiste", "/dev/nvidiactl")
    assert [h.what for h in known(await read(host), A)] == ["/dev/nvidiactl"]


async def test_a_gpu_whose_minor_the_driver_does_not_tell_may_be_any_node_that_is_nobodys(
    host: Tree, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agent.host.attribute_read.STALL", 0.1)
    information = host.root / f"proc/driver/nvidia/gpus/{A}/information"
    information.unlink()
    os.mkfifo(information)
    host.process(10, "python3", "/dev/nvidia3", "/dev/nvidia0")
    held = await read(host, A, B)
    assert [h.what for h in known(held, A)] == ["/dev/nvidia3"]
    assert [h.what for h in known(held, B)] == ["/dev/nvidia0", "/dev/nvidia3"]
    let_go(information)


def let_go(fifo: Path) -> None:
    """Whoever waits at it goes on."""
    os.close(os.open(fifo, os.O_RDWR))


async def test_a_process_that_ends_during_the_scan_is_passed_over(host: Tree):
    host.directory("proc/11")
    assert await read(host, A) == {A: Known(())}


async def test_the_real_proc_is_scanned_without_a_crash():
    assert set(await ProcHolders().read(["0000:ff:1f.7"])) == {"0000:ff:1f.7"}


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        ("/system.slice/nvidia-persistenced.service", Owner("nvidia-persistenced.service")),
        ("/lxc/129/ns/system.slice/sglang-qwen.service", Owner("sglang-qwen.service", "lxc:129")),
        ("/lxc.payload.web/init.scope", Owner("init.scope", "lxc:web")),
        ("/qemu.slice/101.scope", Owner("101.scope", "VM 101")),
        ("/system.slice/docker-0123456789abcdef0123.scope", Owner("docker-0123456789abcdef0123.scope", "docker 0123456789ab")),
        ("/docker/0123456789abcdef0123", Owner("", "docker 0123456789ab")),
        ("/machine.slice/libpod-fedcba987654ff.scope/container", Owner("libpod-fedcba987654ff.scope", "podman fedcba987654")),
        ("/machine.slice/machine-ct1.scope", Owner("machine-ct1.scope", "machine ct1")),
        (
            "/machine.slice/machine-qemu\\x2d3\\x2dsnp\\x2dguest.scope/libvirt/emulator",
            Owner("machine-qemu\\x2d3\\x2dsnp\\x2dguest.scope", "VM snp-guest"),
        ),
        ("/user.slice/user-0.slice/session-3.scope", Owner("session-3.scope")),
        ("/", Owner()),
    ],
)  # fmt: skip
def test_a_cgroup_tells_unit_and_container(path: str, owner: Owner):
    assert owner_of(f"0::{path}\n") == owner


def test_with_cgroups_of_version_1_systemds_own_hierarchy_is_read():
    text = "12:devices:/lxc/7\n1:name=systemd:/lxc/7/system.slice/a.service\n0::/\n"
    assert owner_of(text) == Owner("a.service", "lxc:7")


def test_a_virtual_machine_is_known_by_its_command():
    assert is_virtual_machine("kvm")
    assert is_virtual_machine("qemu-system-x86")
    assert not is_virtual_machine("python3")


def known(held: dict[str, Fact[tuple[Holder, ...]]], address: str) -> tuple[Holder, ...]:
    fact = held[address]
    assert isinstance(fact, Known)
    return fact.value
