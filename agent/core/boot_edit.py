"""The edits of boot files: GRUB's drop-in and the one line of /etc/kernel/cmdline, and what no edit may do.

A word that the machine needs to find its root is never taken away, and neither is one that only a very wide pattern
hits by chance. Sources: Documentation/admin-guide/kernel-parameters.txt, bootparam(7), dracut.cmdline(7),
systemd-gpt-auto-generator(8), Proxmox VE administration guide (ZFS on root: root=ZFS= boot=zfs).
"""

import re
from collections.abc import Iterable
from functools import cache

from agent.core.boot import WORD, Wish, spelled, split_cmdline

_SAFE = re.compile(r"[A-Za-z0-9_.,:/=+@%*?-]+")
# What finds and mounts the root, and what runs from it: as globs over words spelled with underscores.
_NEEDED = (
    "root=*", "rootflags=*", "rootfstype=*", "rootdelay=*", "rootwait*", "ro", "rw", "boot=*", "init=*", "rdinit=*",
    "initrd=*", "BOOT_IMAGE=*", "zfs=*", "cryptdevice=*", "cryptkey=*", "cryptopts=*", "luks=*", "luks.*", "rd.*",
    "resume=*", "resume_offset=*", "nfsroot=*", "ip=*", "mount.usr*", "__",
)  # fmt: skip
# A machine without these boots, and may be out of reach: without its console, or with its network under other names.
_BY_NAME = {
    "console=*": "console=",
    "net.ifnames=*": "net.ifnames=",
    "biosdevname=*": "biosdevname=",
    "systemd.*": "systemd.",
}

_HEAD = "# Written by gpu-host-agent from the spec; edits here are drift and will be taken back.\n"
_DROP_IN = """\
# GRUB's own scripts read this after /etc/default/grub: it takes words away from the kernel command line and adds some.
gpu_host_agent_add='{add}'
gpu_host_agent_drop='{drop}' # the words to drop
gpu_host_agent_kept() {{
  set -f
  for word in $1; do
    for pattern in $gpu_host_agent_drop; do
      case $word in $pattern) continue 2 ;; esac
    done
    printf '%s ' "$word"
  done
}}
GRUB_CMDLINE_LINUX="$(gpu_host_agent_kept "$GRUB_CMDLINE_LINUX")$gpu_host_agent_add"
GRUB_CMDLINE_LINUX_DEFAULT="$(gpu_host_agent_kept "$GRUB_CMDLINE_LINUX_DEFAULT")"
"""


def unsafe(wishes: Iterable[Wish]) -> list[str]:
    """Arguments that do not go into a boot file: GRUB's file is a shell script that root runs."""
    return [w.argument for w in wishes if not _SAFE.fullmatch(w.argument)]


def dangerous(wishes: Iterable[Wish]) -> list[tuple[str, str]]:
    """Patterns that an edit must not carry out, each with the word it would hit that the next boot may need."""
    return [(w.argument, hit) for w in wishes if not w.present and (hit := endangered(w.argument))]


def endangered(pattern: str) -> str:
    """The first word, as a glob, that ``pattern`` could take away and must not; "" for none."""
    wide = re.sub(
        r"\[!?.[^]]*\]", "?", spelled(pattern)
    )  # a set of characters counts as any: one refusal too many
    needed = [word for word in _NEEDED if _meet(wide, word)]
    named = [word for word, name in _BY_NAME.items() if not wide.startswith(name) and _meet(wide, word)]
    return next(iter(needed + named), "")


@cache
def _meet(one: str, other: str) -> bool:
    """Whether some word matches both globs."""
    if not one or not other:
        return not (one + other).strip("*")
    if one[0] == "*":
        return _meet(one[1:], other) or _meet(one, other[1:])
    if other[0] == "*":
        return _meet(other, one)
    return (one[0] == other[0] or "?" in (one[0], other[0])) and _meet(one[1:], other[1:])


def grub_drop_in(wishes: Iterable[Wish]) -> str:
    """The agent's file in /etc/default/grub.d; "" when nothing is wished for. Call ``unsafe`` first."""
    known = tuple(wishes)
    add = [w.argument for w in known if w.present]
    drop = [s for w in known if not w.present for s in _spellings(w.argument)]
    return _HEAD + _DROP_IN.format(add=" ".join(add), drop=" ".join(drop)) if add or drop else ""


def _spellings(pattern: str) -> list[str]:
    name, equals, value = pattern.partition("=")
    return list(
        dict.fromkeys([pattern, *(name.replace(old, new) + equals + value for old, new in ("-_", "_-"))])
    )


def read_drop_in(text: str) -> tuple[Wish, ...] | None:
    """The wishes in a drop-in that ``grub_drop_in`` wrote; None for any other text."""
    add = re.search(r"^gpu_host_agent_add='([^']*)'$", text, re.MULTILINE)
    drop = re.search(r"^gpu_host_agent_drop='([^']*)' #", text, re.MULTILINE)
    if add is None or drop is None:
        return None
    wishes = (
        *(Wish(a, present=True) for a in add[1].split()),
        *(Wish(p, present=False) for p in drop[1].split()),
    )
    same = _HEAD + _DROP_IN.format(add=add[1], drop=drop[1]) == text
    return wishes if same else None


def with_wishes(words: Iterable[str], wishes: Iterable[Wish]) -> tuple[str, ...]:
    """These words without the unwanted and with the missing ones: what either edit makes of them."""
    known = tuple(wishes)
    kept = [x for x in words if not any(w.found([x]) for w in known if not w.present)]
    missing = [w.argument for w in known if w.present and not w.met(kept)]
    return (*kept, *missing)


def edited_cmdline(text: str, wishes: Iterable[Wish]) -> str:
    """/etc/kernel/cmdline with only the words changed that must be; quoted words and comments stay as they are.

    Call ``unusable_cmdline`` first.
    """
    lines = text.splitlines(keepends=True)
    return "".join(_edited_line(x, wishes) if _says_something(x) else x for x in lines)


def unusable_cmdline(text: str) -> str:
    """Why this is no text to edit; "" where it is: one line, comments aside, with the root in it."""
    lines = [x for x in text.splitlines() if _says_something(x)]
    if len(lines) != 1:
        return f"it has {len(lines)} lines besides comments, and the boot loader takes exactly one"
    if not any(word.startswith("root=") for word in split_cmdline(lines[0])):
        return "it has no root=, and a boot from it would not find its root"
    return ""


def _says_something(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _edited_line(line: str, wishes: Iterable[Wish]) -> str:
    known = tuple(wishes)
    drop = [w for w in known if not w.present]
    raw = WORD.findall(line)
    kept = [x for x in raw if not any(w.found([x.replace('"', "")]) for w in drop)]
    missing = [w.argument for w in known if w.present and not w.met(x.replace('"', "") for x in kept)]
    if kept == raw and not missing:
        return line
    return " ".join([*kept, *missing]) + "\n"
