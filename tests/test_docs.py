"""Documents keep to the repository: links lead somewhere, commands exist, nothing leads out of it."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from agent.app.main import _parser

REPOSITORY = Path(__file__).parents[1]
README = REPOSITORY / "README.md"

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

# Written in two halves, so that this file does not find itself.
PRIVATE = (
    "/wor" + "k/",
    "/hom" + "e/",
    "shar" + "ed/",
    "DESIGN" + ".md",
    "FIELD" + ".md",
    "CASES" + ".md",
    "STYLE" + ".md",
)
ROOTS_HOME = re.compile(
    r"/roo" + r"t/(?!\.nccl\.conf|\.cache/sglang/)"
)  # those two are a simulated target's own files
INDEX = re.compile(r"https?://|--index-url|--extra-index-url|--find-links|--trusted-host")


@cache
def files() -> tuple[Path, ...]:
    """Every file that is, or would be, in the repository."""
    listing = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    try:
        done = subprocess.run(listing, cwd=REPOSITORY, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout: what belongs to the repository is not known")
    named = (REPOSITORY / name for name in done.stdout.decode().split("\0") if name)
    return tuple(path for path in named if path.is_file())


def documents() -> list[Path]:
    return [path for path in files() if path.suffix == ".md"]


def anchors(path: Path) -> set[str]:
    """The names by which a document's headings are linked to, as GitHub makes them."""
    headings = HEADING.findall(FENCE.sub("", path.read_text()))
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", h).lower()).replace(" ", "-") for h in headings}


def test_every_relative_link_leads_to_something_in_the_repository() -> None:
    inside = {path.resolve() for path in files()}
    inside |= {folder for path in inside for folder in path.parents}
    broken = []
    for document in documents():
        for link in LINK.findall(document.read_text()):
            place, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            target = (document.parent / place).resolve() if place else document
            if target not in inside or (anchor and anchor not in anchors(target)):
                broken.append(f"{document.relative_to(REPOSITORY)}: {link}")
    assert not broken


def test_the_index_of_documents_leads_to_every_document() -> None:
    index = REPOSITORY / "docs/README.md"
    decisions = REPOSITORY / "docs/decisions/README.md"
    reached = {
        (start.parent / link.partition("#")[0]).resolve()
        for start in (index, decisions)
        for link in LINK.findall(start.read_text())
    }
    lost = [d for d in documents() if (REPOSITORY / "docs") in d.parents and d not in {*reached, index}]
    assert not lost


@pytest.mark.parametrize("name", ["README.md", "docs/howto/develop.md", "docs/tutorial/first-host.md"])
def test_every_make_target_that_a_document_names_exists(name: str) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    named = set(
        re.findall(
            r"(?:`|^ +)(?:\w+=\S+ )?make ([a-z][a-z-]*)", (REPOSITORY / name).read_text(), re.MULTILINE
        )
    )
    assert named, f"{name} names no make target: look at the pattern"
    assert named <= targets


def test_every_command_that_a_document_names_exists() -> None:
    (commands,) = [a.choices for a in _parser()._actions if isinstance(a.choices, dict)]
    for document in documents():
        named = set(re.findall(r"(?:`|^ +|/|: )agent ([a-z]+)\b", document.read_text(), re.MULTILINE))
        strange = named - set(commands)
        assert not strange, f"{document.relative_to(REPOSITORY)}: {strange}"
    assert "agent status" in README.read_text()


def test_no_file_leads_out_of_the_repository() -> None:
    found = []
    for path in files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        marks = [mark for mark in PRIVATE if mark in text] + [m[0] for m in ROOTS_HOME.finditer(text)]
        found += [f"{path.relative_to(REPOSITORY)}: {mark}" for mark in marks]
    assert not found


@pytest.mark.parametrize("name", ["requirements.lock", ".ci/build.lock"])
def test_a_lock_file_names_no_package_index(name: str) -> None:
    assert not INDEX.findall((REPOSITORY / name).read_text())


def test_every_case_of_the_scenario_reference_has_its_file() -> None:
    listed = set(
        re.findall(
            r"^\| ([PBDS]\d+) \|", (REPOSITORY / "docs/reference/scenario.md").read_text(), re.MULTILINE
        )
    )
    there = {path.stem for path in (REPOSITORY / "tests/scenarios").glob("*.yaml") if "-" not in path.stem}
    assert listed == there
