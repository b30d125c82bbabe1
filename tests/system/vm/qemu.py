"""Which QEMU, and with which devices: eight two-function cards behind root ports with slots, an IOMMU, no network."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from tests.system.vm.image import Image
from tests.system.vm.newer_qemu import SUITE, newer_qemu

Iommu = Literal["amd", "intel"] | None
_DEBIAN = "qemu-system-x86_64"
# Time is emulated, too: no calibration, no mitigations that nothing here needs.
_KERNEL_ARGUMENTS = (
    "console=ttyS0,115200 panic=-1 mitigations=off random.trust_cpu=on nokaslr no_timer_check tsc=reliable "
    "init_on_alloc=0 transparent_hugepage=always quiet loglevel=4 systemd.show_status=0"
)
_FIRST_PORT_SLOT = 0x10  # of the root ports on pcie.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the virtual machine is made of."""

    iommu: Iommu = "amd"
    gpus: int = 8
    faults: bool = False  # AMD's IOMMU must report what it refuses: no Debian 12 QEMU will do
    console_card: bool = False  # card 0 is the boot console; else the board has a display of its own
    memory: str = "1536M"


class HardwareOptions(TypedDict, total=False):
    """``Hardware`` as keyword arguments."""

    iommu: Iommu
    gpus: int
    faults: bool
    console_card: bool
    memory: str


def program(hardware: Hardware) -> tuple[list[str], dict[str, str]]:
    """The beginning of its command line, and what to add to its environment. Raises FileNotFoundError.

    The newer QEMU where it can be had. Under Debian 12's (7.2), with a thread for each processor, the guest's kernel was
    seen to panic in code that it had just patched; so that one gets a single thread, which takes half as long again.
    """
    folder = newer_qemu()
    if folder is None:
        if hardware.faults and hardware.iommu == "amd":
            raise FileNotFoundError(f"no QEMU of {SUITE}: only that reports AMD page faults")
        if shutil.which(_DEBIAN) is None:
            raise FileNotFoundError(f"no {_DEBIAN}: apt-get install qemu-system-x86")
        return [_DEBIAN, *_accelerator("single"), *_iommu(hardware.iommu, "amd-iommu,intremap=on")], {}
    usr = folder / "root/usr"
    libraries = usr / "lib/x86_64-linux-gnu"
    loader = [str(libraries / "ld-linux-x86-64.so.2"), "--library-path", str(libraries)]
    data = [argument for name in ("seabios", "qemu") for argument in ("-L", str(usr / "share" / name))]
    data += ["-L", str(usr / "lib/ipxe/qemu")]
    own = [*_accelerator("multi"), *_iommu(hardware.iommu, "amd-iommu,intremap=on,dma-remap=on")]
    return [*loader, str(usr / "bin" / _DEBIAN), *data, *own], {"QEMU_MODULE_DIR": str(libraries / "qemu")}


def _accelerator(thread: str) -> tuple[str, str]:
    return ("-accel", f"tcg,thread={thread},tb-size=512")


def _iommu(kind: Iommu, amd: str) -> tuple[str, ...]:
    match kind:
        case "amd":
            return ("-device", amd)
        case "intel":
            return ("-device", "intel-iommu,intremap=on,caching-mode=on")
        case None:
            return ()


def arguments(hardware: Hardware, image: Image, root: Path, payload: Path, run: Path) -> list[str]:
    """Everything but the kernel's command line. ``root`` is written to only if it is not the image's own."""
    snapshot = "on" if root == image.root else "off"
    drive = "if=none,format=raw,file="
    return [
        *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
        *("-M", "q35,smbus=off"),
        # Slots as the ports' own hot-plug controllers have them (pciehp), named by their numbers.
        *("-global", "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off"),
        # One processor: of two, one would wait for a lock of the other's while that is not emulated at all.
        *("-cpu", "qemu64", "-smp", "1", "-m", hardware.memory),
        *("-kernel", str(image.kernel), "-initrd", str(image.initramfs)),
        *("-serial", f"file:{run}/serial.log"),
        *("-drive", f"{drive}{root},id=root,snapshot={snapshot}"),
        *("-device", "virtio-blk-pci,drive=root,addr=0x4"),
        *("-drive", f"{drive}{payload},id=payload,readonly=on"),
        *("-device", "virtio-blk-pci,drive=payload,addr=0x5"),
        *("-device", "virtio-serial-pci,addr=0x6", "-device", "virtio-rng-pci,addr=0x7"),
        *("-chardev", f"socket,id=channel,path={run}/channel,server=on,wait=off"),
        *("-device", "virtserialport,chardev=channel,name=gpu-host-agent-tests"),
        *("-qmp", f"unix:{run}/qmp,server=on,wait=off"),
        *(() if hardware.console_card else ("-device", "VGA,addr=0x2")),
        *_cards(hardware),
        *("-device", "edu,id=edu-root,addr=0x9,dma_mask=0xffffffffffffffff"),
    ]


def kernel_command_line(append: str) -> str:
    return f"{_KERNEL_ARGUMENTS} {append}".strip()


def _cards(hardware: Hardware) -> list[str]:
    """Root ports rp0.. with the slots 1..: the cards, an edu device, and an empty one to plug into."""
    argv: list[str] = []
    gpus = hardware.gpus
    for number in range(gpus + 2):
        slot, function = _FIRST_PORT_SLOT + number // 8, number % 8
        first = ",multifunction=on" if function == 0 else ""
        place = f"bus=pcie.0,addr={slot:#x}.{function:#x}{first}"
        argv += ["-device", f"pcie-root-port,id=rp{number},chassis={number + 1},slot={number + 1},{place}"]
        if number < gpus:
            for properties in card_functions(number, console=hardware.console_card and number == 0):
                argv += ["-device", json.dumps(properties)]
    return [*argv, "-device", f"edu,id=edu-port,bus=rp{gpus},addr=0.0,dma_mask=0xffffffffffffffff"]


def card_functions(number: int, *, console: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Display and audio function of card ``number``, as QEMU's device_add wants them, display first.

    An nvme controller without a disk is a PCI Express endpoint with a link and a function-level reset, and can be plugged;
    QEMU's displays cannot. Both functions say multifunction: else a kernel that finds the card again puts its
    functions into two groups.
    """
    common = {"bus": f"rp{number}", "multifunction": True}
    kind = {"driver": "ati-vga"} if console else {"driver": "nvme", "serial": f"card-{number}"}
    return (
        {**kind, "id": f"gpu{number}", "addr": "0.0", **common},
        {"driver": "ich9-intel-hda", "id": f"audio{number}", "addr": "0.1", **common},
    )
