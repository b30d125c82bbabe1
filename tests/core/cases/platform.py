"""Golden cases of the platform: each property wrong in turn, and what the operator is told to do."""

from agent.core.boot import GRUB_DROP_IN, KERNEL_CMDLINE, all_wishes
from agent.core.boot_edit import grub_drop_in
from agent.core.fact import Absent, Known, Unknown
from agent.core.inputs import Inputs
from agent.core.observation import Holder, Initramfs, Module
from agent.core.spec import GpuHost
from agent.kinds.module_options import MODPROBE_CONF
from tests.core import build
from tests.core.build import FIRST, GPUS, SPLIT, Change, spec
from tests.core.verdicts import converged, rules_written

TRANSLATED = {"iommu": "translated", "sevSnp": "enabled"}
SNP_SPLIT = spec(platform={**TRANSLATED, "kernelArgs": {"forbid": ["iommu=pt", "amd_iommu=off"]}}, gpus=SPLIT)
OPTIONS = spec(platform={"modules": {"nvidia_uvm": {"uvm_disable_hmm": 1}}}, gpus=SPLIT)
WRITTEN = {
    MODPROBE_CONF: "# Written by gpu-host-agent from the spec; edits here are drift and will be taken back.\n"
    "options nvidia_uvm uvm_disable_hmm=1\n"
}


def case(host: GpuHost, *changes: Change) -> Inputs:
    """The split host without a service, so that only the platform differs."""
    return build.made(build.type_host(host, *_split()), *changes)


def _split() -> tuple[Change, ...]:
    return (build.on("vfio-pci", *GPUS[4:]), rules_written)


def uvm(value: str) -> Change:
    modules = {"nvidia": Module("nvidia"), "nvidia_uvm": Module("nvidia_uvm", {"uvm_disable_hmm": value})}
    return build.platform(modules=Known(modules))


def boots(loader: str, then: str, configured: str | None = None, **sources: str) -> Change:
    """A boot loader that will hand over ``then``, made of files that would give ``configured``."""
    return build.platform(
        boot_loader=Known(loader),
        next_cmdline=Known(tuple(then.split())),
        configured_cmdline=Known(tuple((then if configured is None else configured).split())),
        boot_sources={SOURCES[name]: tuple(words.split()) for name, words in sources.items()},
    )


SOURCES = {"grub": "/etc/default/grub", "extra": "/etc/default/grub.d/local.cfg", "line": KERNEL_CMDLINE}
PT = build.platform(cmdline=Known(("ro", "iommu=pt")))
FORBIDDEN = spec(platform={"kernelArgs": {"forbid": ["iommu=pt"]}}, gpus=SPLIT)
REQUIRED = spec(platform={"kernelArgs": {"require": ["pcie_aspm=off"]}}, gpus=SPLIT)
EDITING = {"policy": {"bootFiles": "edit"}, "gpus": SPLIT}
EDIT = spec(platform={"kernelArgs": {"require": ["pcie_aspm=off"], "forbid": ["iommu=pt"]}}, **EDITING)
TRANSLATE = spec(platform={"iommu": "translated"}, gpus=SPLIT)


def no_drop_in(inputs: Inputs) -> Inputs:
    return build.with_obs(inputs, host_files={**inputs.obs.host_files, GRUB_DROP_IN: Absent()})


CASES: dict[str, Inputs] = {
    "nothing-to-do": case(SNP_SPLIT),
    "nothing-is-asked": converged(),
    "D1-iommu-passthrough-with-snp-wanted": case(
        SNP_SPLIT,
        build.group_type(Known("identity"), *GPUS),
        build.platform(cmdline=Known(("ro", "iommu=pt")), sev_snp=Known(value=False)),
    ),
    "iommu-off-with-translated-wanted": case(
        SNP_SPLIT,
        *(build.function(a, iommu_group=Absent()) for a in FIRST),
        build.platform(cmdline=Known(("amd_iommu=off",))),
    ),
    "iommu-types-mixed": case(SNP_SPLIT, build.group_type(Known("identity"), FIRST[0])),
    "iommu-translated-with-passthrough-wanted": case(spec(platform={"iommu": "passthrough"}, gpus=SPLIT)),
    "snp-on-with-disabled-wanted": case(spec(platform={"sevSnp": "disabled"}, gpus=SPLIT)),
    "snp-parameter-not-there": case(SNP_SPLIT, build.platform(sev_snp=Absent("kvm_amd is not loaded"))),
    "kernel-argument-required-and-missing": case(
        spec(platform={"kernelArgs": {"require": ["pcie_aspm=off", "pcie_port_pm=off"]}}, gpus=SPLIT),
        build.platform(cmdline=Known(("ro", "pcie_aspm=off"))),
    ),
    "kernel-argument-forbidden-by-pattern": case(
        spec(platform={"kernelArgs": {"forbid": ["vfio-pci.ids=*"]}}, gpus={"inference": SPLIT["inference"]}),
        build.platform(cmdline=Known(("ro", "vfio-pci.ids=1002:1478"))),
    ),
    "B9-ids-on-the-command-line-take-identical-cards": case(
        spec(gpus=SPLIT), build.platform(cmdline=Known(("ro", "vfio-pci.ids=10de:2bb5,10de:22e8")))
    ),
    "B9-ids-in-modprobe-spelled-with-an-underscore": case(
        spec(gpus=SPLIT),
        build.platform(module_options=Known(("options vfio_pci disable_vga=1 ids=10DE:2BB5",))),
    ),
    "nvidia-driver-of-another-version": case(
        spec(platform={"nvidiaDriver": "590.48.01"}, gpus=SPLIT),
        build.platform(nvidia_driver=Known("580.95.05")),
    ),
    "nvidia-driver-not-loaded": case(
        spec(platform={"nvidiaDriver": "590.48.01"}, gpus=SPLIT),
        build.platform(nvidia_driver=Absent("not loaded")),
    ),
    "module-options-not-written-and-not-in-force": case(OPTIONS, uvm("N")),
    "module-options-written-and-waiting-for-a-reload": case(OPTIONS, build.files(WRITTEN), uvm("N")),
    "module-options-in-force": case(OPTIONS, build.files(WRITTEN), uvm("Y")),
    "module-options-no-longer-wanted": case(spec(gpus=SPLIT), build.files(WRITTEN)),
    "module-options-that-would-be-two-lines": case(
        spec(platform={"modules": {"nvidia": {"NVreg_X": "1\ninstall nvidia /bin/true"}}}, gpus=SPLIT)
    ),
    "everything-unknown": case(
        SNP_SPLIT,
        build.platform(cmdline=Unknown("it did not answer"), sev_snp=Unknown("it did not answer")),
        build.group_type(Unknown("it did not answer"), *GPUS),
    ),
    "kernel-argument-waits-for-a-reboot": case(FORBIDDEN, PT, boots("grub", "ro", grub="ro")),
    "kernel-argument-in-a-drop-in-of-grub": case(
        FORBIDDEN, PT, boots("grub", "ro iommu=pt", grub="ro", extra="iommu=pt")
    ),
    "kernel-argument-edited-and-grub-not-refreshed": case(
        REQUIRED, boots("grub", "ro", "ro pcie_aspm=off", grub="ro pcie_aspm=off")
    ),
    "kernel-argument-not-kept-by-the-next-boot": case(
        REQUIRED,
        build.platform(cmdline=Known(("ro", "pcie_aspm=off"))),
        boots("proxmox-systemd-boot", "ro", line="ro"),
    ),
    "kernel-argument-with-esps-that-are-not-mounted": case(
        REQUIRED,
        boots("proxmox-systemd-boot", "", "ro pcie_aspm=off", line="ro pcie_aspm=off"),
        build.platform(next_cmdline=Unknown("the ESPs are not mounted", "NotMounted")),
    ),
    "D1-the-next-boot-would-lose-snp": case(
        SNP_SPLIT, boots("systemd-boot", "ro iommu=pt,nomerge", line="ro iommu=pt,nomerge")
    ),
    "D1-passthrough-goes-with-the-next-boot": case(
        spec(platform=TRANSLATED, gpus=SPLIT),
        build.group_type(Known("identity"), *GPUS),
        PT,
        build.platform(sev_snp=Known(value=False)),
        boots("grub", "ro", grub="ro"),
    ),
    "boot-files-that-may-be-edited": case(
        EDIT, PT, no_drop_in, boots("grub", "ro iommu=pt", grub="ro iommu=pt")
    ),
    "boot-files-edited-already-wait-for-a-reboot": case(
        EDIT,
        PT,
        build.files({GRUB_DROP_IN: grub_drop_in(all_wishes(EDIT.spec.platform))}),
        boots("grub", "ro pcie_aspm=off", grub="ro iommu=pt"),
    ),
    "boot-files-edited-and-never-refreshed": case(
        EDIT,
        PT,
        build.files({GRUB_DROP_IN: grub_drop_in(all_wishes(EDIT.spec.platform))}),
        boots("grub", "ro iommu=pt", "ro pcie_aspm=off", grub="ro iommu=pt"),
    ),
    "boot-files-no-longer-wanted": case(
        spec(**EDITING),
        build.files({GRUB_DROP_IN: grub_drop_in(all_wishes(EDIT.spec.platform))}),
        boots("grub", "ro pcie_aspm=off", grub="ro"),
    ),
    "boot-files-of-proxmox-edited-word-by-word": case(
        EDIT,
        PT,
        build.files({KERNEL_CMDLINE: 'root=ZFS=rpool/ROOT/pve-1 iommu=pt dyndbg="file a.c +p"\n'}),
        boots("proxmox-systemd-boot", "ro iommu=pt", line="ro iommu=pt"),
    ),
    "boot-files-and-an-argument-that-is-no-word": case(
        spec(platform={"kernelArgs": {"require": ["x=$(reboot)"]}}, **EDITING),
        no_drop_in,
        boots("grub", "ro", grub="ro"),
    ),
    "boot-files-and-a-pattern-that-takes-the-root": case(
        spec(platform={"kernelArgs": {"forbid": ["r*"]}}, **EDITING),
        no_drop_in,
        boots("grub", "root=/dev/sda1 ro", grub=""),
    ),
    "boot-files-of-proxmox-with-two-lines": case(
        EDIT,
        PT,
        build.files({KERNEL_CMDLINE: "root=ZFS=rpool/ROOT/pve-1 iommu=pt\nroot=/dev/sdb1\n"}),
        boots("proxmox-systemd-boot", "ro iommu=pt", line="ro iommu=pt"),
    ),
    "boot-files-edited-and-the-refresh-was-cut-short": case(
        EDIT,
        build.files({GRUB_DROP_IN: grub_drop_in(all_wishes(EDIT.spec.platform))}),
        boots("proxmox-grub", "", "ro pcie_aspm=off", grub="ro"),
        build.platform(next_cmdline=Unknown("the ESPs are not mounted", "NotMounted")),
        build.with_memory(unrefreshed=GRUB_DROP_IN),
    ),
    "boot-files-edited-and-what-became-of-them-cannot-be-read": case(
        EDIT,
        build.files({GRUB_DROP_IN: grub_drop_in(all_wishes(EDIT.spec.platform))}),
        boots("proxmox-grub", "", "ro pcie_aspm=off", grub="ro"),
        build.platform(next_cmdline=Unknown("the ESPs are not mounted", "NotMounted")),
    ),
    "boot-files-right-already-get-no-file-of-the-agent": case(
        EDIT,
        build.platform(cmdline=Known(("ro", "pcie_aspm=off"))),
        no_drop_in,
        boots("grub", "ro pcie_aspm=off"),
    ),
    "iommu-type-lost-and-mended-on-vfio": case(
        TRANSLATE, build.group_type(Known("identity"), GPUS[5]), boots("grub", "ro", grub="ro")
    ),
    "iommu-type-under-an-open-vfio-device": case(
        TRANSLATE,
        build.group_type(Known("identity"), GPUS[5]),
        build.held(GPUS[5], Holder("process", "/dev/vfio/49", 77, "qemu")),
    ),
    "iommu-type-to-passthrough-where-snp-is-on": case(spec(platform={"iommu": "passthrough"}, gpus=SPLIT)),
    "iommu-type-to-passthrough-on-a-host-without-snp": case(
        spec(platform={"iommu": "passthrough"}, gpus={"confidential": SPLIT["confidential"]}),
        build.platform(sev_snp=Absent("kvm_amd is not loaded"), cmdline=Known(("ro", "iommu=pt"))),
    ),
    "module-option-given-twice": case(
        OPTIONS,
        build.files(WRITTEN),
        uvm("Y"),
        build.platform(
            module_option_files=Known(
                (("/etc/modprobe.d/nvidia.conf", "options nvidia-uvm uvm_disable_hmm=0"),)
            )
        ),
    ),
    "module-option-of-a-module-in-the-initramfs": case(
        OPTIONS,
        build.files(WRITTEN),
        uvm("N"),
        build.platform(
            initramfs=Known(
                Initramfs("/boot/initrd.img-6.14", "update-initramfs -u", ("nvidia", "nvidia_uvm"))
            )
        ),
    ),
}
