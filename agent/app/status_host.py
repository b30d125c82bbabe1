"""The host's part of the status: conditions, a plan that waits, GPUs, P2P verdicts."""

from collections.abc import Iterable

from agent.app.status_file import Document, number, rows, section, text, words
from agent.app.status_page import LABEL, Page, Paint, table
from agent.app.terminal import clip

MOST_CONDITIONS = 6  # on a narrow page
CAUSE_LINES = 6  # of why peer transfers are bad: it ends in what to do
NOT_OURS = "not ours"


def plan_lines(document: Document, page: Page) -> list[str]:
    plan = section(document, "plan")
    if not plan:
        return []
    count = int(number(plan, "actions") or 0)
    what = f"{count} action{'s' * (count != 1)}, {text(plan, 'disruption')}"
    if blocked := text(plan, "blocked"):
        lines = page.labelled("BLOCKED", f"{blocked} ({what})", page.style.unsure)
        if approve := text(plan, "approve"):
            lines += page.labelled(
                "", f"let exactly this plan run: {approve} (see: agent plan)", page.style.strong
            )
        return lines
    if count:
        return page.labelled("plan", f"{text(plan, 'id')}: {what}")
    return page.labelled("plan", "nothing can be done now; what is refused, and why: agent plan")


def condition_lines(document: Document, page: Page) -> list[str]:
    """What is not True comes first, with its reason and next step; the rest in wide only."""
    conditions = rows(document, "conditions")
    wrong = [c for c in conditions if text(c, "status") != "True"]
    total = len(conditions)
    if not total:
        return page.labelled("conditions", "none is known", page.style.unsure)
    if not wrong:
        lines = page.labelled("conditions", f"all {total} True", page.style.good)
    else:
        lines = page.labelled("conditions", f"{len(wrong)} of {total} not True", page.style.strong)
    shown = wrong if page.wide else wrong[:MOST_CONDITIONS]
    for condition in shown:
        lines += _condition(condition, document, page)
    if len(shown) < len(wrong):
        lines += page.labelled("", f"and {len(wrong) - len(shown)} more: agent status -o wide")
    if page.wide:
        for condition in conditions:
            lines += _condition(condition, document, page) if condition not in wrong else []
    return lines


def _condition(condition: Document, document: Document, page: Page) -> list[str]:
    status = text(condition, "status")
    paint: Paint = {"True": page.style.good, "False": page.style.bad}.get(status, page.style.unsure)
    since = f", {page.ago(number(condition, 'last_transition'))}"
    head = f"{text(condition, 'type')}: {text(condition, 'reason')}{since}"
    if page.wide and (generation := number(condition, "observed_generation")):
        head += f", generation {generation:g}"
    place = "" if page.wide else _told_elsewhere(condition, document)
    lines = page.labelled(f"  {status or '?'}", f"{head}; see {place}" if place else head, paint)
    if place:
        return lines
    if message := text(condition, "message"):
        lines += page.labelled("", message)
    if step := text(condition, "next_step"):
        lines += page.labelled("", f"next: {step}", page.style.strong)
    return lines


def _told_elsewhere(condition: Document, document: Document) -> str:
    """Where one screen tells the same already; "" where it does not."""
    kind = text(condition, "type")
    if kind.startswith("P2PVerified/") and rows(document, "p2p"):
        return "P2P"
    if kind == "SpecAccepted" and words(section(document, "spec"), "problems"):
        return "spec"
    blocked = text(condition, "reason") == "Blocked" and text(section(document, "plan"), "blocked")
    return "BLOCKED" if blocked else ""


def gpu_lines(document: Document, page: Page) -> list[str]:
    """One row for GPUs of a group that are alike in everything shown; one for each GPU in wide."""
    gpus = rows(document, "gpus")
    if not gpus:
        return page.labelled("GPUs", "none is known", page.style.unsure)
    folded: dict[tuple[str, ...], list[str]] = {}
    ordered = sorted(gpus, key=lambda g: (not text(g, "group"), _first(gpus, text(g, "group"))))
    for gpu in ordered:
        folded.setdefault(_cells(gpu, page), []).append(_address(gpu, gpus))
    return _wide_table(ordered, page) if page.wide else _narrow_table(folded, page)


def _first(gpus: list[Document], group: str) -> str:
    return min(text(g, "address") for g in gpus if text(g, "group") == group)


def _address(gpu: Document, gpus: Iterable[Document]) -> str:
    """As lspci does: the domain is left out where every GPU is in domain 0."""
    zero = all(text(g, "address").startswith("0000:") for g in gpus)
    return text(gpu, "address").removeprefix("0000:") if zero else text(gpu, "address")


def _driver(gpu: Document) -> str:
    driver, desired = text(gpu, "driver"), text(gpu, "desired_driver")
    return f"{driver} -> {desired}" if desired and desired != driver else driver


def _cells(gpu: Document, page: Page) -> tuple[str, ...]:
    node, limit = number(gpu, "numa_node"), number(gpu, "power_limit")
    return (
        clip(text(gpu, "group") or NOT_OURS, 200 if page.wide else 14),
        clip(_driver(gpu), 200 if page.wide else 24),
        clip(text(gpu, "iommu"), 200 if page.wide else 10),
        "?" if node is None else f"{node:g}",
        "" if limit is None else f"{limit:g} W",
        text(gpu, "note"),
    )


def _narrow_table(folded: dict[tuple[str, ...], list[str]], page: Page) -> list[str]:
    heads = ("GPUs", "driver", "IOMMU", "NUMA", "limit")
    fixed = [max(len(h), *(len(row[i]) for row in folded)) for i, h in enumerate(heads)]
    longest = max(len(a) for addresses in folded.values() for a in addresses)
    each = max(1, (page.width - sum(fixed) - 2 * len(heads) + 1) // (longest + 1))
    body: list[tuple[str, ...]] = [("GPUs", "address", *heads[1:])]
    after: list[list[str]] = [[]]
    for row, addresses in folded.items():
        lines = [" ".join(addresses[i : i + each]) for i in range(0, len(addresses), each)]
        body += [(row[0], lines[0], *row[1:5]), *(("", line, "", "", "", "") for line in lines[1:])]
        after += [[] for _ in lines]
        after[-1] = page.labelled("", f"note: {row[5]}", page.style.bad) if row[5] else []
    return _painted(body, after, page)


def _wide_table(gpus: list[Document], page: Page) -> list[str]:
    body: list[tuple[str, ...]] = [("GPUs", "address", "driver", "IOMMU", "NUMA", "limit", "uuid", "name")]
    after: list[list[str]] = [[]]
    for gpu in gpus:
        row = _cells(gpu, page)
        body.append((row[0], text(gpu, "address"), *row[1:5], text(gpu, "uuid"), text(gpu, "name")))
        after.append(page.labelled("", f"note: {row[5]}", page.style.bad) if row[5] else [])
    return _painted(body, after, page)


def _painted(body: list[tuple[str, ...]], after: list[list[str]], page: Page) -> list[str]:
    lines = table(body, left=frozenset(range(len(body[0]))))
    painted = [page.style.strong(lines[0])]
    for line, row, notes in zip(lines[1:], body[1:], after[1:], strict=True):
        moving = " -> " in row[2]
        painted += [page.style.unsure(line) if moving else line, *notes]
    return painted


def p2p_lines(document: Document, page: Page) -> list[str]:
    lines = []
    for verdict in rows(document, "p2p"):
        result = text(verdict, "verdict")
        tested = number(verdict, "tested_at")
        told = f"{result.upper()} ({_whose(verdict, document)}): {text(verdict, 'summary')}"
        told += f", tested {page.ago(tested)}" if tested else ""
        paint: Paint = {
            "good": page.style.good, "unknown": page.style.unsure, "not run": page.style.unsure,
        }.get(result, page.style.bad)  # fmt: skip
        lines += page.labelled("P2P", told, paint)
        if explanation := text(verdict, "explanation"):
            lines += page.labelled("", f"likely cause: {explanation}", limit=CAUSE_LINES)
        lines += _pairs(verdict) if page.wide else []
    return lines


def _whose(verdict: Document, document: Document) -> str:
    """The group whose GPUs these are; the addresses where they are no one group's."""
    tested = words(verdict, "gpus")
    groups = {text(g, "group") for g in rows(document, "gpus") if text(g, "address") in tested}
    return groups.pop() if len(groups) == 1 and "" not in groups else " ".join(tested)


def _pairs(verdict: Document) -> list[str]:
    pairs = verdict.get("bad_pairs")
    named = [words({"pair": pair}, "pair") for pair in pairs] if isinstance(pairs, list) else []
    return [f"{' ' * LABEL}bad: {' -> '.join(name)}" for name in named]
