"""The status on one screen: what runs, how fast, and why like this. For people; ``-o json`` is for programs.

Nothing here, nor in what it imports, brings pydantic, asyncio or yaml: ``agent status`` must be instant, also on
a host in trouble.
"""

import json

from agent.app.status_file import (
    Document,
    StatusError,
    is_alive,
    number,
    read_status,
    rows,
    section,
    text,
    words,
)  # fmt: skip
from agent.app.status_host import condition_lines, gpu_lines, p2p_lines, plan_lines
from agent.app.status_page import Page, Paint, span
from agent.app.status_service import service_lines
from agent.app.terminal import Style, cells, clip, escape, wrap

__all__ = [
    "StatusError", "exit_code", "is_alive", "read_status", "render_json", "render_status", "render_yaml",
]  # fmt: skip

READY, NOT_READY, UNKNOWN = 0, 3, 4
SKEW = 5.0  # seconds by which a fresh status may be ahead of the reader's clock
NARROW = 100  # columns that a page of one screen fills at most
LEAST = 40
MOST_PROBLEMS = 3


def render_status(document: Document, *, wide: bool, color: bool, now: float, alive: bool, width: int) -> str:
    """The page, without a last line feed. ``alive``: a daemon keeps the document true; ``width`` in columns."""
    columns = max(LEAST, width if wide else min(width, NARROW))
    page = Page(Style(on=color), columns, wide, now)
    lines = _warnings(document, page, alive)
    lines += _header(document, page, alive)
    lines += plan_lines(document, page)
    lines += condition_lines(document, page)
    lines += ["", *gpu_lines(document, page), *p2p_lines(document, page)]
    lines += service_lines(document, page)
    lines += ["", *_footer(document, page)]
    return "\n".join(line.rstrip() for line in lines)


def exit_code(document: Document, now: float, *, alive: bool = True) -> int:
    """0 Ready; 3 not Ready; 4 unknown, or too old to be believed."""
    if _staleness(document, now) or not alive:
        return UNKNOWN
    return {"True": READY, "False": NOT_READY}.get(text(document, "ready"), UNKNOWN)


def render_json(document: Document) -> str:
    """The document as it is. All that is not plain ASCII is escaped, so a terminal stays safe."""
    return json.dumps(document, indent=2).replace("\x7f", "\\u007f")


def render_yaml(document: Document) -> str:
    import yaml

    return str(yaml.safe_dump(dict(document), sort_keys=False, width=100)).rstrip("\n")


def _staleness(document: Document, now: float) -> str:
    """Why the document's age forbids believing it; "" when it does not."""
    published, after = number(document, "published_at"), number(document, "stale_after")
    if published is None or after is None:
        return "of unknown age"
    age = now - published
    if age < -SKEW:
        return f"dated {span(-age)} in the future, so the clock was set"
    return f"{span(age)} old" if age > after else ""


def _warnings(document: Document, page: Page, alive: bool) -> list[str]:
    """What must be read before anything else: too old, nobody watching, not real."""
    lines = []
    stale = _staleness(document, page.now)
    if stale and alive:
        lines.append(f"STALE: {stale}; the agent runs and does not publish: journalctl -u gpu-host-agent")
    elif stale:
        lines.append(f"STALE: {stale}; the agent is not running. What follows was true then.")
    elif not alive:
        lines.append("NOT WATCHED: the agent is not running. What follows was true when it stopped.")
    painted = [page.style.bad(part) for line in lines for part in _plain(line, page)]
    if profile := text(section(document, "host"), "simulated"):
        banner = f"*** SIMULATED (profile {profile}): no device, speed or token here is real ***"
        painted += [page.style.banner(part) for part in _plain(banner, page)]
    return painted


def _plain(line: str, page: Page) -> list[str]:
    return wrap(line, page.width, 3)


def _header(document: Document, page: Page, alive: bool) -> list[str]:
    host, spec = section(document, "host"), section(document, "spec")
    lines = _headline(document, page, alive)
    last = section(document, "last_pass")
    if last:
        when = f" ({text(last, 'trigger')}, {page.ago(number(last, 'started_at'))}, {text(last, 'id')}, {text(last, 'seconds')} s)"
        lines += page.labelled(
            "pass", text(last, "sentence") + (when if page.wide else ""), page.style.strong
        )
    if activity := text(document, "activity"):
        lines += page.labelled("now", activity, page.style.unsure)
    facts = (("kernel", "kernel"), ("driver", "driver"), ("iommu", "IOMMU"), ("sev_snp", "SEV-SNP"))
    known = [f"{name} {text(host, key)}" for key, name in facts if text(host, key)]
    lines += page.labelled("host", ", ".join(known)) if known else []
    return lines + _spec(spec, page)


def _headline(document: Document, page: Page, alive: bool) -> list[str]:
    host = section(document, "host")
    name = (text(host, "name") or "(no spec, no name)") + (" (SIMULATED)" if text(host, "simulated") else "")
    ready = text(document, "ready")
    known: dict[str, tuple[str, Paint]] = {
        "True": ("READY", page.style.good),
        "False": ("NOT READY", page.style.bad),
    }
    said, paint = known.get(ready, ("READY UNKNOWN", page.style.unsure))
    if exit_code(document, page.now, alive=alive) == UNKNOWN and ready in known:
        said, paint = f"READY UNKNOWN (it was {ready})", page.style.unsure
    told = f"{text(document, 'agent_version')} (pid {text(document, 'pid')}), {page.ago(number(document, 'published_at'))}"
    name = clip(name, page.width - len(said) - 2)
    line = f"{page.style.strong(name)}  {paint(said)}"
    if cells(name) + len(said) + len(told) + 10 <= page.width:
        return [f"{line}  {page.style.faint(f'agent {told}')}"]
    return [line, *page.labelled("agent", told, page.style.faint)]


def _spec(spec: Document, page: Page) -> list[str]:
    generation = number(spec, "generation") or 0
    force = f"generation {generation:g} in force" if generation else "none in force"
    if spec.get("accepted") is True:
        return page.labelled("spec", f"{force}, {text(spec, 'path')}")
    lines = page.labelled("spec", f"REJECTED: {text(spec, 'path')}; {force}", page.style.bad)
    problems = words(spec, "problems")
    for problem in problems if page.wide else problems[:MOST_PROBLEMS]:
        lines += page.labelled("", problem)
    more = len(problems) - MOST_PROBLEMS
    return lines + (
        page.labelled("", f"and {more} more: agent status -o wide") if more > 0 and not page.wide else []
    )


def _footer(document: Document, page: Page) -> list[str]:
    lines = []
    if page.wide:
        raw = section(document, "plan").get("text")
        plan = raw.rstrip("\n").split("\n") if isinstance(raw, str) else []
        lines += [escape(line) for line in plan]
        lines += ["journal", *(_record(r, page) for r in rows(document, "journal"))]
    if budget := text(document, "budget"):
        lines += page.labelled("budget", budget)
    proof = text(document, "proof") or "this status does not say"
    return lines + page.labelled("proved", proof, page.style.faint)


def _record(record: Document, page: Page) -> str:
    """One journal record. Nested values are shown as JSON, which escapes what could harm."""
    fields = [
        f"{escape(key)}={escape(value) if isinstance(value, str) else json.dumps(value)}"
        for key, value in record.items()
        if key not in {"at", "event"}
    ]
    return f"  {page.ago(number(record, 'at')):>12}  {text(record, 'event')}  {' '.join(fields)}"
