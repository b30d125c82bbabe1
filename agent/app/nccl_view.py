"""The NCCL check's outcome for people: what went wrong in which step, which way the data took, what to do."""

from collections.abc import Iterable

from agent.app.terminal import Style, escape, wrap
from agent.core.nccl_log import Route
from agent.core.nccl_verdict import NcclCheck, NcclRun

UNSEEN = (
    "What this check cannot see: SGLang's own custom all-reduce, which uses P2P without NCCL; secrets and settings that "
    "other drop-ins give the unit, and its user; what happens under a real load."
)


def render_nccl(checked: NcclCheck, style: Style, room: int) -> str:
    """Without a final line end."""
    run, place = checked.run, "this host" if checked.target == "host" else checked.target
    versions = ", ".join(
        f"{name} {escape(value)}" for name, value in (("torch", run.torch), ("NCCL", run.nccl)) if value
    )
    lines = [
        f"NCCL check of {checked.service} in {place}: {len(checked.gpus)} GPUs"
        + (f", {versions}" if versions else ""),
        "",
    ]
    lines += _run(f"as it is started now, P2P {'on' if checked.p2p else 'off'}", run, style, room)
    lines += wrap(f"  ({escape(checked.why)})", room)
    if checked.control is not None:
        lines += _run("control, P2P off", checked.control, style, room)
    lines += ["", *(line for text in advice(checked) for line in wrap(text, room)), *wrap(UNSEEN, room)]
    return "\n".join(lines)


def _run(title: str, run: NcclRun, style: Style, room: int) -> list[str]:
    paint = style.good if run.result == "good" else style.bad
    lines = [f"{title}: {paint(run.result.upper())}"]
    texts = [run.detail, *(f for f in run.findings if f not in run.detail), ways(run.routes)]
    texts += [f"NCCL warns: {warning}" for warning in run.warnings[:5]]
    for text in texts:
        lines += [f"  {line}" for line in wrap(escape(text), room - 2)] if text else []
    return lines


def ways(routes: Iterable[Route]) -> str:
    """As "transport by NCCL's log: SHM/direct/direct (12 routes)"; "" where the log tells of none."""
    count: dict[str, int] = {}
    for route in routes:
        count[route.via] = count.get(route.via, 0) + 1
    words = ", ".join(f"{via} ({number} route{'s' * (number > 1)})" for via, number in sorted(count.items()))
    return f"transport by NCCL's log: {words}" if words else ""


def advice(checked: NcclCheck) -> list[str]:
    """What to do next, by what the control says."""
    found = list(checked.run.advice)
    left = (*checked.run.left, *(checked.control.left if checked.control else ()))
    if left:
        pids = ", ".join(map(str, left))
        found.append(f"Processes that SIGKILL does not end are left in {checked.target}: pids {pids}.")
    if checked.run.result == "good":
        return [*found, "Good for these GPUs as they are now."]
    if checked.run.result == "not-run":
        return [*found, "Nothing was tried: mend the service's interpreter first."]
    if checked.control is None:
        return [
            *found,
            "It fails without P2P: look at NCCL's warnings, at /dev/shm, at the driver in the target.",
        ]
    if checked.p2p and checked.control.result == "good":
        return [
            *found,
            f"Only P2P fails: agent selftest p2p --gpus {','.join(checked.gpus)} shows which pairs.",
        ]
    return [*found, "It fails with P2P off, too, so that P2P alone is not the cause."]
