import pytest

from agent.core.spec import LxcTarget, Spec
from agent.core.spec_load import load
from tests.spec.regenerate import SCHEMA

SPECS = {path.stem: path for path in sorted(SCHEMA.parent.glob("*.yaml"))}
NODE_0 = ("0000:01:00.0", "0000:11:00.0", "0000:61:00.0", "0000:71:00.0")
NODE_1 = ("0000:81:00.0", "0000:91:00.0", "0000:e1:00.0", "0000:f1:00.0")


def loaded(name: str) -> Spec:
    return load(SPECS[name].read_text(), f"specs/{name}.yaml").spec.spec


def test_all_four_deployments_have_a_recipe():
    assert set(SPECS) == {
        "esc8000a-glm-5-nvfp4",
        "esc8000a-kimi-k2.5-int4",
        "esc8000a-qwen3.5-122b",
        "esc8000a-qwen3.5-397b-nvfp4",
    }


@pytest.mark.parametrize("name", SPECS)
def test_every_recipe_is_accepted_and_names_its_schema(name):
    assert SPECS[name].read_text().splitlines()[0] == "# yaml-language-server: $schema=spec.schema.json"
    service = next(iter(loaded(name).services.values()))
    assert service.target == LxcTarget(lxc=129)


def test_the_proved_recipe_splits_the_host_and_keeps_its_floors():
    spec = loaded("esc8000a-qwen3.5-122b")
    assert spec.gpus["inference"].select == NODE_0
    assert spec.gpus["confidential"].select == NODE_1
    assert spec.gpus["confidential"].driver == "vfio-pci"
    gate = spec.services["qwen"].gate
    assert gate.require == {1: 100.0, 64: 2000.0}
    assert gate.benchmark.concurrency == (1, 4, 16, 32, 64, 128)
    assert (gate.benchmark.output_tokens, gate.benchmark.repeats) == (1000, 3)
    assert spec.policy.quiesce == ("nvidia-persistenced.service",)


@pytest.mark.parametrize("name", [name for name in SPECS if name != "esc8000a-qwen3.5-122b"])
def test_recipes_without_proved_figures_say_so_and_have_no_floors(name):
    spec = loaded(name)
    service = next(iter(spec.services.values()))
    assert "NOT PROVED" in SPECS[name].read_text()
    assert service.gate.require == {}
    assert spec.gpus["all"].select == NODE_0 + NODE_1
    assert service.args["tensor-parallel-size"] == 8


def test_glm_has_what_is_reported_to_be_needed():
    args = loaded("esc8000a-glm-5-nvfp4").services["glm"].args
    assert args["kv-cache-dtype"] == "bf16"
    assert args["disable-custom-all-reduce"] is True
