"""What the command line owes its user, beside the views: real processes, a simulated host, no mocks."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.rig import REPOSITORY, recipe

SPEC = "specs/esc8000a-qwen3.5-122b.yaml"


def agent(*words: str, root: Path, text: bool = True) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "agent.app.main", *words, "--root", str(root), "--host", "sim"]
    return subprocess.run(command, capture_output=True, text=text, check=False, timeout=60, cwd=REPOSITORY)


def test_a_reader_that_goes_away_does_not_end_the_work_that_it_was_shown(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(recipe())
    command = [
        sys.executable,
        "-m",
        "agent.app.main",
        "apply",
        "--root",
        str(tmp_path),
        "--host",
        "sim",
        "--spec",
        str(spec),
    ]
    with subprocess.Popen(
        [*command, "--time-factor", "200"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPOSITORY
    ) as apply:
        assert apply.stdout is not None
        assert apply.stderr is not None
        apply.stdout.readline()
        apply.stdout.close()
        assert b"Broken pipe" not in apply.stderr.read()
        assert apply.wait(timeout=60) == 0
    shown = agent("status", root=tmp_path)
    assert "promoted" in shown.stdout


@pytest.mark.parametrize("factor", ["-3", "0", "nan", "inf"])
def test_a_time_factor_that_is_no_speed_is_a_usage_error(factor: str, tmp_path: Path) -> None:
    done = agent("plan", "--spec", SPEC, f"--time-factor={factor}", root=tmp_path)
    assert done.returncode == 64
    assert "Traceback" not in done.stderr


def test_S14_a_read_only_command_says_what_failed_and_shows_no_traceback(tmp_path: Path) -> None:
    done = agent("observe", "--scenario", "tests/scenarios/S14.yaml", root=tmp_path)
    assert done.returncode == 1
    assert "reading the host failed" in done.stderr
    assert "Traceback" not in done.stderr


def test_plan_names_the_simulated_host_that_it_opened_and_a_host_stays_what_it_is(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("profile: synthetic-4\n")
    first = agent("plan", "--spec", SPEC, "--scenario", str(scenario), root=tmp_path)
    assert first.stdout.startswith("SIMULATED HOST (profile synthetic-4)")
    again = agent("plan", "--spec", SPEC, root=tmp_path)
    assert again.stdout.startswith("SIMULATED HOST (profile synthetic-4)")


def test_a_command_line_and_a_scenario_that_name_two_hosts_are_told_so(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text("profile: synthetic-4\n")
    words = [
        "plan",
        "--spec",
        SPEC,
        "--scenario",
        str(scenario),
        "--root",
        str(tmp_path),
        "--host",
        "sim:esc8000a",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "agent.app.main", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    assert done.returncode == 1
    assert "leave one of them out" in done.stderr
