"""Verdicts and the converged host, built on the type host."""

from agent.core.inputs import Inputs
from agent.core.resolve import resolve
from agent.core.spec import GpuHost
from agent.core.verdict import P2PVerdict, PairResult, PathVerdict, fingerprint
from agent.kinds.rebind import UDEV_RULES
from agent.kinds.udev_rules import udev_rules
from tests.core import build
from tests.core.build import FIRST, GPUS, LAST, NOW, Change, made, with_memory


def verdict(result: PairResult, gpus: tuple[str, ...] = FIRST, **changes: object) -> Change:
    """A self-test of these GPUs on the host as it is now, an hour ago."""

    def change(inputs: Inputs) -> Inputs:
        paths = tuple(
            PathVerdict(source=a, destination=b, path="copy-push", result=result)
            for a in gpus
            for b in gpus
            if a != b
        )
        found = P2PVerdict(
            gpus=gpus, fingerprint=fingerprint(inputs.obs, gpus), result=result, paths=paths, controls_ok=True,
            tested_at=NOW - 3600,
        ).model_copy(update=changes)  # fmt: skip
        others = tuple(v for v in inputs.memory.verdicts if v.gpus != gpus)
        return with_memory(verdicts=(*others, found))(inputs)

    return change


def rules_written(inputs: Inputs) -> Inputs:
    text = udev_rules(resolve(inputs))
    return build.files({UDEV_RULES: text})(inputs) if text else inputs


def split(*, result: PairResult = "corrupt") -> Change:
    """The host split as the spec says, tested, and idle."""

    def change(inputs: Inputs) -> Inputs:
        idle = [a for gpu in GPUS for a in (gpu, build.audio_of(gpu))]
        return made(
            inputs,
            build.on("vfio-pci", *LAST),
            build.stopped(),
            build.idle(*idle),
            rules_written,
            verdict(result),
        )

    return change


def converged(host: GpuHost | None = None, *changes: Change, result: PairResult = "corrupt") -> Inputs:
    """The type host at its goal: split, tested (P2P corrupt, so off), the service running and promoted."""
    return made(build.type_host(host), split(result=result), build.running(), build.promoted(), *changes)
