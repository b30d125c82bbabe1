"""Profiles and scenarios as files: read as the spec is read, and errors that name file, line and what was expected."""

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from agent.core.errors import TerminalError
from agent.core.problem import Path, say_path
from agent.core.yaml12 import parse

LineOf = Callable[[Path], int]


class ScenarioError(TerminalError):
    """A profile or scenario file that cannot be used; ``problems`` holds every problem found."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems), reason="ScenarioInvalid", next_step="correct the scenario file")
        self.problems = problems


def read_yaml(text: str, origin: str) -> tuple[Any, LineOf]:
    """The data, and the line of every item by its path. Raises ``ScenarioError``."""
    document = parse(text, int_keys=lambda _: True)
    if document.problems:
        problems = []
        for problem in document.problems:
            line = (problem.mark or document.where(problem.path))[0]
            problems.append(f"{origin}:{line}: {say_path(problem.path)}: {problem.text}")
        raise ScenarioError(tuple(problems))
    return document.value, lambda path: document.where(path)[0]


def say_problems(error: ValidationError, origin: str, line_of: LineOf | None, at: Path = ()) -> ScenarioError:
    """Pydantic's errors as one line each: file, line, place, what was expected, and the value found."""
    problems = []
    for item in error.errors(include_url=False):
        path = (*at, *item["loc"])
        where = f"{origin}:{line_of(path)}" if line_of is not None else origin
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "this key is not known here"
        value = "" if isinstance(item["input"], dict | list | None) else f" (found {item['input']!r})"
        problems.append(f"{where}: {say_path(path)}: {message}{value}")
    return ScenarioError(tuple(problems))
