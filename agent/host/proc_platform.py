"""The platform from /proc, /sys/module and modprobe.d: what the kernel was told, and what it made of it."""

import asyncio
import errno
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from agent.core.boot import split_cmdline
from agent.core.fact import Absent, Fact, Known, Unknown, say
from agent.core.observation import Initramfs, Module, NvidiaNodes, Platform
from agent.host.attribute_write import AttributeWriter
from agent.host.boot_loader import read_boot, refresh_boot_loader
from agent.host.command import run_command
from agent.host.file_calls import FileCalls
from agent.host.initramfs import InitramfsReader
from agent.host.manager import ServiceManager
from agent.host.modprobe import load
from agent.host.modprobe_options import read_module_options, read_option_files
from agent.host.modules_load import read_modules_load
from agent.host.nvidia_minors import NvidiaMinors
from agent.host.nvidia_nodes import make_nvidia_nodes, read_nvidia_nodes
from agent.host.nvidia_version import module_version
from agent.host.reading import convert, names_in, read_text, unreadable
from agent.host.scan import Scan

# Modules whose parameters say something about GPUs, IOMMU or PCIe. Others are listed without parameters.
PARAMETERS_OF = (
    "nvidia*",
    "vfio*",
    "kvm*",
    "nouveau",
    "snd_hda_intel",
    "iommufd",
    "pcie_aspm",
    "pci_hotplug",
    "pciehp",
    "i2c_nvidia_gpu",
    "gdrdrv",
    "ast",
    "drm",
)
_SYSTEMCTL_DEADLINE = 10.0
_WRITE_DEADLINE = 10.0
_READ_DEADLINE = 10.0
_NODES_DEADLINE = 10.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class ProcPlatform:
    """``PlatformPort`` over /proc and /sys. Reading needs no root; loading a module needs ``manager``.

    ``modules``: names whose parameters are read too, asked for at each read.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        parameters_of: tuple[str, ...] = PARAMETERS_OF,
        manager: ServiceManager | None = None,
        modules: Callable[[], Iterable[str]] = tuple,
        minors: NvidiaMinors | None = None,
    ) -> None:
        self._root = root
        self._parameters_of = parameters_of
        self._manager = manager
        self._modules_named = modules
        self._minors = minors or NvidiaMinors(root)
        self._version: Fact[str] | None = None  # of systemd, once it is known: asking costs a process
        self._writer = AttributeWriter()
        self._scan: Scan[Platform] = Scan("platform scan")
        self._files = FileCalls("boot files")
        self._initramfs = InitramfsReader(root)

    async def read(self) -> Platform:
        platform, systemd, nodes = await asyncio.gather(
            self._scan.run(self._read), self._systemd(), self._nvidia_nodes()
        )
        initramfs = await self._read_initramfs(platform)
        return replace(platform, systemd=systemd, nvidia_nodes=nodes, initramfs=initramfs)

    async def _nvidia_nodes(self) -> Fact[NvidiaNodes]:
        """By itself: a GPU that is stuck takes its time to be given up on."""
        where = str(self._root / "proc/driver/nvidia")
        try:
            return await self._files.run(
                where, lambda: read_nvidia_nodes(self._root, self._minors), _NODES_DEADLINE
            )
        except OSError as error:
            return Unknown(f"{where}: {error.strerror or error}")

    async def _read_initramfs(self, platform: Platform) -> Fact[Initramfs]:
        if not isinstance(platform.kernel_release, Known):
            return Unknown("the kernel's release is unknown, and with it the name of its initramfs")
        return await self._initramfs.read(platform.kernel_release.value)

    async def load_module(self, name: str) -> None:
        await load(name, self._root, self._manager)

    async def make_device_nodes(self) -> None:
        await make_nvidia_nodes(await self._nvidia_nodes(), self._root, self._manager)

    async def set_module_parameter(self, module: str, parameter: str, value: str) -> None:
        if not _NAME.fullmatch(module) or not _NAME.fullmatch(parameter):
            raise OSError(errno.EINVAL, f"no module or no parameter: {module!r}, {parameter!r}")
        path = self._root / "sys/module" / module.replace("-", "_") / "parameters" / parameter
        await self._writer.write(f"{module}.{parameter}", path, value, _WRITE_DEADLINE)

    async def refresh_boot_loader(self) -> None:
        boot = await self._files.run("/boot", lambda: read_boot(self._root), _READ_DEADLINE)
        loader = boot.loader
        if self._manager is None or not isinstance(loader, Known):
            raise OSError(errno.EOPNOTSUPP, f"no boot loader can be refreshed here: {say(loader)}")
        await refresh_boot_loader(loader.value, self._manager)

    def _read(self) -> Platform:
        kernel = self._root / "proc/sys/kernel"
        boot = read_boot(self._root)
        return Platform(
            boot_id=_present(read_text(kernel / "random/boot_id")),
            kernel_release=_present(read_text(kernel / "osrelease")),
            cmdline=convert(
                _present(read_text(self._root / "proc/cmdline")), lambda text: Known(split_cmdline(text))
            ),
            modules=self._modules(),
            module_options=read_module_options(self._root),
            sev_snp=convert(read_text(self._root / "sys/module/kvm_amd/parameters/sev_snp"), _flag),
            nvidia_driver=module_version(self._root),
            module_option_files=read_option_files(self._root),
            boot_loader=boot.loader,
            next_cmdline=boot.next_cmdline,
            configured_cmdline=boot.configured_cmdline,
            boot_sources=boot.sources,
            modules_load=read_modules_load(self._root),
        )

    def _modules(self) -> Fact[Mapping[str, Module]]:
        listing = _present(read_text(self._root / "proc/modules"))
        if not isinstance(listing, Known):
            return listing
        try:
            loaded = {module.name: module for module in map(parse_module, listing.value.splitlines())}
            named = {name.replace("-", "_") for name in self._modules_named()}
            for name in names_in(self._root / "sys/module"):
                if name in named or self._is_relevant(name):
                    module = loaded.get(name) or self._built_in(name)
                    if module is not None:
                        loaded[name] = replace(module, parameters=self._parameters(name))
        except OSError as error:
            return unreadable(self._root / "sys/module", error)
        except (ValueError, IndexError):
            return Unknown("/proc/modules has a line of an unexpected form", "Unparsable")
        return Known(loaded)

    def _built_in(self, name: str) -> Module | None:
        # Only a loadable module has an initstate; one that is still coming or going is not loaded.
        return None if (self._root / "sys/module" / name / "initstate").exists() else Module(name)

    def _is_relevant(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._parameters_of)

    def _parameters(self, name: str) -> dict[str, str]:
        """Readable parameters; some are write-only or for root alone, and are left out."""
        directory = self._root / "sys/module" / name / "parameters"
        facts = {parameter: read_text(directory / parameter) for parameter in names_in(directory)}
        return {parameter: fact.value for parameter, fact in facts.items() if isinstance(fact, Known)}

    async def _systemd(self) -> Fact[str]:
        if not (self._root / "run/systemd/system").is_dir():
            return Absent("systemd is not the service manager here")
        if not isinstance(self._version, Known):
            self._version = await self._ask_version()
        return self._version

    async def _ask_version(self) -> Fact[str]:
        try:
            done = await run_command(("systemctl", "--version"), _SYSTEMCTL_DEADLINE)
        except OSError as error:  # TimeoutError is one
            return Unknown(f"systemctl --version: {error}", "SystemctlFailed")
        match = re.match(r"systemd (\d+)", done.stdout)
        return (
            Known(match[1])
            if match
            else Unknown(f"systemctl --version said {done.stdout[:80]!r}", "Unparsable")
        )


def parse_module(line: str) -> Module:
    """One line of /proc/modules: name, size, use count, users, state, address."""
    name, _, count, users = line.split()[:4]
    return Module(
        name=name,
        use_count=int(count) if count != "-" else 0,
        users=tuple(user for user in users.split(",") if user and user != "-"),
    )


def _present(fact: Fact[str]) -> Fact[str]:
    """A file of /proc that every kernel has: not to find it is not to know."""
    return Unknown(fact.reason, "Unreadable") if isinstance(fact, Absent) else fact


def _flag(text: str) -> Fact[bool]:
    if text in ("Y", "1"):
        return Known(value=True)
    if text in ("N", "0"):
        return Known(value=False)
    return Unknown(f"sev_snp reads {text!r}", "Unparsable")
