"""Golden files: the exact text of a view. ``UPDATE_GOLDEN=1 pytest tests/app`` writes them anew; read the diff then."""

import os
from pathlib import Path

DIRECTORY = Path(__file__).parent / "golden"


def check(name: str, text: str) -> None:
    path = DIRECTORY / name
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text + "\n", encoding="utf-8")
    assert text + "\n" == path.read_text(encoding="utf-8"), (
        f"{path} differs; if it should: UPDATE_GOLDEN=1 pytest tests/app"
    )
