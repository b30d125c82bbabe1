"""The modules that systemd-modules-load loads at boot (modules-load.d(5)); Debian links /etc/modules in there."""

from pathlib import Path

from agent.core.fact import Fact, Known, Unknown, value_or
from agent.host.reading import names_in, read_text, unreadable

# A file hides one of the same name in a later directory.
DIRECTORIES = (
    "etc/modules-load.d",
    "run/modules-load.d",
    "usr/local/lib/modules-load.d",
    "usr/lib/modules-load.d",
    "lib/modules-load.d",
)


def read_modules_load(root: Path) -> Fact[tuple[tuple[str, str], ...]]:
    """(file as an absolute path, module as it is written there). One unreadable file makes the whole Unknown."""
    chosen: dict[str, Path] = {}
    for directory in DIRECTORIES:
        try:
            for name in names_in(root / directory):
                if name.endswith(".conf"):
                    chosen.setdefault(name, root / directory / name)
        except OSError as error:
            return unreadable(root / directory, error)
    found: list[tuple[str, str]] = []
    for name in sorted(chosen):
        text = read_text(chosen[name])
        if isinstance(text, Unknown):
            return text
        file = f"/{chosen[name].relative_to(root)}"
        lines = (line.strip() for line in value_or(text, "").splitlines())
        found += [(file, line) for line in lines if line and line[0] not in "#;"]
    return Known(tuple(found))
