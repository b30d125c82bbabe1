"""The boot loader of this host: which it is, what it will hand to the kernel next, and what its sources say.

Read only, but for ``refresh_boot_loader``, which has PID 1 run the loader's own command: it writes to /boot, which
the agent's sandbox does not have.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agent.core.boot import KERNEL_CMDLINE, words_of_file
from agent.core.fact import Absent, Fact, Known, Unknown, value_or
from agent.host.grub_config import default_cmdline, settings_of
from agent.host.loader_entries import default_entry, entries_in
from agent.host.manager import ServiceManager, TransientCommand
from agent.host.reading import convert, names_in, read_text, unreadable
from agent.host.transient_end import ended

UNIT = "gpu-host-agent-boot-loader.service"
REFRESH_DEADLINE = 180.0  # seconds; GRUB looks for other systems on every disk
_COMMANDS = {
    "grub": ("/usr/sbin/update-grub",),
    "proxmox-grub": ("/usr/sbin/proxmox-boot-tool", "refresh"),
    "proxmox-systemd-boot": ("/usr/sbin/proxmox-boot-tool", "refresh"),
}
_PROXMOX = "etc/kernel/proxmox-boot-uuids"
_ESPS = ("efi", "boot", "boot/efi")


@dataclass(frozen=True, slots=True)
class Boot:
    """The facts of ``core.observation.Platform`` about the next boot."""

    loader: Fact[str]
    next_cmdline: Fact[tuple[str, ...]]
    configured_cmdline: Fact[tuple[str, ...]]
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def read_boot(root: Path) -> Boot:
    """Every fact; what cannot be told is Unknown, with the reason."""
    try:
        loader = _loader(root)
        if not isinstance(loader, Known):
            reason = Unknown(loader.reason, loader.code if isinstance(loader, Unknown) else "NotSupported")
            return Boot(loader, reason, reason)
        if loader.value == "systemd-boot":
            return _systemd_boot(root)
        if loader.value == "proxmox-systemd-boot":
            words, sources = _kernel_cmdline(root)
            return Boot(loader, _proxmox_entries(root), words, sources)
        config = _settings(root)
        following = _proxmox_grub(root) if loader.value == "proxmox-grub" else _grub(root, loader.value)
        return Boot(loader, following, config[0], config[1])
    except OSError as error:
        unknown = unreadable(Path(error.filename or "/boot"), error)
        return Boot(unknown, unknown, unknown)


def _loader(root: Path) -> Fact[str]:
    """By what is installed: proxmox-boot-tool's list of ESPs, loader entries, grub.cfg. Two at once cannot be told apart."""
    uuids = read_text(root / _PROXMOX)
    if value_or(uuids, ""):
        return Known("proxmox-systemd-boot" if _efi_is_systemd_boot(root) else "proxmox-grub")
    if isinstance(uuids, Unknown):
        return uuids
    grub = [name for name in ("grub", "grub2") if (root / f"boot/{name}/grub.cfg").exists()]
    entries = any(names_in(root / esp / "loader/entries") for esp in _ESPS)
    if entries and grub:
        booted = _booted_by(root)
        if booted is None:
            return Unknown(
                "both GRUB and loader entries are installed, and neither says that it booted", "NotSupported"
            )
        return Known("systemd-boot" if "systemd-boot" in booted else grub[0])
    if entries:
        return Known("systemd-boot")
    return Known(grub[0]) if grub else Absent("no boot loader that the agent knows")


def _booted_by(root: Path) -> str | None:
    """What the loader that booted this says of itself (LoaderInfo); None where it left nothing."""
    folder = root / "sys/firmware/efi/efivars"
    for name in names_in(folder):
        if name.startswith("LoaderInfo-"):
            return (folder / name).read_bytes()[4:].decode("utf-16-le", errors="replace")
    return None


def _efi_is_systemd_boot(root: Path) -> bool:
    booted = _booted_by(root)
    if booted is not None:
        return "systemd-boot" in booted
    return (root / "sys/firmware/efi").exists() and not (root / "boot/grub/grub.cfg").exists()


# -- GRUB ---------------------------------------------------------------------------------------------------------------


def _grub(root: Path, name: str) -> Fact[tuple[str, ...]]:
    return _grub_in(root / "boot" / name)


def _grub_in(folder: Path) -> Fact[tuple[str, ...]]:
    config, environment = read_text(folder / "grub.cfg"), read_text(folder / "grubenv")
    if isinstance(config, Absent):
        return Unknown(f"there is no {folder}/grub.cfg", "Unreadable")
    if isinstance(environment, Unknown):
        return environment
    return convert(config, lambda text: default_cmdline(text, value_or(environment, "")))


def _settings(root: Path) -> tuple[Fact[tuple[str, ...]], Mapping[str, tuple[str, ...]]]:
    names = ["etc/default/grub"]
    names += [f"etc/default/grub.d/{n}" for n in names_in(root / "etc/default/grub.d") if n.endswith(".cfg")]
    files = []
    for name in names:
        text = read_text(root / name)
        if isinstance(text, Unknown):
            return text, {}
        files.append((f"/{name}", _with_newline(value_or(text, ""))))
    settings = settings_of(files)
    if not isinstance(settings, Known):
        return Unknown(settings.reason, "Unparsable"), {}
    return Known(settings.value.words), settings.value.sources


def _with_newline(text: str) -> str:
    return text + "\n" if text else ""


# -- systemd-boot -------------------------------------------------------------------------------------------------------


def _systemd_boot(root: Path) -> Boot:
    loader: Fact[str] = Known("systemd-boot")
    esp = next((root / e for e in _ESPS if names_in(root / e / "loader/entries")), root / "boot")
    configured, sources = _kernel_cmdline(root)
    entries = entries_in(esp)
    if not isinstance(entries, Known):
        return Boot(loader, Unknown(entries.reason, "NotSupported"), configured, sources)
    chosen = default_entry(root, esp, entries.value)
    if not isinstance(chosen, Known):
        return Boot(loader, Unknown(chosen.reason, "NotSupported"), configured, sources)
    if isinstance(configured, Absent):  # nobody makes the entries anew: they are edited themselves
        path = "/" + str(chosen.value.path.relative_to(root))
        return Boot(loader, Known(chosen.value.words), Known(chosen.value.words), {path: chosen.value.words})
    return Boot(loader, Known(chosen.value.words), configured, sources)


def _kernel_cmdline(root: Path) -> tuple[Fact[tuple[str, ...]], Mapping[str, tuple[str, ...]]]:
    words = convert(read_text(root / KERNEL_CMDLINE.lstrip("/")), lambda text: Known(words_of_file(text)))
    return words, {KERNEL_CMDLINE: words.value} if isinstance(words, Known) else {}


# -- proxmox-boot-tool --------------------------------------------------------------------------------------------------


def _proxmox_entries(root: Path) -> Fact[tuple[str, ...]]:
    def of(esp: Path) -> Fact[tuple[str, ...]]:
        entries = entries_in(esp)
        if not isinstance(entries, Known):
            return Unknown(entries.reason, "NotSupported")
        return convert(default_entry(root, esp, entries.value), lambda entry: Known(entry.words))

    return _on_every_esp(root, [of(esp) for esp in _mounted_esps(root)])


def _proxmox_grub(root: Path) -> Fact[tuple[str, ...]]:
    return _on_every_esp(root, [_grub_in(esp / "grub") for esp in _mounted_esps(root)])


def _on_every_esp(root: Path, found: list[Fact[tuple[str, ...]]]) -> Fact[tuple[str, ...]]:
    """The firmware may start from any of them, so they must agree."""
    known = [f for f in found if isinstance(f, Known)]
    wanted = len(value_or(read_text(root / _PROXMOX), "").split())
    if len(known) < wanted:
        return Unknown(
            "proxmox-boot-tool keeps its ESPs unmounted, so what is on them cannot be read", "NotMounted"
        )
    if len({f.value for f in known}) > 1:
        return Unknown(
            "the ESPs that proxmox-boot-tool keeps differ: run proxmox-boot-tool refresh", "Differ"
        )
    return known[0]


def _mounted_esps(root: Path) -> list[Path]:
    """Mount points of the listed ESPs, by their devices (proc_pid_mountinfo(5))."""
    wanted = set()
    for uuid in value_or(read_text(root / _PROXMOX), "").split():
        link = root / "dev/disk/by-uuid" / uuid
        if link.is_symlink():
            wanted.add(os.path.basename(os.readlink(link)))  # noqa: PTH115, PTH119 - nothing is resolved, only read
    esps = []
    for line in value_or(read_text(root / "proc/self/mountinfo"), "").splitlines():
        head, _, tail = line.partition(" - ")
        device = tail.split()[1:2]
        if device and os.path.basename(device[0]) in wanted:  # noqa: PTH119 - as above
            esps.append(root / head.split()[4].lstrip("/"))
    return esps


# -- the command --------------------------------------------------------------------------------------------------------


async def refresh_boot_loader(loader: str, manager: ServiceManager) -> None:
    """Have PID 1 run the loader's own command and wait for its end.

    Raises OSError where there is none for this loader or it fails, TimeoutError after ``REFRESH_DEADLINE`` seconds.
    """
    argv = _COMMANDS.get(loader)
    if argv is None:
        raise OSError(f"the agent runs no command for the boot loader {loader}")
    await manager.run(TransientCommand(UNIT, argv, "gpu-host-agent: the boot loader's files made anew"))
    unit = await ended(UNIT, " ".join(argv), REFRESH_DEADLINE, manager)
    if unit.active_state == "failed":
        raise OSError(f"{' '.join(argv)} failed with status {unit.exit_status}; see: journalctl -u {UNIT}")
