"""Every edge of the host this runs on."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from agent.host.clock import SystemClock
from agent.host.inference import HttpInference
from agent.host.kmsg import Kmsg
from agent.host.local_target import LocalTarget, UnobservableTarget
from agent.host.nvml import ChildNvml
from agent.host.proc_holders import ProcHolders
from agent.host.proc_platform import ProcPlatform
from agent.host.refusal import refuse
from agent.host.sysfs_pci import SysfsPci
from agent.ports import NvmlPort, P2PTestResult, Ports, TargetPort


class RefusedP2PTest:
    """``P2PTestPort``: a P2P test loads GPUs and can wedge them, so it is acting."""

    async def run(self, gpus: Sequence[str], progress: Callable[[str], None]) -> P2PTestResult:  # noqa: ARG002 - the port's signature
        refuse(f"a P2P test of {', '.join(gpus)}")


def real_ports(root: Path = Path("/")) -> Ports:
    """Ports that read this host and refuse every write with ``TerminalError`` (reason RealHostReadOnly)."""
    clock = SystemClock()
    alone = asyncio.Lock()
    nvml = ChildNvml(root, alone=alone)
    return Ports(
        clock=clock,
        platform=ProcPlatform(root),
        pci=SysfsPci(root),
        nvml=nvml,
        holders=ProcHolders(root, alone),
        kernel_log=Kmsg(root),
        targets=_targets(root, nvml),
        inference=HttpInference(clock),
        p2p_test=RefusedP2PTest(),
    )


def _targets(root: Path, nvml: NvmlPort) -> Callable[[str], TargetPort]:
    local = LocalTarget(root, nvml)

    def target(name: str) -> TargetPort:
        return local if name == "host" else UnobservableTarget(name)

    return target
