from agent.core.spec import Gate, GpuHost, Policy
from agent.core.spec_load import digest, load
from tests.spec.base import BASE, accepted


def test_comments_layout_order_and_written_defaults_are_the_same_generation():
    plain = accepted().digest
    assert load("# a comment\n" + BASE.replace("mode: enforce", '"mode": enforce   '), "x").digest == plain
    assert (
        accepted(("{model-path: /models/m, tp-size: 2,", "{tp-size: 2, model-path: /models/m,")).digest
        == plain
    )
    assert accepted(("{mode: enforce}", "{mode: enforce, resync: 30s}")).digest == plain


def test_a_changed_value_is_another_generation():
    assert accepted(("port: 30000", "port: 30001")).digest != accepted().digest


def test_equal_durations_in_other_spellings_are_the_same_generation():
    one = accepted(("{mode: enforce}", "{resync: 90s}"))
    assert one.digest == accepted(("{mode: enforce}", "{resync: 1m30s}")).digest


def test_a_dumped_spec_is_read_back_as_itself():
    host = accepted(
        ("{mode: enforce}", "{resync: 1234567s, budget: {restarts: 7 per 90m}}"),
        (">= 10 tok", ">= 2345678.25 tok"),
    ).spec
    again = GpuHost.model_validate_json(host.model_dump_json(by_alias=True), strict=True)
    assert again == host
    assert digest(again) == digest(host)


def test_positions_name_every_path():
    positions = accepted().positions
    assert positions["spec.services.qwen.args.port"] == (23, 55)
    assert positions["spec.services.qwen.args"] == (23, 7)
    assert positions["spec.gpus.inference.select[1]"] == (12, 30)
    assert positions["spec.services.qwen.gate.require.1"] == (30, 22)


def test_p2p_is_written_as_everybody_writes_it():
    assert (
        accepted(("gpus: inference", "gpus: inference\n      p2p: off")).spec.spec.services["qwen"].p2p
        == "off"
    )


def test_models_made_by_code_take_parsed_quantities():
    assert Policy(resync=5.0).resync == 5.0
    assert Gate(require={1: 100.0}).require == {1: 100.0}
