"""``agent selftest p2p``: real processes on a simulated host, and the choice of GPUs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agent.app.selftest_command import chosen
from agent.core.errors import TerminalError
from agent.core.fact import Known, Unknown
from agent.core.observation import Observation, Pci, PciFunction
from tests.rig import REPOSITORY

ONE, TWO, AWAY = "0000:01:00.0", "0000:11:00.0", "0000:81:00.0"
STRAIGHT = 'set: {sevSnp: false, groups: {"*": {type: identity}}}\n'


def selftest(
    root: Path, *words: str, scenario: str = "", force: bool = True
) -> "subprocess.CompletedProcess[str]":
    if scenario:
        path = root / "scenario.yaml"
        path.write_text(scenario)
        words = (*words, "--scenario", str(path))
    command = [
        sys.executable,
        "-m",
        "agent.app.main",
        "selftest",
        "p2p",
        "--root",
        str(root),
        "--host",
        "sim",
    ]
    command += ["--force"] if force else []
    return subprocess.run(
        [*command, *words], capture_output=True, text=True, check=False, timeout=60, cwd=REPOSITORY
    )


def test_wrong_data_is_shown_as_a_matrix_with_the_likely_cause_and_is_exit_3(tmp_path: Path) -> None:
    done = selftest(tmp_path, "--gpus", f"{ONE},{TWO}")
    assert done.returncode == 3
    assert "SIMULATED HOST" in done.stdout
    assert "CCCCC" in done.stdout
    assert "Verdict: CORRUPT: 2 of 2 ordered pairs corrupt" in done.stdout
    assert "Likely: the IOMMU translates these GPUs' DMA" in done.stdout
    assert "Traceback" not in done.stderr


def test_right_data_is_exit_0_and_the_json_has_all_that_the_verdict_is_bound_to(tmp_path: Path) -> None:
    done = selftest(tmp_path, "-o", "json", "--seed", "5", "--gpus", "01:00.0,11:00.0", scenario=STRAIGHT)
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert (document["result"], document["seed"], document["gpus"]) == ("good", 5, [ONE, TWO])
    assert {(p["source"], p["destination"]) for p in document["paths"]} == {(ONE, TWO), (TWO, ONE)}
    assert document["circumstances"].keys() == {"boot", "cmdline", "driver", "gpus"}
    assert (document["simulated"], document["fingerprint"] != "") == ("esc8000a", True)


def test_controls_that_fail_are_exit_4_whatever_the_data(tmp_path: Path) -> None:
    scenario = f"{STRAIGHT}faults: [{{on: p2p.control, detail: host bounce failed}}]\n"
    done = selftest(tmp_path, scenario=scenario)
    assert done.returncode == 4
    assert "Verdict: NOT JUDGED" in done.stdout
    assert "host bounce failed" in done.stdout


def test_gpus_in_use_are_not_disturbed_and_their_user_is_named(tmp_path: Path) -> None:
    done = selftest(tmp_path, force=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "0000:01:00.0 is in use: pid" in done.stderr
    assert "--force" in done.stderr


def test_without_a_choice_the_gpus_that_the_spec_gives_to_nvidia_are_tested(tmp_path: Path) -> None:
    done = selftest(tmp_path, "-o", "json", "--spec", "specs/esc8000a-qwen3.5-122b.yaml")
    assert json.loads(done.stdout)["gpus"] == [ONE, TWO, "0000:61:00.0", "0000:71:00.0"]


def test_a_test_without_a_name_is_a_usage_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agent.app.main", "selftest"],
        capture_output=True, text=True, check=False, timeout=60, cwd=REPOSITORY,
    )  # fmt: skip
    assert done.returncode == 64


def host() -> Observation:
    functions = {
        address: PciFunction(address, 0x10DE, 0x2BB5, 0x030200, driver=Known(driver))
        for address, driver in ((ONE, "nvidia"), (TWO, "nvidia"), (AWAY, "vfio-pci"))
    }
    bridge = PciFunction("0000:00:01.1", 0x1022, 1, 0x060400)
    return Observation(pci=Known(Pci({**functions, bridge.address: bridge})))


def test_without_a_choice_all_gpus_on_nvidia_are_meant_or_those_that_the_spec_names() -> None:
    assert chosen(None, host()) == (ONE, TWO)
    assert chosen(None, host(), named=(TWO, AWAY)) == (TWO,)


def test_addresses_are_taken_as_people_write_them_and_each_once() -> None:
    assert chosen("11:00.0, 0000:01:00.0,0000:11:00.0", host()) == (ONE, TWO)
    assert chosen("0000:01:00.0", host(), named=(TWO,)) == (ONE,)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (AWAY, "driver vfio-pci"),
        ("0000:c1:00.0", "not there"),
        ("0000:00:01.1", "no GPU on nvidia"),
        ("gpu0", "expected a PCI address such as 0000:01:00.0"),
    ],
)
def test_what_is_no_gpu_on_nvidia_is_refused_with_what_there_is(asked: str, said: str) -> None:
    with pytest.raises(TerminalError, match=said):
        chosen(asked, host())


def test_a_pci_tree_that_cannot_be_read_is_no_host_without_gpus() -> None:
    with pytest.raises(TerminalError, match="cannot be read"):
        chosen(None, Observation(pci=Unknown("EIO")))
