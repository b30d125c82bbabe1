"""P2P verdicts: what a self-test found, and what it is bound to."""

import hashlib
import json
from collections.abc import Iterable
from typing import Literal

from agent.core.fact import Known, say
from agent.core.observation import Observation
from agent.core.record import Record

PairResult = Literal["good", "corrupt", "hung", "error", "unsupported", "not-run"]
STAYS = "does not end after SIGKILL"  # in the detail of a hung path: its process is in the kernel's hands
DIRECT_PATHS = ("copy-push", "copy-pull", "store", "load")  # of each pair alone; then comes concurrent
WORST_FIRST: tuple[PairResult, ...] = ("hung", "corrupt", "error", "not-run", "unsupported", "good")


class PathVerdict(Record):
    """One ordered pair over one path."""

    source: str
    destination: str
    path: str  # copy-push, copy-pull, store, load, concurrent; of controls: host-bounce, staged
    result: PairResult
    detail: str = ""  # zeros, dropped write, shifted...; then, after semicolons, where and with which pattern
    gbps: float | None = None


class P2PVerdict(Record):
    """The outcome of one self-test over exactly these GPUs."""

    gpus: tuple[str, ...]  # sorted addresses
    fingerprint: str
    result: PairResult  # the worst of all pairs and paths
    paths: tuple[PathVerdict, ...]
    controls_ok: bool
    control_detail: str = ""
    explanation: str = ""
    faults: int = 0  # page faults in the kernel log since the test began
    tested_at: float = 0.0
    simulated: bool = False
    revoked: str = ""  # why it no longer holds, e.g. a page fault in service
    controls: tuple[PathVerdict, ...] = ()
    seed: int | None = None  # repeats the test's data; None: not told

    def bad_pairs(self) -> tuple[tuple[str, str], ...]:
        return tuple(sorted({(p.source, p.destination) for p in self.paths if p.result != "good"}))

    def summary(self) -> str:
        total = len({(p.source, p.destination) for p in self.paths})
        bad = len(self.bad_pairs())
        if not self.controls_ok:
            return f"self-test could not judge: {self.control_detail}"
        if self.result == "good":
            return f"all {total} ordered pairs good"
        if not bad and self.faults:
            return f"{self.faults} page faults during the test, although the data of all {total} ordered pairs was right"
        return f"{bad} of {total} ordered pairs {self.result}"


def worst(results: Iterable[PairResult]) -> PairResult:
    found = set(results)
    return next((r for r in WORST_FIRST if r in found), "not-run")


def fingerprint(obs: Observation, gpus: Iterable[str]) -> str:
    """What a verdict is bound to, in sixteen digits. Any change voids the verdict."""
    return hashlib.sha256(json.dumps(circumstances(obs, gpus), sort_keys=True).encode()).hexdigest()[:16]


def circumstances(obs: Observation, gpus: Iterable[str]) -> dict[str, object]:
    """What a verdict is bound to: boot, command line, driver; of each GPU its address, UUID, group type, ACS bits."""
    return {
        "boot": say(obs.platform.boot_id),
        "cmdline": say(obs.platform.cmdline),
        "driver": say(obs.platform.nvidia_driver),
        "gpus": [_gpu_part(obs, address) for address in sorted(gpus)],
    }


def _gpu_part(obs: Observation, address: str) -> list[str]:
    function = obs.function(address)
    pci = obs.pci.value if isinstance(obs.pci, Known) else None
    if function is None or pci is None:
        return [address, "missing"]
    group = pci.groups.get(function.iommu_group.value) if isinstance(function.iommu_group, Known) else None
    acs = [f"{b}={say(pci.functions[b].acs_ctl)}" for b in function.bridges if b in pci.functions]
    nvml = obs.nvml.value.gpus.get(address) if isinstance(obs.nvml, Known) else None
    uuid = say(nvml.value.uuid) if isinstance(nvml, Known) else "unknown"
    return [address, uuid, say(group.type) if group else say(function.iommu_group), *acs]


def usable(verdict: P2PVerdict | None, obs: Observation, gpus: Iterable[str]) -> bool:
    """Law 4: good, not revoked, controls passed, for exactly these GPUs, and nothing has moved since."""
    addresses = tuple(sorted(gpus))
    return current(verdict, obs, addresses) and verdict is not None and verdict.result == "good"


def current(verdict: P2PVerdict | None, obs: Observation, gpus: Iterable[str]) -> bool:
    """The verdict, good or bad, still speaks about this host as it is."""
    addresses = tuple(sorted(gpus))
    return (
        verdict is not None
        and not verdict.revoked
        and verdict.controls_ok
        and verdict.gpus == addresses
        and verdict.fingerprint == fingerprint(obs, addresses)
    )
