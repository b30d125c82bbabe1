"""Any text gives a spec or a list of problems, and nothing else."""

import re

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent.catalog.nccl import variables
from agent.core.nccl import check
from agent.core.problem import Problem
from agent.core.yaml12 import parse
from tests.spec.base import BASE, problems

LINE = re.compile(r"spec\.yaml:[1-9]\d*:[1-9]\d*: \S.*: .+")
PIECES = ["a", "b: ", "- ", "[", "]", "{", "}", ",", ": ", "? ", "\n", "\n  ", "'", '"', "\\", "&x ", "*x", "!!str ", "|\n", ">-\n", "#", "---\n", "...\n", "%YAML 1.2\n", "<<: ", "~", "1", "0x", "\t", "\r", "\x00", "\ud800", "\ufeff", "\u2028", "spec:\n", "services: ", "gpus: ", "env: ", "😀"]  # fmt: skip

texts = st.one_of(st.text(max_size=200), st.lists(st.sampled_from(PIECES), max_size=60).map("".join))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def complete(found: tuple[str, ...]) -> bool:
    return all(LINE.fullmatch(line) for line in found)


@settings(max_examples=300, deadline=None)
@given(texts)
@example("[" * 70000)
@example("a: \ud800")
def test_any_text_gives_a_value_or_problems(text):
    document = parse(text)
    assert all(isinstance(problem, Problem) for problem in document.problems)
    found = problems(text)
    assert found
    assert complete(found)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(BASE)), st.integers(0, 40), st.one_of(texts, st.text(max_size=5)))
def test_any_edit_of_a_good_spec_gives_a_spec_or_problems(at, length, text):
    assert complete(problems(BASE[:at] + text + BASE[at + length :]))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([line for line in BASE.splitlines() if ": " in line]), values)
def test_any_value_anywhere_gives_a_spec_or_problems(line, value):
    written = yaml.safe_dump(value, default_flow_style=True, width=10**6).replace("...\n", "").strip()
    key = line[: line.index(": ") + 2]
    assert complete(problems(BASE.replace(line, key + written)))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(variables())), st.text(max_size=20))
def test_any_nccl_value_is_accepted_or_has_a_problem_in_words(name, value):
    problem = check(name, value)
    assert problem is None or problem.startswith("found ")
