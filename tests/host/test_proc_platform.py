from agent.core.boot import split_cmdline
from agent.core.fact import Absent, Known, Unknown
from agent.host.modprobe_options import read_module_options
from agent.host.nvidia_version import library_version, module_version
from agent.host.proc_platform import ProcPlatform, parse_module
from tests.host.trees import Tree

BANNER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.48.01  Release Build  (dvs-builder@x)\nGCC version:  gcc 14.2.0\n"


async def test_the_platform_is_read_from_proc_and_sys(tree: Tree):
    tree.file("proc/sys/kernel/random/boot_id", "b0075e\n")
    tree.file("proc/sys/kernel/osrelease", "6.12.117\n")
    tree.file("proc/cmdline", 'amd_iommu=on vfio-pci.ids=10de:2bb5 dyndbg="file a.c +p"\n')
    tree.file(
        "proc/modules", "nvidia_uvm 1 2 - Live 0x0 (POE)\nnvidia 1 40 nvidia_uvm,nvidia_modeset, Live 0x0\n"
    )
    tree.file("sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "Y\n")
    tree.file("sys/module/kvm_amd/parameters/sev_snp", "Y\n")
    tree.file("proc/driver/nvidia/version", BANNER)
    platform = await ProcPlatform(tree.root).read()
    assert platform.boot_id == Known("b0075e")
    assert platform.kernel_release == Known("6.12.117")
    assert platform.cmdline == Known(("amd_iommu=on", "vfio-pci.ids=10de:2bb5", "dyndbg=file a.c +p"))
    assert isinstance(platform.modules, Known)
    assert platform.modules.value["nvidia_uvm"].parameters == {"uvm_disable_hmm": "Y"}
    assert platform.modules.value["nvidia"].users == ("nvidia_uvm", "nvidia_modeset")
    assert platform.modules.value["nvidia"].use_count == 40
    assert platform.sev_snp == Known(value=True)
    assert platform.nvidia_driver == Known("590.48.01")
    assert isinstance(platform.systemd, Absent)


async def test_D9_a_module_that_is_not_loaded_is_not_listed(tree: Tree):
    tree.file("proc/modules", "nvidia 1 0 - Live 0x0\n")
    modules = (await ProcPlatform(tree.root).read()).modules
    assert isinstance(modules, Known)
    assert "nvidia_uvm" not in modules.value


async def test_a_built_in_module_counts_as_loaded_and_one_still_coming_does_not(tree: Tree):
    tree.file("proc/modules", "")
    tree.file("sys/module/vfio_pci/parameters/disable_idle_d3", "N\n")
    tree.file("sys/module/nvidia/initstate", "coming\n")
    modules = (await ProcPlatform(tree.root).read()).modules
    assert isinstance(modules, Known)
    assert set(modules.value) == {"vfio_pci"}


async def test_an_empty_tree_knows_nothing_and_claims_nothing(tree: Tree):
    platform = await ProcPlatform(tree.root).read()
    assert isinstance(platform.boot_id, Unknown)
    assert isinstance(platform.cmdline, Unknown)
    assert isinstance(platform.modules, Unknown)
    assert isinstance(platform.sev_snp, Absent)
    assert isinstance(platform.nvidia_driver, Absent)


async def test_sev_snp_off_and_nonsense_are_told_apart(tree: Tree):
    for text, expected in (("N", Known(value=False)), ("0", Known(value=False)), ("1", Known(value=True))):
        tree.file("sys/module/kvm_amd/parameters/sev_snp", text + "\n")
        assert (await ProcPlatform(tree.root).read()).sev_snp == expected
    tree.file("sys/module/kvm_amd/parameters/sev_snp", "maybe\n")
    assert isinstance((await ProcPlatform(tree.root).read()).sev_snp, Unknown)


def test_quotes_on_the_command_line_hold_words_together():
    assert split_cmdline('a "b c" d="e  f" g="h') == ("a", "b c", "d=e  f", "g=h")
    assert split_cmdline("") == ()


def test_a_module_line_without_use_count_is_read():
    assert parse_module("dummy 16384 - - Live 0x0").use_count == 0


def test_B9_options_are_found_in_every_directory_and_a_file_hides_its_namesake(tree: Tree):
    tree.file(
        "etc/modprobe.d/vfio.conf", "# options no\n options  vfio-pci \\\n  ids=10de:2bb5\nsoftdep x pre: y\n"
    )
    tree.file("usr/lib/modprobe.d/vfio.conf", "options vfio-pci ids=hidden\n")
    tree.file("run/modprobe.d/uvm.conf", "options nvidia_uvm uvm_disable_hmm=1\n")
    tree.file("lib/modprobe.d/README", "options not a conf\n")
    assert read_module_options(tree.root) == Known(
        ("options nvidia_uvm uvm_disable_hmm=1", "options vfio-pci ids=10de:2bb5")
    )


def test_an_unreadable_options_file_makes_the_options_unknown(tree: Tree):
    tree.directory("etc/modprobe.d/vfio.conf")
    assert isinstance(read_module_options(tree.root), Unknown)


def test_the_module_version_is_read_from_sysfs_where_proc_has_none(tree: Tree):
    tree.file("sys/module/nvidia/version", "565.57.01\n")
    assert module_version(tree.root) == Known("565.57.01")


def test_D2_the_library_version_is_that_of_the_file_the_loader_takes(tree: Tree):
    libraries = "usr/lib/x86_64-linux-gnu"
    tree.file(f"{libraries}/libcuda.so.565.57.01")
    tree.file(f"{libraries}/libcuda.so.590.48.01")
    tree.link(f"{libraries}/libcuda.so.1", "libcuda.so.565.57.01")
    assert library_version(tree.root) == Known("565.57.01")


def test_D2_libraries_of_two_versions_are_unknown_and_named(tree: Tree):
    tree.file("usr/lib/x86_64-linux-gnu/libcuda.so.565.57.01")
    tree.file("usr/lib64/libnvidia-ml.so.590.48.01")
    mixed = library_version(tree.root)
    assert isinstance(mixed, Unknown)
    assert "565.57.01" in mixed.reason
    assert "590.48.01" in mixed.reason


def test_a_host_without_the_libraries_has_none(tree: Tree):
    assert isinstance(library_version(tree.root), Absent)
