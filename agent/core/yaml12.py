"""YAML 1.2 with the line and column of every value and key, for files that people write by hand.

PyYAML scans and parses; this module resolves scalars itself by the YAML 1.2 core schema, because PyYAML's own
loaders read ``0000:41:00.0`` as the number 2460.0 and ``off`` as false. It builds from events and without
recursion, so that no input can exhaust the stack, and it refuses what a spec never needs and what has hurt
others: duplicate keys, anchors and aliases, tags, merge keys, several documents, deep nesting, large files.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import yaml

from agent.core.problem import Mark, Path, Problem
from agent.core.yaml_words import say_yaml_error

MAX_BYTES = 64 * 1024
MAX_DEPTH = 20

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_NULLS = {"", "~", "null", "Null", "NULL"}
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_MAX_INT = 2**63 - 1
_LONGEST_INT = 25  # characters; Python refuses to read very long ones
# Control characters (tab and line feed allowed), lone surrogates, and line separators that editors do not show.
_FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\ufffe\uffff]")
_FORBIDDEN_IN_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\ufffe\uffff]")

IntKeys = Callable[[Path], bool]


@dataclass(frozen=True, slots=True)
class Document:
    """What was read. ``damaged`` are paths whose value could not be taken; nothing else is to be said of them.

    Mappings are dicts with text keys (whole-number keys as their digits), sequences are lists. ``value`` is None
    where the text as a whole could not be read.
    """

    value: object = None
    problems: tuple[Problem, ...] = ()
    keys: Mapping[Path, Mark] = field(default_factory=dict)
    values: Mapping[Path, Mark] = field(default_factory=dict)
    collections: frozenset[Path] = frozenset()
    damaged: tuple[Path, ...] = ()

    def where(self, path: Path, *, at_key: bool = False) -> Mark:
        """Line and column of a value; of the key where the value is a mapping or list, or was asked for."""
        while path and path not in self.values:
            path = path[:-1]
        if path in self.keys and (at_key or path in self.collections):
            return self.keys[path]
        return self.values.get(path, (1, 1))


def parse(text: str, int_keys: IntKeys = lambda _: False) -> Document:
    """Read one YAML document. Never raises: whatever is wrong is in ``problems``.

    ``int_keys`` says of a mapping's path whether whole numbers may be its keys.
    """
    refused = _refuse_text(text)
    if refused is not None:
        return Document(problems=(refused,))
    builder = _Builder(int_keys)
    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError as error:
        return Document(problems=(Problem((), say_yaml_error(error), mark=_mark_of(error, (1, 1))),))
    try:
        while builder.wants_more and loader.check_event():
            builder.feed(loader.get_event())  # type: ignore[no-untyped-call]
    except (yaml.YAMLError, ValueError, OverflowError, IndexError) as error:
        # PyYAML lets plain errors through for escapes and version numbers out of range.
        here = (loader.line + 1, loader.column + 1)
        problem = Problem(builder.path, say_yaml_error(error), mark=_mark_of(error, here))
        return Document(problems=(*builder.problems, problem))
    finally:
        loader.dispose()
    return builder.document()


def resolve(text: str) -> str | int | float | bool | None:
    """The value of a plain (unquoted) scalar by the YAML 1.2 core schema."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.fullmatch(text):
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text, base) if len(text) <= _LONGEST_INT else math.inf
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _refuse_text(text: str) -> Problem | None:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        found = f"found {size} bytes, expected a file of at most {MAX_BYTES // 1024} KiB"
        return Problem((), found, mark=(1, 1))
    bad = _FORBIDDEN_IN_TEXT.search(text)
    if bad is None:
        return None
    before = re.split("\r\n|\r|\n", text[: bad.start()])
    found = f"found the control character U+{ord(bad[0]):04X}, expected printable text"
    return Problem((), found, mark=(len(before), len(before[-1]) + 1))


def _mark_of(error: Exception, here: Mark) -> Mark:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return here if mark is None else (mark.line + 1, mark.column + 1)


def _start(event: yaml.Event) -> Mark:
    mark = event.start_mark
    return (1, 1) if mark is None else (mark.line + 1, mark.column + 1)


@dataclass(slots=True)
class _Frame:
    """An open mapping or list. ``key`` is the mapping key whose value comes next; None: a key comes next."""

    path: Path
    content: dict[str, object] | list[object]
    discard: bool  # read on, but keep nothing: a refused key's value
    as_key: bool  # stands where a key must be
    key: str | None = None
    key_refused: bool = False
    lines: dict[str, int] = field(default_factory=dict)  # line of every key, for duplicates

    @property
    def wants_key(self) -> bool:
        return isinstance(self.content, dict) and self.key is None


class _Builder:
    """Events in, value out; one method for each sort of event."""

    def __init__(self, int_keys: IntKeys) -> None:
        self.problems: list[Problem] = []
        self.wants_more = True
        self._int_keys = int_keys
        self._stack: list[_Frame] = []
        self._value: object = None
        self._documents = 0
        self._keys: dict[Path, Mark] = {}
        self._values: dict[Path, Mark] = {}
        self._collections: set[Path] = set()
        self._damaged: list[Path] = []

    @property
    def path(self) -> Path:
        """Where the next node stands."""
        if not self._stack:
            return ()
        top = self._stack[-1]
        if isinstance(top.content, list):
            return (*top.path, len(top.content))
        return top.path if top.key is None else (*top.path, top.key)

    def document(self) -> Document:
        if self._documents == 0:
            self.problems.append(Problem((), "found an empty file, expected a spec", mark=(1, 1)))
        return Document(
            self._value,
            tuple(self.problems),
            self._keys,
            self._values,
            frozenset(self._collections),
            tuple(self._damaged),
        )

    def feed(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                self._stop(event, "found a second document, expected one document in the file")
        elif isinstance(event, yaml.AliasEvent):
            self._refuse(event, "found an alias, expected the value itself: aliases are not read")
            self._scalar(event, None)
        elif isinstance(event, yaml.ScalarEvent):
            self._refuse_decoration(event)
            self._scalar(event, event.value if event.style is not None else resolve(event.value))
        elif isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
            self._refuse_decoration(event)
            self._open(event, {} if isinstance(event, yaml.MappingStartEvent) else [])
        elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
            self._close()

    def _refuse_decoration(self, event: yaml.NodeEvent) -> None:
        if event.anchor is not None:
            self._refuse(event, "found an anchor, expected the plain value: anchors are not read")
        tag = getattr(event, "tag", None)
        if tag is not None:
            self._refuse(event, "found a tag, expected the plain value: tags are not read")

    def _open(self, event: yaml.Event, content: dict[str, object] | list[object]) -> None:
        if len(self._stack) >= MAX_DEPTH:
            self._stop(event, f"found more than {MAX_DEPTH} levels of nesting, expected at most {MAX_DEPTH}")
            return
        as_key = bool(self._stack) and self._stack[-1].wants_key
        discard = as_key or self._discarding
        path = self.path
        if as_key:
            what = "a mapping" if isinstance(content, dict) else "a list"
            self._damaged.append(self.path)
            self._refuse(
                event, f'found {what} as a key, expected text; text that begins with "{{" or "[" needs quotes'
            )
        elif not discard:
            self._values[path] = _start(event)
            self._collections.add(path)
        self._stack.append(_Frame(path, content, discard, as_key))

    def _close(self) -> None:
        frame = self._stack.pop()
        if frame.as_key:
            self._take_key("", refused=True)
        else:
            self._put(frame.content)

    def _scalar(self, event: yaml.Event, value: object) -> None:
        if isinstance(value, str) and (bad := _FORBIDDEN.search(value)):
            self._refuse(event, f"found the control character U+{ord(bad[0]):04X}, expected printable text")
            value = None
        if isinstance(value, int | float) and not (math.isfinite(value) and abs(value) <= _MAX_INT):
            self._refuse(
                event, "found a number out of range, expected one of at most 64 bits (or text in quotes)"
            )
            value = None
        if self._stack and self._stack[-1].wants_key:
            self._key(event, value)
            return
        if not self._discarding:
            self._values[self.path] = _start(event)
        self._put(value)

    def _key(self, event: yaml.Event, value: object) -> None:
        top = self._stack[-1]
        key = str(value)
        problem = self._refuse_key(event, value, top)
        if problem:
            path = (*top.path, key) if isinstance(value, str) else top.path
            self.problems.append(Problem(path, problem, mark=_start(event)))
        elif problem is None:
            top.lines[key] = _start(event)[0]
            if not top.discard:
                self._keys[(*top.path, key)] = _start(event)
        self._take_key(key, refused=problem is not None)

    def _refuse_key(self, event: yaml.Event, value: object, top: _Frame) -> str | None:
        """Why this cannot be a key; "" where that has been said already; None where it can."""
        if not isinstance(event, yaml.ScalarEvent) or (value is None and event.value not in _NULLS):
            return ""
        if event.style is None and value == "<<":
            return "found a merge key, expected the keys themselves: merge keys are not read"
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not isinstance(value, str) and not (whole and self._int_keys(top.path)):
            return f"found {event.value or 'nothing'} as a key, expected text; put it in quotes"
        if str(value) in top.lines:
            return f"found this key again (first on line {top.lines[str(value)]}), expected it once"
        return None

    def _take_key(self, key: str, *, refused: bool) -> None:
        top = self._stack[-1]
        top.key, top.key_refused = key, refused

    def _put(self, value: object) -> None:
        if not self._stack:
            self._value = value
            return
        top = self._stack[-1]
        if isinstance(top.content, list):
            top.content.append(value)
            return
        if top.key is not None and not top.key_refused:
            top.content[top.key] = value
        top.key, top.key_refused = None, False

    @property
    def _discarding(self) -> bool:
        return bool(self._stack) and (self._stack[-1].discard or self._stack[-1].key_refused)

    def _refuse(self, event: yaml.Event, text: str) -> None:
        self.problems.append(Problem(self.path, text, mark=_start(event)))
        if self._stack and not self._discarding and not self._stack[-1].wants_key:
            self._damaged.append(self.path)

    def _stop(self, event: yaml.Event, text: str) -> None:
        self._refuse(event, text)
        self._value = None
        self._damaged.append(())
        self.wants_more = False
