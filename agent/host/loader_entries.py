"""Entries of the boot loader specification, as systemd-boot reads them (loader.conf(5), systemd-boot(7)).

Source: The UAPI Group, Boot Loader Specification.
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from agent.core.boot import split_cmdline
from agent.core.fact import Fact, Known, Unknown, value_or
from agent.host.reading import names_in, read_text

_VENDOR = "4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"


@dataclass(frozen=True, slots=True)
class LoaderEntry:
    path: Path
    words: tuple[str, ...]
    sort_key: str
    version: str

    @property
    def ident(self) -> str:
        return self.path.name


def entries_in(esp: Path) -> Fact[tuple[LoaderEntry, ...]]:
    """Every Linux entry under loader/entries. Raises OSError where the folder cannot be read."""
    if any(name.lower().endswith(".efi") for name in names_in(esp / "EFI/Linux")):
        return Unknown(
            f"{esp}/EFI/Linux has unified kernel images, which carry their own command line", "NotSupported"
        )
    found = []
    for name in names_in(esp / "loader/entries"):
        if not name.endswith(".conf"):
            continue
        text = read_text(esp / "loader/entries" / name)
        if isinstance(text, Unknown):
            return text
        keys = _keys(value_or(text, ""))
        if "linux" in keys:
            words = split_cmdline(" ".join(keys.get("options", ())))
            first = {k: v[0] for k, v in keys.items()}
            path = esp / "loader/entries" / name
            found.append(LoaderEntry(path, words, first.get("sort-key", ""), first.get("version", "")))
    return Known(tuple(found))


def _keys(text: str) -> dict[str, list[str]]:
    keys: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.strip().partition(" ")
        if key and not key.startswith("#"):
            keys.setdefault(key, []).append(value.strip())
    return keys


def default_entry(root: Path, esp: Path, entries: tuple[LoaderEntry, ...]) -> Fact[LoaderEntry]:
    """The entry that the next boot takes: one-shot, then the firmware variable, then loader.conf, then the newest."""
    for variable in (f"LoaderEntryOneShot-{_VENDOR}", f"LoaderEntryDefault-{_VENDOR}"):
        chosen = _variable(root, variable)
        if isinstance(chosen, Unknown):
            return chosen
        matching = [e for e in entries if e.ident == value_or(chosen, "")]
        if matching:
            return Known(matching[0])
    config = read_text(esp / "loader/loader.conf")
    if isinstance(config, Unknown):
        return config
    pattern = _keys(value_or(config, "")).get("default", ["*"])[-1]
    if pattern.startswith("@"):
        return Unknown(
            f"loader.conf has default {pattern}: the last choice is the firmware's", "NotSupported"
        )
    fitting = [e for e in entries if fnmatchcase(e.ident, pattern) or e.ident == f"{pattern}.conf"] or list(
        entries
    )
    if len({e.words for e in fitting}) == 1:
        return Known(fitting[0])
    if len({e.sort_key for e in fitting}) != 1:
        return Unknown(
            "the loader entries differ, and which one is the default cannot be told", "NotSupported"
        )
    return Known(max(fitting, key=lambda e: _numbers(e.version or e.ident)))


def _numbers(version: str) -> list[tuple[int, int | str]]:
    """6.14.11-4-pve in parts that compare as people count: 10 after 9."""
    return [(1, int(p)) if p.isdecimal() else (0, p) for p in re.findall(r"\d+|[a-z]+", version.lower())]


def _variable(root: Path, name: str) -> Fact[str]:
    """A firmware variable of systemd-boot: four bytes of attributes, then UTF-16."""
    path = root / f"sys/firmware/efi/efivars/{name}"
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return Known("")
    except OSError as error:
        return Unknown(f"{path}: {error.strerror}", "Unreadable")
    return Known(raw[4:].decode("utf-16-le", errors="replace").rstrip("\0"))
