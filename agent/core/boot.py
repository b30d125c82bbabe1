"""Kernel arguments and what hands them to the kernel: wishes, how far each has come, and the edit that mends it.

The kernel has its command line until the next boot; what the boot loader will hand over then may differ from it, and
the files that an operator edits may differ from both until the loader's own files are made anew.
Sources: Documentation/admin-guide/kernel-parameters.rst, GNU GRUB manual (simple configuration), kernel-install(8),
Proxmox VE administration guide (host bootloader).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from agent.core.fact import Known
from agent.core.observation import Platform
from agent.core.spec import Platform as PlatformSpec

GRUB_DROP_IN = "/etc/default/grub.d/gpu-host-agent.cfg"
KERNEL_CMDLINE = "/etc/kernel/cmdline"
UNTRANSLATED = (
    "iommu=pt",
    "iommu=pt,*",
    "iommu=off",
    "amd_iommu=off",
    "intel_iommu=off",
    "iommu.passthrough=1",
)
SNP_OFF = ("kvm_amd.sev_snp=0", "kvm_amd.sev_snp=N")
_WORD = re.compile(r'(?:"[^"]*"?|[^\s"])+')
SAFE = re.compile(r"[A-Za-z0-9_.,:/=+@%*?-]+")
State = Literal["applied", "not-kept", "pending", "not-applied"]


def split_cmdline(text: str) -> tuple[str, ...]:
    """A kernel command line in words; double quotes hold blanks together and are dropped, as the kernel does."""
    return tuple(word.replace('"', "") for word in _WORD.findall(text))


@dataclass(frozen=True, slots=True)
class Loader:
    """Where one boot loader has its arguments from, and what makes its own files anew."""

    source: str
    place: str  # where in it a new argument goes, in words
    refresh: str
    edited: str = ""  # the file that policy.bootFiles: edit writes; "": it cannot


LOADERS = {
    "grub": Loader(
        "/etc/default/grub", "GRUB_CMDLINE_LINUX in /etc/default/grub", "update-grub", GRUB_DROP_IN
    ),
    "grub2": Loader(
        "/etc/default/grub",
        "GRUB_CMDLINE_LINUX in /etc/default/grub",
        "grub2-mkconfig -o /boot/grub2/grub.cfg",
    ),
    "proxmox-grub": Loader(
        "/etc/default/grub",
        "GRUB_CMDLINE_LINUX in /etc/default/grub",
        "proxmox-boot-tool refresh",
        GRUB_DROP_IN,
    ),
    "proxmox-systemd-boot": Loader(
        KERNEL_CMDLINE, f"the one line of {KERNEL_CMDLINE}", "proxmox-boot-tool refresh", KERNEL_CMDLINE
    ),
    "systemd-boot": Loader(
        KERNEL_CMDLINE,
        f"the one line of {KERNEL_CMDLINE}",
        'kernel-install add "$(uname -r)" "/boot/vmlinuz-$(uname -r)"',
    ),
}


@dataclass(frozen=True, slots=True)
class Wish:
    """One argument that must be there, or one pattern that must match nothing."""

    argument: str
    present: bool

    def met(self, words: Iterable[str]) -> bool:
        return bool(self.found(words)) == self.present

    def found(self, words: Iterable[str]) -> list[str]:
        """The words that it is about. Dashes and underscores of a name are the same to the kernel."""
        pattern = _spelled(self.argument)
        if self.present:
            return [w for w in words if _spelled(w) == pattern]
        return [w for w in words if fnmatchcase(_spelled(w), pattern)]


def _spelled(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("-", "_") + equals + value


def explicit_wishes(platform: PlatformSpec) -> tuple[Wish, ...]:
    """What platform.kernelArgs says."""
    arguments = platform.kernel_args
    return (
        *(Wish(a, present=True) for a in arguments.require),
        *(Wish(p, present=False) for p in arguments.forbid),
    )


def iommu_wishes(platform: PlatformSpec) -> tuple[Wish, ...]:
    """What platform.iommu and platform.sevSnp mean for the command line. SNP never goes with passthrough (law 5)."""
    if platform.iommu == "translated" or platform.sev_snp == "enabled":
        return tuple(Wish(p, present=False) for p in UNTRANSLATED)
    return (Wish("iommu=pt", present=True),) if platform.iommu == "passthrough" else ()


def snp_wishes(platform: PlatformSpec) -> tuple[Wish, ...]:
    if platform.sev_snp == "enabled":
        return tuple(Wish(p, present=False) for p in SNP_OFF)
    return (Wish(SNP_OFF[0], present=True),) if platform.sev_snp == "disabled" else ()


def all_wishes(platform: PlatformSpec) -> tuple[Wish, ...]:
    every = (*explicit_wishes(platform), *iommu_wishes(platform), *snp_wishes(platform))
    return tuple(dict.fromkeys(every))


def state_of(wish: Wish, words: Iterable[str], platform: Platform) -> State:
    """How far it has come: ``words`` are those of this boot. A next boot that cannot be told is taken for this one."""
    now = wish.met(words)
    if not isinstance(platform.next_cmdline, Known):
        return "applied" if now else "not-applied"
    then = wish.met(platform.next_cmdline.value)
    if now:
        return "applied" if then else "not-kept"
    return "pending" if then else "not-applied"


def next_step(wishes: Iterable[Wish], words: tuple[str, ...], platform: Platform, *, editing: bool) -> str:
    """What brings these wishes to the kernel, on this host's boot loader as far as that is known."""
    open_now = [w for w in wishes if state_of(w, words, platform) != "applied"]
    reboot = ", and reboot" if any(not w.met(words) for w in open_now) else ""
    wrong = [w for w in open_now if state_of(w, words, platform) != "pending"]
    if not wrong:
        return "reboot when it suits you: the boot loader has it right for the next boot"
    loader = LOADERS.get(platform.boot_loader.value) if isinstance(platform.boot_loader, Known) else None
    if loader is None:
        return f"{_changes(wrong, words)} the kernel command line{reboot.lstrip(',')}"
    if editing and loader.edited:
        return f"the agent edits {loader.edited} and runs {loader.refresh}{reboot and '; then reboot'}"
    configured = platform.configured_cmdline
    if isinstance(configured, Known) and all(w.met(configured.value) for w in wrong):
        return f"run {loader.refresh}, for {loader.source} has it right already{reboot}"
    return f"{_edits(wrong, platform, loader, words)}, run {loader.refresh}{reboot}"


def _changes(wishes: list[Wish], words: tuple[str, ...]) -> str:
    add = [w.argument for w in wishes if w.present]
    drop = [x for w in wishes if not w.present for x in w.found(words) or [w.argument]]
    parts = [f"put {' '.join(add)} on"] if add else []
    parts += [f"remove {' '.join(dict.fromkeys(drop))} from"] if drop else []
    return " and ".join(parts)


def _edits(wishes: list[Wish], platform: Platform, loader: Loader, words: tuple[str, ...]) -> str:
    """Each file that has a word too much, and the place where a missing one goes."""
    parts = []
    entries = [path for path in platform.boot_sources if path != loader.source]
    if add := [w.argument for w in wishes if w.present]:
        by_hand = loader.source not in platform.boot_sources and len(entries) == 1
        parts.append(f"add {' '.join(add)} to {f'the options of {entries[0]}' if by_hand else loader.place}")
    drop = [w for w in wishes if not w.present]
    for path, has in sorted(platform.boot_sources.items()):
        if found := [x for w in drop for x in w.found(has)]:
            parts.append(f"remove {' '.join(dict.fromkeys(found))} from {path}")
            drop = [w for w in drop if not w.found(has)]
    if drop:
        left = dict.fromkeys(x for w in drop for x in w.found(words) or [w.argument])
        parts.append(f"remove {' '.join(left)} from {loader.source}")
    return ", ".join(parts)


# -- the edit ----------------------------------------------------------------------------------------------------------

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
    return [w.argument for w in wishes if not SAFE.fullmatch(w.argument)]


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
    """/etc/kernel/cmdline with only the words changed that must be; quoted words stay as they are written."""
    known = tuple(wishes)
    drop = [w for w in known if not w.present]
    raw = _WORD.findall(text)
    kept = [x for x in raw if not any(w.found([x.replace('"', "")]) for w in drop)]
    missing = [w.argument for w in known if w.present and not w.met(x.replace('"', "") for x in kept)]
    if kept == raw and not missing:
        return text
    return " ".join([*kept, *missing]) + "\n"
