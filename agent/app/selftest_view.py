"""The P2P self-test's outcome for people: who reaches whom over which path, what is wrong, what is likely, what is unseen."""

from collections.abc import Iterable, Sequence

from agent.app.status_page import table
from agent.app.terminal import Style, escape, width, wrap
from agent.core.fact import Known, say
from agent.core.observation import Observation
from agent.core.p2p_speed import COLLAPSES, NOT_DIRECT
from agent.core.verdict import DIRECT_PATHS, P2PVerdict, PairResult, PathVerdict

PATHS = (*DIRECT_PATHS, "concurrent")
LETTERS: dict[PairResult, str] = {
    "good": "+", "corrupt": "C", "hung": "H", "error": "E", "unsupported": "u", "not-run": "-",
}  # fmt: skip
LEGEND = (
    "Each cell: copy-push, copy-pull (the copy engine of the sender, of the receiver), store, load (their compute units), "
    "concurrent (all pairs at once): + right, C corrupt data, H hung, E error, u not supported, - not run. "
    "Then GB/s of copy-push alone / while all pairs send."
)
UNSEEN = (
    "What this test cannot see: faults that come with other sizes, loads, temperatures or times than these few seconds; "
    "memory that it did not touch ({memory}); GPUs that were not tested together; what NCCL or a network card does. "
    "A good result holds until this host changes or the kernel logs a page fault."
)
MOST_FINDINGS = 12
NAMED = 3  # pairs with the same finding that are named before they are only counted
Pair = tuple[str, str]


def render_p2p(
    verdict: P2PVerdict,
    obs: Observation,
    style: Style,
    *,
    profile: str,
    full: bool,
    columns: int | None = None,
) -> str:
    """Without a final line end. ``columns``: of the page; None asks the terminal."""
    room = columns or max(60, width())
    lines = (
        [style.banner(f"SIMULATED HOST (profile {profile}): nothing below is this machine")]
        if profile
        else []
    )
    lines += [f"P2P self-test of {len(verdict.gpus)} GPUs ({'full' if full else 'quick'})", ""]
    lines += [f"  {line}" for line in _gpus(verdict, obs)]
    controls = _controls(verdict, room)
    lines += ["", *controls] if controls else []
    if verdict.paths:
        lines += ["", *_matrix(verdict, style), "", *wrap(LEGEND, room), ""]
    lines += _findings(verdict, style, room)
    lines += _conclusion(verdict, style, room, full=full)
    return "\n".join(lines)


def _gpus(verdict: P2PVerdict, obs: Observation) -> list[str]:
    seen = obs.nvml.value.gpus if isinstance(obs.nvml, Known) else {}
    rows = []
    for number, address in enumerate(verdict.gpus, 1):
        gpu = seen.get(address)
        name = say(gpu.value.name) if isinstance(gpu, Known) else ""
        uuid = say(gpu.value.uuid) if isinstance(gpu, Known) else ""
        rows.append((str(number), address, escape(name), escape(uuid)))
    return table(rows, left=frozenset({1, 2, 3}))


def _controls(verdict: P2PVerdict, room: int) -> list[str]:
    """Transfers that must be right on any host."""
    lines = []
    for path, said in (("host-bounce", "host to GPU and back"), ("staged", "GPU to GPU by way of the host")):
        found = [c for c in verdict.controls if c.path == path]
        if not found:
            continue
        right = sum(c.result == "good" for c in found)
        speeds = [c.gbps for c in found if c.gbps]
        fast = f", {min(speeds):g} to {max(speeds):g} GB/s" if speeds else ""
        lines.append(f"control, {said}: {right} of {len(found)} right{fast}")
    if not verdict.controls_ok:
        lines += wrap(f"the test could not judge: {escape(verdict.control_detail)}", room)
    return lines


def _matrix(verdict: P2PVerdict, style: Style) -> list[str]:
    by_pair: dict[Pair, dict[str, PathVerdict]] = {}
    for path in verdict.paths:
        by_pair.setdefault((path.source, path.destination), {})[path.path] = path
    numbers = range(1, len(verdict.gpus) + 1)
    rows = [["from \\ to", *(str(n) for n in numbers)]]
    for number, source in enumerate(verdict.gpus, 1):
        cells = [_cell(by_pair.get((source, destination), {})) for destination in verdict.gpus]
        rows.append([str(number), *cells])
    return [_painted(line, style) for line in table(rows, left=frozenset(range(1, len(numbers) + 1)))]


def _cell(paths: dict[str, PathVerdict]) -> str:
    if not paths:
        return "."
    letters = "".join(LETTERS[paths[p].result] if p in paths else "-" for p in PATHS)
    alone, together = (_speed(paths.get(p)) for p in ("copy-push", "concurrent"))
    return f"{letters} {alone}/{together}" if (alone, together) != ("-", "-") else letters


def _speed(path: PathVerdict | None) -> str:
    return f"{path.gbps:.3g}" if path is not None and path.gbps else "-"


def _painted(line: str, style: Style) -> str:
    """Whole words of the matrix; blanks stay, so that columns do."""
    bad = set("CHE")
    return " ".join(
        style.bad(word) if len(word) == len(PATHS) and set(word) & bad and not set(word) - set("".join(LETTERS.values()))
        else word
        for word in line.split(" ")
    )  # fmt: skip


def _findings(verdict: P2PVerdict, style: Style, room: int) -> list[str]:
    """What is not right, then what is right and odd; the same for several paths of a pair is said once."""
    wrong = _grouped(p for p in verdict.paths if p.result not in {"good", "not-run"})
    if not wrong:
        wrong = _grouped(p for p in verdict.paths if p.result == "not-run")
    odd = _grouped(p for p in verdict.paths if p.result == "good" and p.detail)
    lines = []
    for title, found, paint in (("Wrong:", wrong, style.bad), ("Right, but:", odd, style.unsure)):
        if not found:
            continue
        lines.append(paint(title))
        for text in found[:MOST_FINDINGS]:
            lines += [f"  {line}" for line in wrap(text, room - 2)]
        more = len(found) - MOST_FINDINGS
        lines += [f"  and {more} more: -o json has all"] if more > 0 else []
        lines.append("")
    return lines


def _grouped(paths: Iterable[PathVerdict]) -> list[str]:
    """One text for each sort of finding over the same paths, whichever pairs it is about."""
    by_pair: dict[tuple[Pair, str, str], list[PathVerdict]] = {}
    for path in paths:
        sort = path.detail.partition(";")[0]
        by_pair.setdefault(((path.source, path.destination), path.result, sort), []).append(path)
    alike: dict[tuple[str, str, str], list[PathVerdict]] = {}
    for (_, result, sort), found in by_pair.items():
        alike.setdefault((", ".join(p.path for p in found), result, sort), []).append(found[0])
    return [_finding(names, found) for (names, _, _), found in alike.items()]


def _finding(names: str, found: Sequence[PathVerdict]) -> str:
    pairs = ", ".join(f"{p.source} -> {p.destination}" for p in found[:NAMED])
    more = f" and {len(found) - NAMED} more pairs" if len(found) > NAMED else ""
    first = found[0]
    result = "" if first.result == "good" else f"{first.result}: "
    said = f"{result}{escape(first.detail) or 'no more is known'}"
    return f"{pairs}{more}: {names}: {'for one, ' if len(found) > 1 and ';' in said else ''}{said}"


def _conclusion(verdict: P2PVerdict, style: Style, room: int, *, full: bool) -> list[str]:
    good = verdict.controls_ok and verdict.result == "good"
    word = verdict.result.upper() if verdict.controls_ok else "NOT JUDGED"
    paint = style.good if good else style.bad
    so = "peer transfers may be used" if good else "peer transfers between these GPUs count as off"
    lines = wrap(f"Verdict: {word}: {escape(verdict.summary())}; {so}", room)
    lines[0] = lines[0].replace(word, paint(word), 1)
    if verdict.controls_ok:
        lines.append(f"Kernel log: {verdict.faults or 'no'} page faults of these GPUs during the test")
    if verdict.explanation and verdict.paths:
        lines += wrap(f"Likely: {escape(verdict.explanation)}", room)
    if any(NOT_DIRECT in p.detail for p in verdict.paths):
        lines += wrap(
            f"A copy that is {NOT_DIRECT} may go through the host although the driver says it is direct.",
            room,
        )
    if any(COLLAPSES in p.detail for p in verdict.paths):
        lines += wrap(
            f"A pair that {COLLAPSES} is right and slow: look at the links and switches that these pairs share.",
            room,
        )
    seed = "" if verdict.seed is None else f"; the same data again: --seed {verdict.seed}"
    bound = "boot, driver, kernel arguments, cards, IOMMU group types, ACS bits"
    lines += ["", *wrap(f"Bound to fingerprint {verdict.fingerprint} ({bound}){seed}", room)]
    memory = (
        "a part near the end and around 4 GiB was" if full else "some MiB of each GPU were; --full tests more"
    )
    return [*lines, "", *(style.faint(line) for line in wrap(UNSEEN.format(memory=memory), room))]
