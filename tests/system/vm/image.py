"""The guest's disk and initramfs: Debian's root, its kernel's modules and ours, the agent's dependencies, our files.

The agent itself is no part of it: ``payload`` packs this tree's, and the initramfs unpacks it at each boot.
"""

import compileall
import importlib.metadata
import lzma
import py_compile
import re
import shutil
import tarfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.abi.nvml.build import build as build_nvml
from tests.system.vm.cache import cached, key_of
from tests.system.vm.debian import base_root, command, kernel

_HERE = Path(__file__).parent
_REPOSITORY = _HERE.parents[2]
GUEST_PYTHON = (3, 11)
_PACKAGES = "usr/local/lib/python3.11/dist-packages"
_MODULES = (  # noqa: SIM905 - a text of words stays readable
    "virtio_pci virtio_blk virtio_console virtio_rng ext4 crc32c_generic overlay loop fuse autofs4 configfs efi_pstore "
    "vfio-pci vfio_iommu_type1 vfio snd-hda-intel snd-hda-codec-generic e1000e pci-stub softdog "
    "button evdev serio_raw"
).split()
_INITRAMFS = ("virtio_pci", "virtio_blk", "crc32c_generic", "ext4")
# Units that take time under emulation and have nothing to do here.
_MASKED = (  # noqa: SIM905 - as above
    "apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer "
    "systemd-pstore.service ldconfig.service systemd-journal-catalog-update.service systemd-update-done.service "
    "systemd-hwdb-update.service systemd-firstboot.service systemd-sysusers.service systemd-binfmt.service "
    "proc-sys-fs-binfmt_misc.automount proc-sys-fs-binfmt_misc.mount getty@tty1.service serial-getty@ttyS0.service"
).split()


@dataclass(frozen=True, slots=True)
class Image:
    """Paths of what QEMU boots. All of it is read-only."""

    kernel: Path
    initramfs: Path
    root: Path  # a raw ext4 file system


def image(package: str) -> Image:
    """Built where it is not in the cache. Raises ``BuildError``."""
    base, linux = base_root(), kernel(package)
    own = [*_files(_HERE / "guest"), *_files(_HERE / "kernel"), Path(__file__), _HERE / "initramfs_init"]
    packages = sorted(f"{d.name} {d.version}" for d in _dependencies())
    key = key_of(base.name, linux.name, *packages, files=own)
    made = cached("image", key, lambda made: _fill(made, base, linux))
    return Image(linux / "vmlinux", made / "initramfs.cpio", made / "root.ext4")


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def _fill(made: Path, base: Path, linux: Path) -> None:
    root = made / "root"
    root.mkdir()
    command(["tar", "-xpf", str(base / "root.tar"), "-C", str(root), "--exclude=./dev/*"])
    version = (linux / "version").read_text()
    _install_modules(root, linux, version, _build_modules(made / "build", linux, version))
    _install_packages(root / _PACKAGES)
    _configure(root)
    _pack_initramfs(made / "initramfs", root, version, made / "build")
    size = sum(path.lstat().st_size for path in root.rglob("*") if path.is_file()) // 2**20
    disk = made / "root.ext4"
    command(
        [
            "mke2fs",
            "-q",
            "-t",
            "ext4",
            "-J",
            "size=8",
            "-m",
            "0",
            "-d",
            str(root),
            str(disk),
            f"{size + 400}M",
        ]
    )
    for scratch in (root, made / "build", made / "initramfs"):
        shutil.rmtree(scratch)


def _build_modules(build: Path, linux: Path, version: str) -> list[Path]:
    shutil.copytree(_HERE / "kernel", build)
    headers = linux / "headers/usr/src" / f"linux-headers-{version}"
    command(["make", "-s", "-C", str(headers), f"M={build}", "CONFIG_DEBUG_INFO_BTF_MODULES=", "modules"])
    for module in build.glob("*.ko"):
        command(["strip", "--strip-debug", str(module)])
    return [build / "nvidia.ko", build / "nvidia_uvm.ko"]


def _install_modules(root: Path, linux: Path, version: str, ours: Iterable[Path]) -> None:
    source, target = linux / "lib/modules" / version, root / "lib/modules" / version
    for name in _MODULES:
        for path in _module_files(linux, version, name):
            inside = target / path.relative_to(source)
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.with_suffix("").write_bytes(lzma.decompress(path.read_bytes()))
    for name in ("modules.order", "modules.builtin", "modules.builtin.modinfo"):
        shutil.copy(source / name, target / name)
    (target / "updates").mkdir()
    for path in ours:
        shutil.copy(path, target / "updates" / path.name)
    command(["depmod", "-b", str(root), version])


def _module_files(root: Path, version: str, name: str) -> list[Path]:
    """The module's file after those that it needs; none where it is built in."""
    said = command(["modprobe", "-d", str(root), "-S", version, "--show-depends", name]).decode()
    return [Path(line.split()[1]) for line in said.splitlines() if line.startswith("insmod ")]


def _dependencies() -> list[importlib.metadata.Distribution]:
    """What the agent needs at run time, as installed for the Python that runs this."""
    project = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted, found = list(project["dependencies"]), dict[str, importlib.metadata.Distribution]()
    while wanted:
        requirement = wanted.pop()
        if "extra ==" in requirement:
            continue
        name = re.split(r"[^A-Za-z0-9._-]", requirement)[0]
        if name not in found:
            try:
                found[name] = importlib.metadata.distribution(name)
            except importlib.metadata.PackageNotFoundError:
                continue  # for another platform or an older Python, by its marker
            wanted += found[name].requires or []
    return list(found.values())


def _install_packages(target: Path) -> None:
    for distribution in _dependencies():
        for file in distribution.files or ():
            source = Path(str(file.locate()))
            # A package installed from its sources lists some that are not installed, such as its licence.
            if ".." not in file.parts and file.suffix != ".pyc" and source.is_file():
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target / file)
    (target / "agent-tree.pth").write_text("/opt/agent\n")
    _compile(target, f"/{_PACKAGES}")


def _compile(folder: Path, in_guest: str) -> None:
    # By content of nothing at all: the guest must not spend its time on comparing dates.
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(
        folder, quiet=2, stripdir=str(folder), prependdir=in_guest, invalidation_mode=mode, force=True
    )


def _configure(root: Path) -> None:
    shutil.copytree(_HERE / "guest", root, dirs_exist_ok=True, symlinks=True)
    units = root / "etc/systemd/system"
    (units / "multi-user.target.wants/test-channel.service").symlink_to("../test-channel.service")
    (units / "default.target").symlink_to("/lib/systemd/system/multi-user.target")
    for unit in _MASKED:
        (units / unit).symlink_to("/dev/null")
    (root / "etc/hostname").write_text("stand-in-gpus\n")
    (root / "etc/fstab").write_text("")
    (root / "etc/machine-id").write_text("00000000000040008000000000000001\n")
    (root / "opt/agent").mkdir()


def _pack_initramfs(folder: Path, root: Path, version: str, build: Path) -> None:
    for name in ("bin", "proc", "sys", "dev", "disk", "modules"):
        (folder / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "/bin/busybox", folder / "bin/busybox")
    shutil.copy(_HERE / "initramfs_init", folder / "init")
    shutil.copy(build / "nvidia_cards.ko", folder / "modules/nvidia_cards.ko")
    ordered = dict.fromkeys(path for name in _INITRAMFS for path in _module_files(root, version, name))
    for number, path in enumerate(ordered):
        shutil.copy(path, folder / f"modules/{number:02}-{path.name}")
    names = "\n".join(str(p.relative_to(folder)) for p in sorted(folder.rglob("*"))) + "\n"
    # Not compressed: it is small, and the guest would have to decompress it.
    archive = command(["cpio", "-o", "-H", "newc", "--quiet"], cwd=folder, data=names.encode())
    folder.with_suffix(".cpio").write_bytes(archive)


def payload() -> Path:
    """A tar archive over the guest's root: this tree's agent, compiled, its unit, its recipes and the stub NVML."""
    parts = [*_files(_REPOSITORY / "agent"), *_files(_REPOSITORY / "systemd"), *_files(_REPOSITORY / "specs")]
    stub = _files(_REPOSITORY / "tests/abi/nvml")
    relative = [str(path.relative_to(_REPOSITORY)) for path in sorted(parts)]
    key = key_of(*relative, files=[*parts, *stub, Path(__file__)])
    return cached("payload", key, _fill_payload) / "payload.tar"


def _fill_payload(made: Path) -> None:
    tree = made / "tree"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(_REPOSITORY / "agent", tree / "opt/agent/agent", ignore=ignored)
    shutil.copytree(_REPOSITORY / "specs", tree / "opt/agent/specs", ignore=ignored)
    shutil.copytree(_REPOSITORY / "systemd", tree / "etc/systemd/system", ignore=ignored)
    _compile(tree / "opt/agent", "/opt/agent")
    build_nvml(tree / "usr/lib/x86_64-linux-gnu")
    with tarfile.open(made / "payload.tar", "w") as archive:
        for path in sorted(tree.rglob("*")):
            if not path.is_dir():
                archive.add(path, path.relative_to(tree), recursive=False, filter=_as_root)
    shutil.rmtree(tree)


def _as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mode |= 0o644
    return member
