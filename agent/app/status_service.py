"""A service's part of the status: what runs, with which flags, why, and how fast."""

import shlex

from agent.app.status_bench import benchmark_lines
from agent.app.status_file import Document, number, rows, section, text, words
from agent.app.status_page import LABEL, Page, Paint
from agent.app.terminal import cells, clip, escape, pad

FLAG_LINES = 12  # on a narrow page
FLAG_WIDTH = 200  # one flag with its value, on a narrow page


def service_lines(document: Document, page: Page) -> list[str]:
    lines = []
    for service in rows(document, "services"):
        lines += ["", *_title(service, page)]
        lines += page.labelled("revision", _revision(service, page), _paint_revision(service, page))
        lines += _p2p(service, document, page)
        lines += _flags(service, page)
        lines += _decided(service, page)
        lines += benchmark_lines(service, page)
        lines += _trial(service, page)
    return lines


def _title(service: Document, page: Page) -> list[str]:
    name, state, health = text(service, "name"), text(service, "state"), text(service, "health")
    paint = page.style.good if (state, health) == ("active", "ok") else page.style.bad
    where = f"{text(service, 'unit')}@{text(service, 'target')}  {state}, health: {health or 'unknown'}"
    if cells(name) < LABEL:
        first, *rest = page.labelled(name, where, paint)
        return [page.style.strong(first[: len(name)]) + first[len(name) :], *rest]
    return [page.style.strong(clip(name, page.width)), *page.labelled("", where, paint)]


def _on_trial(service: Document) -> bool:
    trial = section(service, "trial")
    return text(trial, "outcome") == "running" and text(trial, "revision") == text(service, "revision")


def _revision(service: Document, page: Page) -> str:
    running, promoted = text(service, "revision"), text(service, "promoted")
    trial = section(service, "trial")
    good = f"; the promoted one is {promoted}" if promoted else "; none was ever promoted"
    if not running:
        return f"none of the agent's is known to run{good}"
    if _on_trial(service):
        return f"{running} ON TRIAL, not proved yet{good if promoted != running else ''}"
    if running != promoted:
        return f"{running} NOT PROMOTED{good}"
    if text(trial, "outcome") == "rolled-back" and text(trial, "restored") == running:
        return f"{running} promoted, and back since {text(trial, 'revision')} was ROLLED BACK"
    measured = number(service, "measured_at")
    return f"{running} promoted" + (f" {page.ago(measured)}" if measured else "")


def _paint_revision(service: Document, page: Page) -> Paint:
    if text(service, "revision") != text(service, "promoted") or _on_trial(service):
        return page.style.unsure
    return str if text(service, "revision") else page.style.bad


def _p2p(service: Document, document: Document, page: Page) -> list[str]:
    reason = text(service, "p2p_reason")
    if not page.wide:
        for verdict in rows(document, "p2p"):
            # The explanation stands under P2P already.
            reason = reason.removesuffix(f" ({text(verdict, 'explanation')})")
    return page.labelled(
        "p2p", f"{text(service, 'p2p').upper() or 'UNKNOWN'} because {reason or 'of nothing on record'}"
    )


def _flags(service: Document, page: Page) -> list[str]:
    """Every flag with its value, as a shell would take it; a flag is never broken."""
    argv = words(service, "argv")
    if not argv:
        return page.labelled("flags", "not known", page.style.unsure)
    head, rest = (argv[:3], argv[3:]) if argv[1:2] == ["-m"] else (argv[:1], argv[1:])
    flags = _grouped(rest)
    if not page.wide:
        flags = [clip(flag, FLAG_WIDTH) for flag in flags]
    lines = _packed(flags, page.width - LABEL)
    label = "flags" if text(service, "revision") else "would run"
    if not page.wide and len(lines) > FLAG_LINES:
        lines = [*lines[: FLAG_LINES - 1], "... all of them: agent status -o wide"]
    told = page.labelled("command", " ".join(head)) if page.wide else []
    first = [pad(label, LABEL) + line for line in lines[:1]]
    return told + first + [" " * LABEL + line for line in lines[1:]]


def _grouped(argv: list[str]) -> list[str]:
    """Each flag together with the values that follow it."""
    flags: list[list[str]] = []
    for word in argv:
        if flags and not word.startswith("--"):
            flags[-1].append(shlex.quote(word))
        else:
            flags.append([shlex.quote(word)])
    return [" ".join(flag) for flag in flags]


def _packed(items: list[str], columns: int) -> list[str]:
    lines: list[str] = []
    for item in items:
        if lines and cells(lines[-1]) + 1 + cells(item) <= columns:
            lines[-1] += f" {item}"
        else:
            lines.append(item)
    return lines


def _decided(service: Document, page: Page) -> list[str]:
    """What the spec does not say by itself, and why it is so; in wide, where every single value comes from."""
    why = section(service, "why")
    if page.wide:
        return _every_origin(service, page)
    found: dict[str, list[str]] = {}
    for key in sorted(why):
        origin = section(why, key)
        if text(origin, "source") != "spec":
            item = clip(_setting(key, text(origin, "value")), page.width - LABEL)
            found.setdefault(_because(origin, service), []).append(item)
    lines: list[str] = []
    for reason, items in found.items():
        lines += page.labelled(
            "" if lines else "decided", f"{' '.join(items)} ({reason or 'no reason is on record'})"
        )
    return lines


def _every_origin(service: Document, page: Page) -> list[str]:
    why, env = section(service, "why"), section(service, "env")
    lines: list[str] = []
    for key in sorted(why):
        origin = section(why, key)
        told = f"{_setting(key, text(origin, 'value'))}  ({text(origin, 'source')}: {text(origin, 'reason')})"
        lines += page.labelled("" if lines else "settings", told)
    for name in sorted(env):
        if f"env.{name}" not in why:
            told = f"{escape(name)}={text(env, name)}  (no reason is on record)"
            lines += page.labelled("" if lines else "settings", told)
    return lines


def _setting(key: str, value: str) -> str:
    area, _, name = escape(key).partition(".")
    if area == "args":
        return f"--{name}" if value == "true" else f"--{name} {value}"
    return f"{name}={value}" if area == "env" else f"{escape(key)}={value}"


def _because(origin: Document, service: Document) -> str:
    reason = text(origin, "reason")
    return f"P2P is {text(service, 'p2p')}" if reason and reason == text(service, "p2p_reason") else reason


def _trial(service: Document, page: Page) -> list[str]:
    trial = section(service, "trial")
    if not trial:
        return []
    outcome, revision = text(trial, "outcome"), text(trial, "revision") or "no revision"
    attempt = f", attempt {text(trial, 'attempt')}" if (number(trial, "attempt") or 1) > 1 else ""
    if outcome == "running":
        told = f"{revision} in phase {text(trial, 'phase')}{attempt}, begun {page.ago(number(trial, 'started_at'))}"
        return page.labelled("on trial", told, page.style.unsure)
    when = page.ago(number(trial, "finished_at"))
    if outcome == "promoted":
        told = f"{revision} promoted {when}{attempt}: {text(trial, 'message') or 'all was proved'}"
        return page.labelled("last trial", told, page.style.good)
    told = f"{revision} {outcome.upper()} {when}{attempt}: {text(trial, 'reason')}: {text(trial, 'message')}"
    return page.labelled("last trial", told, page.style.bad)
