"""The edits of boot files: GRUB's drop-in and the one line of /etc/kernel/cmdline, and what no edit may do.

A word that the machine needs to find its root is never taken away, and neither is one that only a very wide pattern
hits by chance. Sources: Documentation/admin-guide/kernel-parameters.txt, bootparam(7), dracut.cmdline(7),
systemd-gpt-auto-generator(8), Proxmox VE administration guide (ZFS on root: root=ZFS= boot=zfs).
"""

import re
from collections.abc import Iterable

from agent.core.boot import WORD, Wish, lines_that_count, spelled, split_cmdline

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


def _meet(one: str, other: str) -> bool:
    """Whether some word matches both globs. Not by recursion: a spec's pattern may be of any length."""
    # met[j]: the part of ``one`` after the character at hand and other[j:] have a word in common.
    met = [not other[j:].strip("*") for j in range(len(other) + 1)]
    for i in reversed(range(len(one))):
        now = [False] * len(met)
        for j in reversed(range(len(met))):
            if j == len(other):
                now[j] = one[i] == "*" and met[j]
            elif "*" in (one[i], other[j]):
                now[j] = met[j] or now[j + 1]
            else:
                now[j] = (one[i] == other[j] or "?" in (one[i], other[j])) and met[j + 1]
        met = now
    return met[0]


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
    """/etc/kernel/cmdline with only the words changed that must be; quoted words stay as they are.

    Call ``unusable_cmdline`` first of what this changes.
    """
    lines = lines_that_count(text)
    edited = "".join(_edited_line(x, wishes) for x in lines)
    return text if edited == "".join(lines) else edited


def unusable_cmdline(text: str) -> str:
    """Why this is no text to edit; "" where it is: one line, with the root in it."""
    lines = lines_that_count(text)
    if len(lines) != 1:
        return f"it has {len(lines)} lines besides comments, and the boot loader takes exactly one"
    if "#" in (line.lstrip()[:1] for line in text.splitlines()):
        return "it has a comment, and not every version of the boot loader's tools passes over those"
    if not any(word.startswith("root=") for word in split_cmdline(lines[0])):
        return "it has no root=, and a boot from it would not find its root"
    return ""


def _edited_line(line: str, wishes: Iterable[Wish]) -> str:
    known = tuple(wishes)
    drop = [w for w in known if not w.present]
    raw = WORD.findall(line)
    kept = [x for x in raw if not any(w.found([x.replace('"', "")]) for w in drop)]
    missing = [w.argument for w in known if w.present and not w.met(x.replace('"', "") for x in kept)]
    if kept == raw and not missing:
        return line
    return " ".join([*kept, *missing]) + "\n"
