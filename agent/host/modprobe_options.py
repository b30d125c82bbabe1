"""The ``options`` lines that modprobe would use (modprobe.d(5))."""

from pathlib import Path

from agent.core.fact import Fact, Known, Unknown, value_or
from agent.host.reading import convert, names_in, read_text, unreadable

# A file hides one of the same name in a later directory.
DIRECTORIES = (
    "etc/modprobe.d",
    "run/modprobe.d",
    "usr/local/lib/modprobe.d",
    "usr/lib/modprobe.d",
    "lib/modprobe.d",
)


def read_module_options(root: Path) -> Fact[tuple[str, ...]]:
    """Every options line, blanks normalised, in modprobe's order. One unreadable file makes the whole Unknown."""
    return convert(read_option_files(root), lambda found: Known(tuple(line for _, line in found)))


def read_option_files(root: Path) -> Fact[tuple[tuple[str, str], ...]]:
    """The same with the file that each line is in, as an absolute path."""
    chosen: dict[str, str] = {}
    for directory in DIRECTORIES:
        try:
            names = names_in(root / directory)
        except OSError as error:
            return unreadable(root / directory, error)
        for name in names:
            if name.endswith(".conf"):
                chosen.setdefault(name, f"{directory}/{name}")
    lines: list[tuple[str, str]] = []
    for name in sorted(chosen):
        text = read_text(root / chosen[name])
        if isinstance(text, Unknown):
            return text
        lines.extend((f"/{chosen[name]}", line) for line in options_in(value_or(text, "")))
    return Known(tuple(lines))


def options_in(text: str) -> tuple[str, ...]:
    """The options lines of one file; a backslash at the end of a line continues it."""
    words = (line.split() for line in text.replace("\\\n", " ").splitlines())
    return tuple(" ".join(line) for line in words if line and line[0] == "options")
