"""Write what is generated from the models: ``python -m tests.spec.regenerate``."""

import json
from pathlib import Path

from agent.core.explain import reference
from agent.core.schema import json_schema

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "specs" / "spec.schema.json"
MANUAL = ROOT / "docs" / "reference" / "spec.md"
BEGIN = "<!-- begin of the generated part: python -m tests.spec.regenerate -->\n"
END = "<!-- end of the generated part -->\n"


def schema_text() -> str:
    return json.dumps(json_schema(), indent=2) + "\n"


def manual_text(old: str) -> str:
    before, _, rest = old.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{reference()}\n{END}{after}"


if __name__ == "__main__":
    SCHEMA.write_text(schema_text())
    MANUAL.write_text(manual_text(MANUAL.read_text()))
