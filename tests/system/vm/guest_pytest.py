"""pytest inside a guest: itself, its plugin for asyncio and some of this tree's tests, on the disk that brings the agent."""

import compileall
import importlib.metadata
import py_compile
import re
import shutil
import tarfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.system.vm.cache import cached, key_of
from tests.system.vm.guest import Guest
from tests.system.vm.image import payload

_REPOSITORY = Path(__file__).parents[3]
_PLACE = "/opt/guest-pytest"
_RESULTS = f"{_PLACE}/results.xml"
_NEEDED = ("pytest", "pytest-asyncio")


@dataclass(frozen=True, slots=True)
class GuestTests:
    """How tests ended: their names with parameters; of those that did not pass also why."""

    passed: tuple[str, ...]
    skipped: dict[str, str]
    failed: dict[str, str]
    output: str


def with_tests(files: Iterable[str]) -> Path:
    """What a virtual machine is to be made ``over``: this tree's agent, pytest, and these files of the repository."""
    names = sorted({*files, "pyproject.toml"})
    packages = [importlib.metadata.distribution(name) for name in _closure(_NEEDED)]
    versions = sorted(f"{package.name} {package.version}" for package in packages)
    agent = payload()
    key = key_of(
        agent.parent.name, *versions, *names, files=[*(_REPOSITORY / n for n in names), Path(__file__)]
    )
    return cached("guest-pytest", key, lambda made: _pack(made, agent, packages, names)) / "over.tar"


def run_tests(vm: Guest, tests: str, environment: str = "", timeout: float = 300) -> GuestTests:
    """Run ``tests`` (pytest's own arguments) in a guest that was made over ``with_tests``."""
    variables = f"{environment} PYTHONPATH={_PLACE}:{_PLACE}/packages"
    command = f"{variables} python3 -m pytest -p no:cacheprovider --tb=short --durations=12 --junitxml={_RESULTS} {tests}"
    status, out = vm.run(f"cd {_PLACE} && {command}", timeout)
    assert status in {0, 1}, f"pytest in the guest ended with status {status}:\n{out}\n{vm.log_tail()}"
    cases = list(ET.fromstring(vm.get(_RESULTS)).iter("testcase"))
    return GuestTests(
        tuple(str(case.get("name")) for case in cases if not list(case)),
        _ended(cases, "skipped"),
        {**_ended(cases, "failure"), **_ended(cases, "error")},
        out,
    )


def _ended(cases: Iterable[ET.Element], how: str) -> dict[str, str]:
    found = ((str(case.get("name")), case.find(how)) for case in cases)
    return {name: str(element.get("message")) for name, element in found if element is not None}


def _closure(names: Iterable[str]) -> list[str]:
    """With what they require here: a requirement that is not installed is for another platform."""
    wanted, found = list(names), set[str]()
    while wanted:
        name = wanted.pop()
        try:
            requires = importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            wanted += [re.split(r"[^A-Za-z0-9._-]", r)[0] for r in requires if "extra ==" not in r]
    return sorted(found)


def _pack(
    made: Path, agent: Path, packages: Iterable[importlib.metadata.Distribution], names: Iterable[str]
) -> None:
    tree = made / "tree"
    for package in packages:
        for file in package.files or ():
            source = Path(str(file.locate()))
            if ".." not in file.parts and file.suffix != ".pyc" and source.is_file():
                _copy(source, tree / "packages" / file)
    # As the image's packages: it takes the guest long to compile, and to compare dates.
    compileall.compile_dir(
        tree / "packages", quiet=2, stripdir=str(tree), prependdir=_PLACE,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )  # fmt: skip
    for name in names:
        _copy(_REPOSITORY / name, tree / name)
    shutil.copy(agent, made / "over.tar")
    with tarfile.open(made / "over.tar", "a") as archive:
        archive.add(tree, _PLACE.lstrip("/"))
    shutil.rmtree(tree)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)
