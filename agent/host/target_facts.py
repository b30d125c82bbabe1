"""What a container or another machine looks like from inside, from the words of target_functions.sh."""

from collections.abc import Iterable
from dataclasses import dataclass

from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.observation import TargetFacts
from agent.core.quantity import whole_number
from agent.host.nvidia_version import version_among
from agent.host.nvml_facts import CODES
from agent.host.target_script import NOT_THERE, Part

SGLANG = Unknown("the SGLang version is its interpreter's to tell, and was not asked for", "NotObserved")
_STUCK = 45
_TIMED_OUT = (124, 137)  # timeout(1): ended, or killed because that was not enough
# What NVML's tools print for the errors that leave a target without its GPUs. Their exit status is NVML's code only
# for some of them, and 255 for the rest.
_WORDS = (
    ("Driver/library version mismatch", "NvmlVersionMismatch"),
    ("Unknown Error", "NvmlUnknownError"),
    ("couldn't communicate with the NVIDIA driver", "NvmlDriverNotLoaded"),
    ("Driver Not Loaded", "NvmlDriverNotLoaded"),
    ("couldn't find libnvidia-ml", "NvmlLibraryNotFound"),
    ("Insufficient Permissions", "NvmlNoPermission"),
    ("GPU is lost", "GpuLost"),
    ("GPU requires reset", "GpuResetRequired"),
)


@dataclass(frozen=True, slots=True)
class Inside:
    """One look. ``boot``: changes when the place is started anew."""

    boot: str
    user_driver: Fact[str]
    shm_bytes: Fact[int]
    device_nodes: tuple[str, ...]

    def with_nvml(self, nvml: Fact[str]) -> TargetFacts:
        return TargetFacts(
            reachable=Known(value=True),
            user_driver=self.user_driver,
            nvml=nvml,
            shm_bytes=self.shm_bytes,
            device_nodes=Known(self.device_nodes),
            sglang_version=SGLANG,
        )


def unreachable(reason: str) -> TargetFacts:
    unknown = Unknown(reason, "TargetUnreachable")
    return TargetFacts(unknown, unknown, unknown, unknown, unknown, unknown)


def parse_inside(text: str) -> Inside:
    rows = [line.split("\t") for line in text.split("\n")]
    libraries = [(row[1], row[2].rpartition("/")[2]) for row in rows if row[0] == "library" and len(row) == 3]
    return Inside(
        boot=" ".join(_values(rows, "boot")),
        user_driver=version_among(libraries),
        shm_bytes=_shm(_values(rows, "shm")),
        device_nodes=tuple(sorted(_values(rows, "node"))),
    )


def _values(rows: Iterable[list[str]], word: str) -> list[str]:
    return [row[1] for row in rows if row[0] == word and len(row) == 2]


def _shm(lines: list[str]) -> Fact[int]:
    """From blocks and their size, as statvfs has them."""
    if not lines:
        return Absent("no /dev/shm")
    match [whole_number(word) for word in lines[0].split()]:
        case [int(blocks), int(size)]:
            return Known(blocks * size)
    return Unknown(f"cannot make sense of {lines[0][:80]!r}", "Unparsable")


def nvml_fact(part: Part) -> Fact[str]:
    """What nvidia-smi says inside. Absent: it works, and there is no GPU to see."""
    text = f"{part.output.decode(errors='replace')}\n{part.words}".strip()
    line = next((line.strip()[:200] for line in text.split("\n") if line.strip()), "nothing")
    if part.status == NOT_THERE:
        return Unknown("nvidia-smi is not installed in this target, so NVML was not asked", "NotObserved")
    if part.status == _STUCK:
        return Unknown("an earlier nvidia-smi still sleeps in the kernel", "NvmlStuck")
    if part.status in _TIMED_OUT:
        return Unknown("nvidia-smi did not answer in time", "NvmlTimeout")
    for words, code in _WORDS:
        if words in text:
            said = next(line for line in text.split("\n") if words in line)
            return Unknown(f"nvidia-smi: {said.strip()[:200]}", code)
    if "No devices" in text:
        return Absent("NVML sees no GPU in this target")
    if part.status != 0:
        return Unknown(f"nvidia-smi: {line}", CODES.get(part.status, f"NvmlError{part.status}"))
    return Known("ok")
