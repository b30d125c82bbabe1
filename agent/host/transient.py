"""The settings of a transient command, for both ways of telling systemd: as D-Bus values and as words of systemd-run."""

from collections.abc import Callable
from typing import Any

from dbus_fast import Variant

from agent.host.manager import TransientCommand

FOREVER = 2**64 - 1  # systemd's infinity, in microseconds
_YES = {
    "yes": True,
    "true": True,
    "on": True,
    "1": True,
    "no": False,
    "false": False,
    "off": False,
    "0": False,
}


def _text(value: str) -> Variant:
    return Variant("s", value)


def _flag(value: str) -> Variant:
    if value not in _YES:
        raise ValueError(f"found {value!r}, expected yes or no")
    return Variant("b", _YES[value])


def _span(value: str) -> Variant:
    if value == "infinity":
        return Variant("t", FOREVER)
    try:
        return Variant("t", int(float(value.removesuffix("s")) * 1_000_000))
    except (ValueError, OverflowError):
        raise ValueError(f"found {value!r}, expected seconds or infinity") from None


# Name in a unit file -> name on the bus (org.freedesktop.systemd1, "Properties" of Unit and Service), conversion.
_KNOWN: dict[str, tuple[str, Callable[[str], Variant]]] = {
    "Slice": ("Slice", _text),
    "KillMode": ("KillMode", _text),
    "SendSIGKILL": ("SendSIGKILL", _flag),
    "TimeoutStartSec": ("TimeoutStartUSec", _span),
    "TimeoutStopSec": ("TimeoutStopUSec", _span),
    "SyslogIdentifier": ("SyslogIdentifier", _text),
    "CollectMode": ("CollectMode", _text),
}


def bus_properties(command: TransientCommand) -> list[list[Any]]:
    """The a(sv) of StartTransientUnit. Raises ValueError for a setting that is not known or has a bad value."""
    converted = []
    for name, value in command.properties.items():
        known = _KNOWN.get(name)
        if known is None:
            raise ValueError(f"{command.unit}: {name} is not among the settings {', '.join(_KNOWN)}")
        try:
            converted.append([known[0], known[1](value)])
        except ValueError as error:
            raise ValueError(f"{command.unit}: {name}: {error}") from None
    exec_start = Variant("a(sasb)", [[command.argv[0], [_literal(word) for word in command.argv], False]])
    return [
        ["Description", _text(command.description)],
        ["Type", _text("oneshot")],
        ["RemainAfterExit", Variant("b", True)],
        ["ExecStart", exec_start],
        *converted,
    ]


def run_words(command: TransientCommand) -> tuple[str, ...]:
    """The same for systemd-run. Raises ValueError likewise."""
    bus_properties(command)
    settings = (word for name, value in command.properties.items() for word in ("-p", f"{name}={value}"))
    return (
        "systemd-run", "--no-block", "--quiet", f"--unit={command.unit}", f"--description={command.description}",
        "--service-type=oneshot", "--remain-after-exit", *settings, "--", *map(_literal, command.argv),
    )  # fmt: skip


def _literal(word: str) -> str:
    """PID 1 puts variables in when it executes, however the command came to it (man 5 systemd.service)."""
    return word.replace("$", "$$")
