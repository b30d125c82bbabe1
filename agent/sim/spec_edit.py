"""The scenario's hand on the spec file: edits as editors and tools make them."""

from collections.abc import Callable
from pathlib import Path

import yaml

from agent.sim.merge import merge
from agent.sim.scenario import SpecEdit
from agent.sim.yaml_text import read_yaml


def edited(text: str, edit: SpecEdit) -> str:
    """The spec's text after the edit; comments are lost where keys are merged in."""
    if edit.text is not None:
        return edit.text
    data, _ = read_yaml(text, "spec")
    return yaml.safe_dump(merge(data, edit.set or {}), sort_keys=False)


def spec_editor(path: Path) -> Callable[[SpecEdit], None]:
    """What to give ``simulated_host`` as ``edit_spec``: it writes ``path`` by rename, in place, or deletes it.

    The last text is remembered, so that a file can be deleted and then come back by ``set: {}``.
    """
    last = path.read_text(encoding="utf-8") if path.exists() else ""

    def apply(edit: SpecEdit) -> None:
        nonlocal last
        if path.exists():
            last = path.read_text(encoding="utf-8")
        if edit.how == "delete":
            path.unlink(missing_ok=True)
            return
        last = edited(last, edit)
        if edit.how == "write":
            path.write_text(last, encoding="utf-8")
            return
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(last, encoding="utf-8")
        temporary.chmod(mode)
        temporary.replace(path)

    return apply
