"""A spec file's text to a spec, or to every problem in it, each with line and column."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pydantic import ValidationError

from agent.core.errors import SpecError
from agent.core.problem import Mark, Path, Problem, say_path
from agent.core.spec import GpuHost, Spec
from agent.core.spec_checks import cross_check
from agent.core.spec_words import rewrite
from agent.core.yaml12 import Document, parse


@dataclass(frozen=True, slots=True)
class LoadedSpec:
    """An accepted spec.

    ``digest`` is the SHA-256 of its canonical content: comments, layout, order of keys and values equal to
    their defaults do not change it. ``positions`` maps a dotted path (``spec.services.qwen.args.port``,
    ``spec.gpus.inference.select[0]``) to line and column.
    """

    spec: GpuHost
    digest: str
    positions: Mapping[str, Mark]


def load(text: str, origin: str) -> LoadedSpec:
    """Read a spec. ``origin`` names the file in messages.

    Raises SpecError with every problem found, as ``file:line:column: path: found ..., expected ...``, sorted by
    position. No message repeats a value that looks like a secret.
    """
    document = parse(text, _whole_number_keys)
    if document.value is None and document.problems:
        raise _error(document.problems, document, origin)
    found: list[Problem] = [*document.problems]
    host: GpuHost | None = None
    try:
        host = GpuHost.model_validate_json(
            json.dumps(document.value), strict=True, by_alias=True, by_name=False
        )
        found += cross_check(host.spec)
    except ValidationError as error:
        raw = document.value
        problems = rewrite(error.errors(include_url=False, include_input=False), raw)
        damaged = _Places(document.damaged)
        found += [p for p in problems if not damaged.cover(p.path)]
        found += _check_what_holds(document, problems)
    if found or host is None:
        raise _error(found, document, origin)
    positions = {say_path(path): document.where(path) for path in document.values}
    return LoadedSpec(host, digest(host), MappingProxyType(positions))


def digest(host: GpuHost) -> str:
    """SHA-256 of a spec's content, in hex."""
    content = host.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _whole_number_keys(path: Path) -> bool:
    return len(path) == 5 and path[:2] == ("spec", "services") and path[3:] == ("gate", "require")


def _check_what_holds(document: Document, problems: list[Problem]) -> list[Problem]:
    """Cross-field problems of a spec that has errors: what is wrong is left out, the rest checked as usual.

    A judgement that rests on something left out is not made.
    """
    raw = json.loads(json.dumps(document.value))
    body = raw.get("spec") if isinstance(raw, dict) else None
    left_out: list[Path] = [*document.damaged, *_prune(body, problems)]
    for _ in range(_MOST_ROUNDS):
        try:
            spec = Spec.model_validate_json(json.dumps(body), strict=True, by_alias=True, by_name=False)
        except ValidationError as error:
            more = rewrite(error.errors(include_url=False, include_input=False), body)
            rooted = [Problem(("spec", *p.path), p.text) for p in more]
            pruned = _prune(body, rooted)
            if not pruned:
                return []
            left_out += pruned
        else:
            wrong = _Places(left_out)
            return [p for p in cross_check(spec) if not any(wrong.touch(used) for used in (p.path, *p.uses))]
    return []


_MOST_ROUNDS = 20  # each round leaves out at least one level more; a spec has at most eight


_STAND_IN_GPU = "ffff:ff:1f.0"
_STAND_INS: Mapping[str, object] = {
    "runtime": "sglang",
    "unit": "stand-in.service",
    "gpus": "stand-in",
    "driver": "nvidia",
    "select": [_STAND_IN_GPU],
}


def _prune(body: object, problems: list[Problem]) -> list[Path]:
    """Take what is wrong out of the body of a spec, or put a stand-in where something must be; returns what went."""
    gone = []
    for problem in problems:
        if problem.path[:1] == ("spec",):
            path = problem.path
            while len(path) > 1 and not _take_out(body, path):
                path = path[:-1]
            gone += [path] if len(path) > 1 else []
    return gone


def _take_out(body: object, path: Path) -> bool:
    """False where only the whole that this is part of can go: an item would shift the others, a key is missing."""
    parent = _at(body, path[1:-1])
    last = path[-1]
    if isinstance(parent, list) and isinstance(last, int) and path[-2] == "select" and last < len(parent):
        parent[last] = _STAND_IN_GPU
        return True
    if not isinstance(parent, dict) or not isinstance(last, str):
        return False
    if len(path) == _DEPTH_OF_FIELDS and last in _STAND_INS:
        parent[last] = _STAND_INS[last]
        return True
    return parent.pop(last, _NOTHING) is not _NOTHING


_NOTHING = object()
_DEPTH_OF_FIELDS = 4  # spec.services.NAME.unit


def _at(value: object, path: Path) -> object:
    for step in path:
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            return None
    return value


class _Places:
    """Paths, asked for what lies at or below them, or above; the cost does not grow with their number."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = frozenset(paths)
        self._above = frozenset(path[:length] for path in self._paths for length in range(len(path)))

    def cover(self, path: Path) -> bool:
        return any(path[:length] in self._paths for length in range(len(path) + 1))

    def touch(self, path: Path) -> bool:
        return path in self._above or self.cover(path)


def _error(problems: list[Problem] | tuple[Problem, ...], document: Document, origin: str) -> SpecError:
    lines = set()
    for problem in problems:
        line, column = problem.mark or document.where(problem.path, at_key=problem.at_key)
        lines.add((line, column, f"{origin}:{line}:{column}: {say_path(problem.path)}: {problem.text}"))
    return SpecError(tuple(text for _, _, text in sorted(lines)))
