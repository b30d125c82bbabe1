"""The reference of the command line and of conditions says what the code has, no less."""

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from agent.app.main import _parser
from agent.core.trial import PROVE_PHASES, RESTORE_PHASES, TRIAL_PHASES
from agent.core.verdict import PairResult

REPOSITORY = Path(__file__).parents[2]
CLI = (REPOSITORY / "docs/reference/cli.md").read_text()
CONDITIONS = (REPOSITORY / "docs/reference/conditions.md").read_text()

CAMEL = re.compile(r"[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*")
HUMPS = re.compile(r"[A-Z][a-z0-9]+(?:[A-Z0-9][a-z0-9]*)+")
# Words of this form that are no reason: properties of systemd, the kind of a spec file, names in type annotations.
OTHERS = {
    "ActiveState", "ControlGroup", "ExecMainStatus", "LoadState", "MainPID", "NeedDaemonReload", "SubState",
    "GpuHost", "P2PTestResult", "StatusError", "P2P", "KiB", "MiB", "GiB",
    # What systemd and D-Bus are told and asked in: methods, signals, settings.
    "AddMatch", "RemoveMatch", "GetAll", "PropertiesChanged", "NameOwnerChanged", "LoadUnit", "GetUnit", "StartUnit",
    "StopUnit", "KillUnit", "ResetFailedUnit", "StartTransientUnit", "TimeoutStartSec", "TimeoutStopSec",
    "TimeoutStartUSec", "TimeoutStopUSec", "SendSIGKILL", "KillMode", "SyslogIdentifier", "CollectMode",
    "RemainAfterExit", "ExecStart", "DropInPaths", "CommandTarget",
}  # fmt: skip
# Where a call takes its reason among its positional arguments.
PLACES = {
    "Refusal": 2,
    "_refusal": 1,
    "_refuse_holders": 1,
    "PhaseFailedError": 0,
    "Finding": 3,
    "Unknown": 1,
}


def commands() -> dict[str, argparse.ArgumentParser]:
    return dict(_commands(_parser()))


def _commands(
    parser: argparse.ArgumentParser, prefix: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """By name, as "status" or "selftest p2p": one that only has others below it is no command."""
    (found,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for name, below in found.choices.items():
        if any(isinstance(a, argparse._SubParsersAction) for a in below._actions):
            yield from _commands(below, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", below


def section(name: str) -> str:
    """The part of the reference about one command."""
    found = re.search(rf"^### `agent {name}\b.*?(?=^##)", CLI, re.MULTILINE | re.DOTALL)
    assert found, f"docs/reference/cli.md has no section about agent {name}"
    return found[0]


def test_every_command_has_a_section_with_its_options_and_arguments() -> None:
    shared = set.intersection(
        *({s for a in p._actions for s in a.option_strings} for p in commands().values())
    )
    for name, parser in commands().items():
        text = section(name)
        for action in parser._actions:
            for option in action.option_strings:
                assert option in shared or f"{option}" in text, (
                    f"agent {name}: {option} is not in its section"
                )
            for choice in action.choices or () if action.option_strings else ():
                assert str(choice) in text, (
                    f"agent {name} {action.option_strings}: {choice} is not in its section"
                )
            if not action.option_strings:
                assert str(action.metavar) in text, f"agent {name}: {action.metavar} is not in its section"
        assert "Exit:" in text, f"the section about agent {name} does not say its exit codes"
    for option in shared:
        assert f"`{option}" in CLI, f"{option} is not in docs/reference/cli.md"


def test_every_section_is_about_a_command_that_there_is() -> None:
    assert set(re.findall(r"^### `agent ([a-z]+(?: [a-z][a-z0-9]*)?)", CLI, re.MULTILINE)) == set(commands())


def test_every_exit_code_is_in_the_reference() -> None:
    codes: set[int] = set()
    for module in ("main", "commands", "status_command", "status_view", "daemon", "selftest_command"):
        for node in ast.walk(ast.parse((REPOSITORY / f"agent/app/{module}.py").read_text())):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant):
                codes |= {node.value.value} if type(node.value.value) is int else set()
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Tuple)
                and _capitals(node.targets[0])
            ):
                codes |= {
                    c.value for c in node.value.elts if isinstance(c, ast.Constant) and type(c.value) is int
                }
    assert codes >= {0, 1, 2, 3, 4, 64, 130}
    table = CLI[CLI.index("## Exit codes together") :]
    for code in codes:
        assert f"| {code} |" in table, f"exit code {code} is not in docs/reference/cli.md"


def _capitals(target: ast.expr) -> bool:
    return isinstance(target, ast.Tuple) and all(
        isinstance(e, ast.Name) and e.id.isupper() for e in target.elts
    )


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((REPOSITORY / "agent").rglob("*.py")):
        if not {"sim", "catalog"} & set(path.parts):
            yield path, ast.parse(path.read_text())


def words_in(node: ast.AST | None, form: re.Pattern[str]) -> Iterator[str]:
    for inner in ast.walk(node) if node is not None else ():
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str) and form.fullmatch(inner.value):
            yield inner.value


def reasons_in(tree: ast.Module) -> Iterator[str]:
    """Words of two humps wherever they stand; single words where a reason is given."""
    yield from words_in(tree, HUMPS)
    for node in ast.walk(tree):
        match node:
            case ast.Call():
                name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                place = PLACES.get(name)
                if place is not None and len(node.args) > place:
                    yield from words_in(node.args[place], CAMEL)
                for keyword in node.keywords:
                    if keyword.arg in {"reason", "code", "type"}:
                        yield from words_in(keyword.value, CAMEL)
            case ast.Assign(targets=[ast.Name(id="reason")], value=value):
                yield from words_in(value, CAMEL)
            case ast.Assign(targets=[ast.Attribute(attr="failure")], value=ast.Tuple(elts=[first, *_])):
                yield from words_in(first, CAMEL)


def test_every_reason_and_condition_that_the_code_can_give_is_in_the_reference() -> None:
    listed = set(re.findall(r"`([A-Za-z0-9]+)(?:/SERVICE)?`", CONDITIONS))
    found = {word: path for path, tree in sources() for word in reasons_in(tree) if word not in OTHERS}
    assert len(found) > 100, "the search for reasons finds too little to be right"
    missing = {word: str(path.relative_to(REPOSITORY)) for word, path in found.items() if word not in listed}
    assert not missing, f"not in docs/reference/conditions.md: {missing}"


def test_every_condition_type_is_in_the_first_table() -> None:
    table = CONDITIONS[CONDITIONS.index("## The conditions") : CONDITIONS.index("## The agent itself")]
    types = {
        word
        for _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Condition"
        for keyword in node.keywords
        if keyword.arg == "type"
        for word in words_in(keyword.value, CAMEL)
    }
    for word in types | {"P2PVerified/SERVICE", "ServiceReady/SERVICE"}:
        assert f"| `{word}` |" in table, word


def put_together() -> set[str]:
    """Reasons that stand nowhere in the code as they are said."""
    results = {r.title().replace("-", "") for r in get_args(PairResult)}
    phases = {p.title().replace("-", "") + "Timeout" for p in (*TRIAL_PHASES, *PROVE_PHASES, *RESTORE_PHASES)}
    return results | phases


def test_every_reason_that_is_put_together_is_in_the_reference() -> None:
    for word in put_together():
        assert f"`{word}`" in CONDITIONS, word


def test_the_reference_lists_no_reason_that_the_code_cannot_give() -> None:
    listed = {word for word in re.findall(r"`([A-Za-z0-9]+)`", CONDITIONS) if CAMEL.fullmatch(word)}
    known = {word for _, tree in sources() for word in reasons_in(tree)} | put_together()
    of_a_service_or_scenario = {"P2PVerified", "ServiceReady", "ScenarioInvalid"}
    gone = sorted(listed - known - of_a_service_or_scenario)
    assert not gone, f"docs/reference/conditions.md lists what no code gives: {gone}"
