"""The platform and kernel log ports of a simulated host."""

from agent.core.boot import GRUB_DROP_IN
from agent.core.boot_edit import read_drop_in, with_wishes
from agent.core.fact import Absent, Known
from agent.core.observation import Initramfs, Module, NvidiaNodes, Platform
from agent.ports import KernelLines
from agent.sim import kernel
from agent.sim.facts import known, patched, scripted
from agent.sim.holding import missing_nodes
from agent.sim.state import ModuleState, WorldState
from agent.sim.world import World

OPTIONS_FILE = "/etc/modprobe.d/local.conf"
MODULES_LOAD_FILE = "/etc/modules-load.d/local.conf"


class SimPlatform:
    def __init__(self, world: World) -> None:
        self._world = world
        self._seen: tuple[int, Platform] | None = None

    async def read(self) -> Platform:
        fault = await self._world.enter("platform.read")
        if (instead := scripted(fault)) is not None:
            raise OSError(instead.reason)
        state = self._world.state
        if self._seen is None or self._seen[0] != state.version:
            self._seen = (state.version, platform_of(state))
        return patched(self._seen[1], fault.value) if fault is not None and fault.value else self._seen[1]

    async def load_module(self, name: str) -> None:
        fault = await self._world.enter("platform.load_module", name, write=name)
        if fault is not None and fault.succeed_without_effect:
            return
        with self._world.change():
            kernel.load_module(self._world, name)

    async def make_device_nodes(self) -> None:
        missing = missing_nodes(self._world.state)
        fault = await self._world.enter("platform.make_device_nodes", write=" ".join(missing))
        if fault is not None and fault.succeed_without_effect:
            return
        with self._world.change() as state:
            if state.made_nodes is not None:
                state.made_nodes += missing

    async def set_module_parameter(self, module: str, parameter: str, value: str) -> None:
        about = f"{module}.{parameter}"
        fault = await self._world.enter("platform.set_module_parameter", about, write=f"{about} {value}")
        if fault is not None and fault.succeed_without_effect:
            return
        with self._world.change() as state:
            kernel.set_module_parameter(state, module, parameter, value)

    async def refresh_boot_loader(self) -> None:
        fault = await self._world.enter("platform.refresh_boot_loader", write="update-grub")
        if fault is not None and fault.succeed_without_effect:
            return
        with self._world.change() as state:
            if state.boot_words is None:  # the agent's file may be taken away again
                state.boot_words = list(state.cmdline)
            state.next_cmdline = list(configured_words(state))


def configured_words(state: WorldState) -> tuple[str, ...]:
    """What an operator edits, as the agent's own file changes it."""
    words = state.boot_words if state.boot_words is not None else state.cmdline
    file = state.targets["host"].files.get(GRUB_DROP_IN) if "host" in state.targets else None
    return with_wishes(words, (read_drop_in(file.text) if file is not None else None) or ())


def platform_of(state: WorldState) -> Platform:
    nodes = NvidiaNodes(missing_nodes(state), "/usr/bin/nvidia-modprobe")
    bound = sum(function.driver == "nvidia" for function in state.functions.values())
    return Platform(
        boot_id=Known(state.boot_id),
        kernel_release=Known(state.kernel_release),
        cmdline=Known(tuple(state.cmdline)),
        modules=Known({name: _module(name, module, bound) for name, module in sorted(state.modules.items())}),
        module_options=Known(tuple(state.module_options)),
        sev_snp=known(state.sev_snp),
        nvidia_driver=Known(state.driver_version) if "nvidia" in state.modules else Absent("not loaded"),
        systemd=known(state.systemd),
        module_option_files=Known(tuple((OPTIONS_FILE, line) for line in state.module_options)),
        boot_loader=Known(state.boot_loader),
        next_cmdline=Known(tuple(state.cmdline if state.next_cmdline is None else state.next_cmdline)),
        configured_cmdline=Known(configured_words(state)),
        boot_sources={"/etc/default/grub": tuple(state.boot_words or state.cmdline)},
        nvidia_nodes=Known(nodes) if bound else Absent("no GPU is on nvidia"),
        modules_load=Known(tuple((MODULES_LOAD_FILE, name) for name in state.modules_load)),
        initramfs=Known(
            Initramfs(
                f"/boot/initrd.img-{state.kernel_release}",
                "update-initramfs -u",
                tuple(state.initramfs_modules),
            )
        ),
    )


def _module(name: str, module: ModuleState, bound: int) -> Module:
    count = len(module.users) + (bound if name == "nvidia" else 0)
    return Module(name, dict(module.parameters), count, tuple(module.users))


class SimKernelLog:
    """The cursor is the boot and the number of lines read of it; another boot begins anew."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def read(self, cursor: str) -> KernelLines:
        fault = await self._world.enter("kernel_log.read")
        state = self._world.state
        boot, _, position = cursor.partition(" ")
        known = boot == state.boot_id and position.isdigit()
        skip = int(position) if known else 0
        lines: list[tuple[float, str]] = []
        seen = 0
        for line in state.kernel_log:
            fresh = min(line.count, seen + line.count - skip)
            lines += [(line.at, line.text)] * max(0, fresh)
            seen += line.count
        gap = bool(fault is not None and fault.value and fault.value.get("gap"))
        return KernelLines(tuple(lines), f"{state.boot_id} {seen}", gap, fresh=not known)
