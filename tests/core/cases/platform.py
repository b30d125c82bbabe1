"""Golden cases of the platform: each property wrong in turn, and what the operator is told to do."""

from agent.core.fact import Absent, Known, Unknown
from agent.core.inputs import Inputs
from agent.core.observation import Module
from agent.core.spec import GpuHost
from agent.kinds.platform import MODPROBE_CONF
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
}
