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
WORD = re.compile(r'(?:"[^"]*"?|[^\s"])+')
State = Literal["applied", "not-kept", "pending", "not-applied"]


def split_cmdline(text: str) -> tuple[str, ...]:
    """A kernel command line in words; double quotes hold blanks together and are dropped, as the kernel does."""
    return tuple(word.replace('"', "") for word in WORD.findall(text))


def lines_that_count(text: str) -> list[str]:
    """The lines of /etc/kernel/cmdline with their ends, without comments and empty ones."""
    lines = text.splitlines(keepends=True)
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def words_of_file(text: str) -> tuple[str, ...]:
    """The words that /etc/kernel/cmdline hands over."""
    return split_cmdline("".join(lines_that_count(text)))


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
        pattern = spelled(self.argument)
        if self.present:
            return [w for w in words if spelled(w) == pattern]
        return [w for w in words if fnmatchcase(spelled(w), pattern)]


def spelled(word: str) -> str:
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


def next_step(
    wishes: Iterable[Wish], words: tuple[str, ...], platform: Platform, *, editing: bool, owed: bool = False
) -> str:
    """What brings these wishes to the kernel, on this host's boot loader as far as that is known.

    ``editing``: the agent changes the boot files itself. ``owed``: it will make the loader's own files anew.
    """
    open_now = [w for w in wishes if state_of(w, words, platform) != "applied"]
    reboot = ", and reboot" if any(not w.met(words) for w in open_now) else ""
    wrong = [w for w in open_now if state_of(w, words, platform) != "pending"]
    if not wrong:
        return "reboot when it suits you: the boot loader has it right for the next boot"
    loader = LOADERS.get(platform.boot_loader.value) if isinstance(platform.boot_loader, Known) else None
    if loader is None:
        return f"{_changes(wrong, words)} the kernel command line{reboot.lstrip(',')}"
    own = editing and bool(loader.edited)
    configured = platform.configured_cmdline
    if isinstance(configured, Known) and all(w.met(configured.value) for w in wrong):
        return _from_sources(loader, reboot, own=own, lags=owed or isinstance(platform.next_cmdline, Known))
    if own:
        return f"the agent edits {loader.edited} and runs {loader.refresh}{reboot and '; then reboot'}"
    return f"{_edits(wrong, platform, loader, words)}, run {loader.refresh}{reboot}"


def _from_sources(loader: Loader, reboot: str, *, own: bool, lags: bool) -> str:
    """What an operator edits is right. ``lags``: the loader's own files are not, or the agent has yet to make them."""
    if own and lags:
        return f"the agent runs {loader.refresh}, for what that reads is right already{reboot and '; then reboot'}"
    if own:
        return (
            f"reboot: what {loader.refresh} reads is right. Whether the boot loader's own files are, cannot be read;"
            f" where somebody has edited {loader.source} by hand since, run {loader.refresh} first"
        )
    return f"run {loader.refresh}, for {loader.source} has it right already{reboot}"


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
