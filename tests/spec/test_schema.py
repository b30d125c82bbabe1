import json

import pytest
from jsonschema import Draft7Validator

from agent.core.explain import describe
from agent.core.schema import json_schema
from agent.core.yaml12 import parse
from tests.spec.base import BASE, edited
from tests.spec.regenerate import MANUAL, SCHEMA, manual_text, schema_text

SPECS = sorted(SCHEMA.parent.glob("*.yaml"))


def errors(text: str) -> list[str]:
    document = parse(text, lambda _: True)
    return [error.message for error in Draft7Validator(json_schema()).iter_errors(document.value)]


def test_the_schema_is_valid_draft_07():
    Draft7Validator.check_schema(json_schema())
    assert "$defs" not in json.dumps(json_schema())


def test_the_checked_in_schema_is_current():
    assert SCHEMA.read_text() == schema_text(), "run: python -m tests.spec.regenerate"


def test_the_manual_is_current():
    text = MANUAL.read_text()
    assert text == manual_text(text), "run: python -m tests.spec.regenerate"


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_recipe_fits_the_schema(path):
    assert errors(path.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mode: enforce", "mode: sometimes"),
        ("mode: enforce", "mod: enforce"),
        ("lxc: 129", "lxc: x"),
        ("0000:81:00.0", "0000:81:00"),
        ("      unit: sglang.service\n", ""),
        (">= 10 tok/s", "10"),
        ("    qwen:", "    Qwen!:"),
        ("OMP_NUM_THREADS", "OMP-NUM"),
        ("{1: ", "{one: "),
        ("gpu-host/v1", "gpu-host/v2"),
        ("HF_TOKEN: /etc/secrets/hf", "HF_TOKEN: secret"),
    ],
)
def test_a_wrong_spec_does_not_fit_the_schema(old, new):
    assert errors(BASE) == []
    assert errors(edited((old, new)))


def test_defaults_are_written_as_an_operator_writes_them():
    assert json_schema()["definitions"]["Budget"]["properties"]["restarts"]["default"] == "3 per 1h"
    assert json_schema()["definitions"]["Gate"]["properties"]["startTimeout"]["default"] == "30m"


def test_every_setting_says_what_it_means():
    silent = [
        f"{name}.{key}"
        for name, model in json_schema()["definitions"].items()
        for key, described in model.get("properties", {}).items()
        if not described.get("description")
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("services.qwen.gate.benchmark", "outputTokens"),
        ("spec.services.qwen3.5.gate.startTimeout", "default: 30m"),
        ("services.qwen.p2p", "one of auto, off, required"),
        ("gpus.inference.select[0]", "PCI address"),
        ("policy.budget.restarts", "Survives agent restarts"),
        ("metadata.name", "The host's name"),
        ("services.qwen.args.tp-size", "true or false, number, text or list"),
        ("", "apiVersion"),
        ("spec", "policy"),
    ],
)
def test_every_place_of_the_spec_is_explained(path, words):
    assert words in (describe(path) or "")


@pytest.mark.parametrize(
    "path", ["nowhere", "spec.policy.mode.deeper", "services.qwen.gate.nothing", "spec.spec"]
)
def test_a_place_that_is_not_in_the_spec_is_not_explained(path):
    assert describe(path) is None
