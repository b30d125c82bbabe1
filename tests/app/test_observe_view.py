import json

import pytest

from agent.app.observe_dict import observation_to_dict
from agent.app.observe_view import render_observation
from agent.core.fact import Absent, Known, Unknown
from agent.core.observation import Nvml, Observation, Pci
from tests.app.golden import check
from tests.app.observations import TOKEN, full


def test_an_observation_is_exactly_this():
    check("observe.txt", render_observation(full(), color=False))


def test_an_observation_as_data_is_exactly_this():
    check("observe.json.txt", json.dumps(observation_to_dict(full()), indent=1))


def test_nothing_observed_is_told_as_unknown_throughout():
    page = render_observation(Observation(), color=False)
    check("observe_nothing.txt", page)
    assert page.count("UNKNOWN (NotObserved: not read in this pass)") >= 9


def test_a_fact_says_whether_it_is_known_absent_or_unknown():
    told = observation_to_dict(
        Observation(nvml=Absent("no GPU is on nvidia"), pci=Unknown("EIO", "PciUnknown"))
    )
    assert told["nvml"] == {"absent": "no GPU is on nvidia"}
    assert told["pci"] == {"unknown": "EIO", "code": "PciUnknown"}
    assert observation_to_dict(Observation(nvml=Known(Nvml(Known("590")))))["nvml"] == {
        "known": {
            "driver_version": {"known": "590"},
            "nvml_version": {"unknown": "not read in this pass", "code": "NotObserved"},
            "cuda_version": {"unknown": "not read in this pass", "code": "NotObserved"},
            "gpus": {},
            "confidential_compute": {"unknown": "not read in this pass", "code": "NotObserved"},
        }
    }


def test_the_data_does_not_depend_on_the_order_of_mappings():
    pci = full().pci
    assert isinstance(pci, Known)
    turned = Pci(
        dict(reversed(list(pci.value.functions.items()))), pci.value.groups, pci.value.pending_unbinds
    )
    one = json.dumps(observation_to_dict(full()))
    other = json.dumps(observation_to_dict(Observation(pci=Known(turned))))
    assert json.loads(other)["pci"] == json.loads(one)["pci"]
    assert f'"pci": {json.dumps(json.loads(one)["pci"])}' in other


def test_an_empty_host_is_shown():
    page = render_observation(Observation(pci=Known(Pci()), kernel_events=Known(())), color=False)
    assert "PCI: NVIDIA functions\n  none" in page
    assert "Kernel events since boot\n  none that the agent knows" in page


@pytest.mark.parametrize("secret", [TOKEN, "opensesame"])
def test_no_secret_of_a_process_or_a_file_is_shown(secret):
    assert secret not in render_observation(full(), color=False)
    assert secret not in json.dumps(observation_to_dict(full()))


def test_of_an_environment_only_what_concerns_the_agent_is_shown():
    told = observation_to_dict(full())
    environment = told["services"]["qwen"]["process"]["known"]["env"]  # type: ignore[index]
    assert environment == {
        "EDITOR": "(not shown)",
        "HF_TOKEN": "(not shown)",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SECRET": "(not shown)",
        "SGLANG_X": "(not shown)",
    }


def test_nothing_observed_can_move_the_cursor():
    for line in render_observation(full(), color=False).split("\n"):
        assert line.isprintable()


def test_colour_changes_no_word():
    painted = render_observation(full(), color=True)
    assert "\x1b[33mUNKNOWN\x1b[0m" in painted
    for code in ("0", "1", "2", "33", "31;1"):
        painted = painted.replace(f"\x1b[{code}m", "")
    assert painted.split() == render_observation(full(), color=False).split()
