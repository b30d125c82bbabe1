"""What a slow ring needs of the machine: missing, it is a skip on a developer's machine and a failure in CI."""

import os
import shutil

import pytest

CI = "AGENT_CI"  # set to 1 where nothing may be missing


def need(condition: object, reason: str) -> None:
    """Go on only if ``condition`` holds. ``reason`` says what is missing and how to get it."""
    if condition:
        return
    if os.environ.get(CI) == "1":
        pytest.fail(f"{reason} ({CI}=1: nothing may be missing here)", pytrace=False)
    pytest.skip(reason)


def need_root() -> None:
    need(os.geteuid() == 0, "needs root: it makes namespaces and mounts")


def need_programs(**packages: str) -> None:
    """Programs on PATH, each with the Debian package that has it (``_`` in a program's name stands for ``-``)."""
    for program, package in packages.items():
        name = program.replace("_", "-")
        need(shutil.which(name), f"needs {name}: apt-get install {package}")
