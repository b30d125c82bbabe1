"""Facts about a GPU that are more than one word: rows of memory given up, and what NVML says of peer access."""

from dataclasses import dataclass

from agent.core.fact import Fact

# Clock event reasons by which the card itself protects itself, and what to look at.
SLOWED = {
    "hardware thermal slowdown": "check its fans, the airflow and the inlet temperature",
    "hardware power brake": "check the power cables and the supply's budget",
}


@dataclass(frozen=True, slots=True)
class RemappedRows:
    """Rows of GPU memory that spare rows stand in for (nvmlDeviceGetRemappedRows has the same numbers)."""

    correctable: int
    uncorrectable: int
    pending: bool  # a remapping takes effect with the next reset; until then the bad row is in use
    failed: bool  # no spare row was left

    def __str__(self) -> str:
        told = f"{self.correctable} after correctable errors, {self.uncorrectable} after uncorrectable ones"
        return told + (", more PENDING" if self.pending else "") + (", FAILED" if self.failed else "")


@dataclass(frozen=True, slots=True)
class P2PCapability:
    """nvmlDeviceGetP2PStatus from one GPU to another: "ok", or what NVML has against it.

    It consults neither IOMMU mode nor ACS: "ok" does not say that one byte arrives.
    """

    read: Fact[str]
    write: Fact[str]
    atomics: Fact[str]
