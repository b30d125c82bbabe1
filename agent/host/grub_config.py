"""What GRUB will hand to the kernel: the default entry of grub.cfg, and the settings that grub-mkconfig makes it of.

Both are scripts. Only the forms that grub-mkconfig and people really write are understood; for anything else the
answer is Unknown. Source: GNU GRUB manual, "Simple configuration handling" and "The configuration file format".
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from agent.core.boot import GRUB_DROP_IN, split_cmdline
from agent.core.boot_edit import read_drop_in, with_wishes
from agent.core.fact import Fact, Known, Unknown

VARIABLES = ("GRUB_CMDLINE_LINUX", "GRUB_CMDLINE_LINUX_DEFAULT")
_ASSIGNMENT = re.compile(r"""^\s*(?:export\s+)?(GRUB_CMDLINE_LINUX(?:_DEFAULT)?)(\+?)=(.*)$""")
_VALUE = re.compile(r"""(?:"((?:[^"\\`]|\\.)*)"|'([^']*)'|([^\s"'`;#$\\()]*))\s*(?:#.*)?""")
_EXPANSION = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


# -- /etc/default/grub --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Settings:
    """The two variables as they stand after some files, and the words that each file has in its own text."""

    values: dict[str, str] = field(default_factory=lambda: dict.fromkeys(VARIABLES, ""))
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(word for name in VARIABLES for word in split_cmdline(self.values[name]))


def settings_of(files: Iterable[tuple[str, str]]) -> Fact[Settings]:
    """The variables after these files (path, text) in the order in which GRUB's scripts read them."""
    found = Settings()
    for path, text in files:
        if path == GRUB_DROP_IN:
            wishes = read_drop_in(text)
            if wishes is None:
                return Unknown(f"{path} is not as the agent wrote it", "Unparsable")
            drop = [w for w in wishes if not w.present]
            found.values["GRUB_CMDLINE_LINUX"] = " ".join(
                with_wishes(split_cmdline(found.values["GRUB_CMDLINE_LINUX"]), wishes)
            )
            default = split_cmdline(found.values["GRUB_CMDLINE_LINUX_DEFAULT"])
            found.values["GRUB_CMDLINE_LINUX_DEFAULT"] = " ".join(with_wishes(default, drop))
            continue
        problem = _read_into(found, path, text)
        if problem:
            return Unknown(problem, "Unparsable")
    return Known(found)


def _read_into(found: Settings, path: str, text: str) -> str:
    """Add one file's assignments; what could not be made sense of, in words."""
    own: list[str] = []
    for number, line in enumerate(text.replace("\\\n", "").splitlines(), 1):
        if line.lstrip().startswith("#") or "GRUB_CMDLINE_LINUX" not in line:
            continue
        if re.match(r"\s*(?:export\s+)?GRUB_CMDLINE_LINUX_(?!DEFAULT\b)\w+", line):
            continue  # of the recovery entries or of Xen's
        value = _value(line, found.values)
        assignment = _ASSIGNMENT.match(line)
        if assignment is None or value is None:
            return f"line {number} of {path} sets the kernel command line in a way that only a shell can tell"
        name, plus = assignment[1], assignment[2]
        before = found.values[name]
        found.values[name] = before + value if plus else value
        own += split_cmdline(_EXPANSION.sub(" ", assignment[3].strip().strip("\"'")))
    found.sources[path] = tuple(own)
    return ""


def _value(line: str, values: dict[str, str]) -> str | None:
    assignment = _ASSIGNMENT.match(line)
    match = _VALUE.fullmatch(assignment[3].strip()) if assignment else None
    if match is None:
        return None
    if match[2] is not None:
        return match[2]
    raw = match[1] if match[1] is not None else match[3]
    names = {a or b for a, b in _EXPANSION.findall(raw)}
    if not names <= set(VARIABLES) or "$(" in raw:
        return None
    expanded = _EXPANSION.sub(lambda m: values[m[1] or m[2]], raw)
    return re.sub(r'\\(["$\\`])', r"\1", expanded)


# -- grub.cfg -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Entry:
    """A menu entry or a submenu."""

    title: str
    ident: str
    children: "list[Entry]" = field(default_factory=list)
    linux: str | None = None
    menu: bool = False


_ENTRY = re.compile(r"^\s*(menuentry|submenu)\s+(?:'([^']*)'|\"([^\"]*)\")(.*)\{\s*$")
_IDENT = re.compile(r"(?:\$menuentry_id_option|--id)\s+(?:'([^']*)'|\"([^\"]*)\"|(\S+))")
_LINUX = re.compile(r"^\s*linux(?:16|efi)?\s+\S+\s*(.*)$")
_DEFAULT = re.compile(r'^\s*set\s+default="?([^"]*)"?\s*$')


def default_cmdline(config: str, environment: str) -> Fact[tuple[str, ...]]:
    """The words after the kernel's path in the entry that the next boot takes. ``environment`` is grubenv's text."""
    if re.search(r"^\s*blscfg\b", config, re.MULTILINE):
        return Unknown("GRUB takes its entries from loader files here (blscfg)", "NotSupported")
    entries = _entries(config)
    saved = dict(line.split("=", 1) for line in environment.splitlines() if re.match(r"\w+=", line))
    chosen = saved.get("next_entry") or _default(config, saved)
    if chosen is None:
        return Unknown("grub.cfg sets its default entry in a way that cannot be read", "Unparsable")
    entry = _find(entries, chosen or "0")
    while entry is not None and entry.menu:
        entry = entry.children[0] if entry.children else None
    if entry is None or entry.linux is None:
        return Unknown(f"grub.cfg has no Linux entry {chosen or '0'!r}", "Unparsable")
    if "$" in entry.linux:
        return Unknown("the default entry of grub.cfg has variables on its kernel command line", "Unparsable")
    return Known(split_cmdline(entry.linux))


def _default(config: str, saved: dict[str, str]) -> str | None:
    """grub-mkconfig writes ``set default="${next_entry}"`` for one boot, and then what stands for all others."""
    values = [m[1] for line in config.splitlines() if (m := _DEFAULT.match(line))]
    values = [v for v in values if "next_entry" not in v]
    if not values:
        return "0"
    if values[-1] == "${saved_entry}":
        return saved.get("saved_entry", "0")
    return None if "$" in values[-1] else values[-1]


def _entries(config: str) -> list[Entry]:
    root = Entry("", "", menu=True)
    stack: list[Entry] = [root]
    depths: list[int] = []
    depth = 0
    for line in config.splitlines():
        if match := _ENTRY.match(line):
            ident = _IDENT.search(match[4])
            title = match[2] if match[2] is not None else match[3]
            named = next((g for g in ident.groups() if g is not None), "") if ident else ""
            entry = Entry(title, named, menu=match[1] == "submenu")
            stack[-1].children.append(entry)
            stack.append(entry)
            depths.append(depth)
            depth += 1
        elif line.strip() == "}" and depths:
            depth -= 1
            if depth == depths[-1]:
                depths.pop()
                stack.pop()
        elif depths and line.rstrip().endswith("{"):
            depth += 1
        elif (linux := _LINUX.match(line)) and stack[-1].linux is None and not stack[-1].menu:
            stack[-1].linux = linux[1]
    return root.children


def _find(entries: list[Entry], wanted: str) -> Entry | None:
    """By number, title or id; ``>`` goes into submenus. A title may hold ``>`` itself."""
    for entry in _flat(entries):
        if wanted in {entry.title, entry.ident} and wanted:
            return entry
    here = entries
    found: Entry | None = None
    for step in wanted.split(">"):
        if step.isdecimal():
            found = here[int(step)] if int(step) < len(here) else None
        else:
            found = next((e for e in here if step in {e.title, e.ident}), None)
        if found is None:
            return None
        here = found.children
    return found


def _flat(entries: list[Entry]) -> Iterator[Entry]:
    for entry in entries:
        yield entry
        yield from _flat(entry.children)
