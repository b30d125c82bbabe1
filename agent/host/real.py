"""Every edge of the host this runs on."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agent.host.clock import SystemClock
from agent.host.command_target import CommandTarget
from agent.host.inference import HttpInference
from agent.host.kmsg import Kmsg
from agent.host.local_target import LocalTarget
from agent.host.manager import ServiceManager
from agent.host.nccl_check import TargetNcclCheck
from agent.host.no_target import NoTarget
from agent.host.nvidia_minors import NvidiaMinors
from agent.host.nvml import ChildNvml
from agent.host.p2p_test import ChildP2PTest
from agent.host.proc_holders import ProcHolders
from agent.host.proc_platform import ProcPlatform
from agent.host.sysfs_pci import SysfsPci
from agent.host.systemd_bus import BusManager, local_manager
from agent.host.target_names import prefix_for
from agent.host.uevents import uevents
from agent.ports import NvmlPort, Ports, TargetPort

Hints = Callable[[], AsyncGenerator[None, None]]


@dataclass(frozen=True, slots=True)
class RealHost:
    """The host whose files are at ``root``. Its ports read it and act on it."""

    ports: Ports
    manager: ServiceManager

    def hints(self, units: Callable[[], Iterable[str]]) -> Mapping[str, Hints]:
        """By reason: what yields when something on this host has changed. ``units``: those to be watched now."""
        found: dict[str, Hints] = {"uevent": uevents}
        manager = self.manager
        if isinstance(manager, BusManager):
            found["unit changed"] = lambda: manager.watch(units)
        return found

    async def close(self) -> None:
        if isinstance(self.manager, BusManager):
            await self.manager.close()


def real_host(root: Path = Path("/"), modules: Callable[[], Iterable[str]] = tuple) -> RealHost:
    """``modules``: those whose parameters the spec names, beyond the ones that are always read."""
    clock = SystemClock()
    alone = asyncio.Lock()
    manager = local_manager(root)
    nvml = ChildNvml(root, alone=alone)
    minors = NvidiaMinors(root)
    ports = Ports(
        clock=clock,
        platform=ProcPlatform(root, manager=manager, modules=modules, minors=minors),
        pci=SysfsPci(root, manager=manager),
        nvml=nvml,
        holders=ProcHolders(root, alone, minors),
        kernel_log=Kmsg(root),
        targets=_targets(root, nvml, manager, alone),
        inference=HttpInference(clock),
        p2p_test=ChildP2PTest(root),
        nccl_check=TargetNcclCheck(),
    )
    return RealHost(ports, manager)


def real_ports(root: Path = Path("/")) -> Ports:
    """The ports alone, for whoever leaves the connection to systemd to the end of the process."""
    return real_host(root).ports


def _targets(
    root: Path, nvml: NvmlPort, manager: ServiceManager, alone: asyncio.Lock
) -> Callable[[str], TargetPort]:
    containers: list[CommandTarget] = []

    def reloaded() -> None:
        for container in containers:
            container.devices_may_be_gone()

    local = LocalTarget(root, nvml, manager, reloaded)

    @cache  # one object for each, as long as the agent runs: it remembers what it learned
    def target(name: str) -> TargetPort:
        if name == "host":
            return local
        try:
            found = CommandTarget(name, prefix_for(name), alone=alone, root=root)
        except OSError as error:
            return NoTarget(name, error.strerror or str(error))
        containers.extend([found] if name.startswith("lxc:") else [])
        return found

    return target
