"""A hand-made observation with every sort of fact in it."""

from typing import Any

from agent.core.fact import Absent, Known, Unknown
from agent.core.gpu_facts import P2PCapability, RemappedRows
from agent.core.observation import (
    Gpu,
    Holder,
    IommuGroup,
    KernelEvent,
    Module,
    Nvml,
    Observation,
    Pci,
    PciFunction,
    Platform,
    Process,
    ServiceFacts,
    TargetFacts,
    Unit,
)

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"
UNREADABLE = Unknown("[Errno 5] Input/output error", "EIO")


def gpu_function(address: str, **changes: Any) -> PciFunction:
    facts: dict[str, Any] = {
        "driver": Known("nvidia"), "iommu_group": Known(44), "numa_node": Known(0), "power_state": Known("D0"),
        "slot": Known("1"), "bridges": ("0000:00:01.1",), "link_speed": Known("32.0 GT/s PCIe"), "link_width": Known(8),
        "max_link_speed": Known("32.0 GT/s PCIe"), "max_link_width": Known(16),
        "reset_methods": Known(("flr", "bus")), "power_control": Known("auto"), "virtual_functions": Known(0),
    }  # fmt: skip
    return PciFunction(address, 0x10DE, 0x2BB5, 0x030200, **{**facts, **changes})


def pci() -> Pci:
    functions = [
        gpu_function("0000:01:00.0"),
        PciFunction(
            "0000:01:00.1", 0x10DE, 0x22E8, 0x040300, driver=Known("snd_hda_intel"), iommu_group=Known(44)
        ),
        gpu_function("0000:81:00.0", driver=UNREADABLE, iommu_group=Absent(), boot_vga=Known(value=True)),
        PciFunction("0000:00:01.1", 0x1022, 0x14AB, 0x060400, acs_ctl=Known(0x1D)),
        PciFunction("0000:80:01.1", 0x1022, 0x14AB, 0x060400),
        PciFunction("0000:c1:00.0", 0x144D, 0xA80A, 0x010802, driver=Known("nvme")),
    ]
    group = IommuGroup(44, Known("DMA-FQ"), ("0000:01:00.0", "0000:01:00.1"))
    return Pci({f.address: f for f in functions}, {44: group}, pending_unbinds=("0000:81:00.0",))


def full() -> Observation:
    gpu = Gpu(
        "0000:01:00.0", 0, Known(3), Known("GPU-5a1c0a52-6f5b-4a3b-9d4e-0c1f2a3b4c5d"), Known("NVIDIA RTX PRO 6000"),
        persistence_mode=Known(value=True), power_limit=Known(600), memory_total=Known(97887), memory_used=Known(12),
        utilization=Known(0), pids=Known((4711,)), recovery_action=Known("none"), link_gen=Known(1), max_link_gen=Known(5),
        link_width=Known(16), max_link_width=Known(16), replays=Known(0), vbios=Known("98.02.55.00.01"),
        serial=Absent("not supported by this GPU"), bar1_total=Known(131072), power_limit_range=Known((300, 600)),
        locked_graphics_clocks=Known((2100, 2430)), locked_memory_clocks=Unknown("NVML does not tell it", "NotTold"),
        graphics_clock=Known(180), memory_clock=Known(405), clock_reasons=Known(("idle", "software power cap")),
        ecc_mode=Known(value=True), ecc_pending=Known(value=False), mig_mode=Known(value=False), mig_pending=Known(value=False),
        compute_mode=Known("default"), graphics_pids=Known(()), remapped_rows=Known(RemappedRows(1, 2, pending=True, failed=False)),
        p2p=Known({
            "0000:81:00.0": P2PCapability(Known("ok"), Known("ok"), Known("not supported")),
            "0000:91:00.0": P2PCapability(UNREADABLE, Known("ok"), Absent("not supported by this GPU")),
            "0000:a1:00.0": P2PCapability(Known("ok"), Known("ok"), Known("not supported")),
        }),
    )  # fmt: skip
    process = Process(
        4711,
        ("/opt/ml-env/bin/python3", "-m", "sglang.launch_server", "--api-key", "opensesame", f"--token={TOKEN}", "--port", "30000"),
        {"NCCL_P2P_DISABLE": "1", "HF_TOKEN": TOKEN, "NCCL_SECRET": "x", "EDITOR": "vi", "SGLANG_X": TOKEN},
    )  # fmt: skip
    return Observation(
        platform=Platform(
            boot_id=Known("5b1c7c2e"), kernel_release=Known("6.17.2-1-pve"), cmdline=Known(("ro", "amd_iommu=on")),
            modules=Known({"nvidia": Module("nvidia", {"NVreg_X": "1"}, 10, ("nvidia_uvm",)), "ext4": Module("ext4")}),
            module_options=Known(()), sev_snp=Known(value=True), nvidia_driver=Known("590.48.01"),
            systemd=Absent("PID 1 is not systemd"),
        ),
        pci=Known(pci()),
        nvml=Known(
            Nvml(
                Known("590.48.01"),
                gpus={"0000:01:00.0": Known(gpu), "0000:11:00.0": Unknown("GPU is lost", "GpuLost")},
                confidential_compute=Known("off"),
            )
        ),
        holders={
            "0000:01:00.0": Known((Holder("process", "/dev/nvidia0", 4711, "python3\x1b[2J", "sglang-qwen.service", "129"),)),
            "0000:01:00.1": Known(()),
            "0000:81:00.0": Unknown("it did not answer within 10 s", "Timeout"),
        },
        quiesced={"nvidia-persistenced.service": Known(Unit("nvidia-persistenced.service", "not-found", "inactive"))},
        targets={
            "lxc:129": TargetFacts(
                Known(value=True), Known("565.57.01"), Unknown("driver/library version mismatch", "VersionMismatch"),
                Known(67108864), Known(("/dev/nvidia0", "/dev/nvidiactl")), Absent("not installed"),
            )
        },
        services={
            "qwen": ServiceFacts(
                Known(Unit("sglang-qwen.service", "loaded", "failed", "failed", 0, "signal", 9, 2, ())),
                Known({"/etc/systemd/system/sglang-qwen.service.d/50-gpu-host-agent.conf": f"[Service]\nEnvironment=HF_TOKEN={TOKEN}\n"}),
                Known(process), Known(value=True), Absent("connection refused"),
            ),
            "other": ServiceFacts(),
        },
        host_files={"/etc/modprobe.d/gpu-host-agent.conf": Absent(), "/etc/udev/rules.d/50-gpu-host-agent.rules": Known("x\n")},
        unbinds={"0000:81:00.0": Known("running: state D in nv_pci_remove")},
        kernel_events=Known(
            (
                KernelEvent(
                    "page-fault", "0000:01:00.0", 48, 1_770_000_000.0, 1_770_000_060.0,
                    "nvidia 0000:01:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x002c address=0x24000000000 flags=0x0030]",
                    0x30, "0000:11:00.0",
                ),
                KernelEvent("xid", "0000:81:00.0", 1, 1_770_000_000.0, 1_770_000_000.0, "NVRM: Xid (PCI:0000:81:00): 79, \x1b]0;gone", 79),
                KernelEvent("snp-refused", "", 1, 1_770_000_000.0, 1_770_000_000.0, "AMD-Vi: SNP: IOMMU disabled"),
            )
        ),
    )  # fmt: skip
