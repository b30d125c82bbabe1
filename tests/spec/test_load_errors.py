"""Golden table: an edit of the base spec, and every line that must come of it."""

import pytest

from tests.spec.base import BASE, problems, refused

GOLDEN = [
    (
        "enum",
        [("mode: enforce", "mode: sometimes")],
        ['5:18: spec.policy.mode: found "sometimes", expected one of enforce, observe'],
    ),
    (
        "unknown key with a near one",
        [("{mode: enforce}", "{resnyc: 30s}")],
        ['5:12: spec.policy.resnyc: found an unknown key, expected one of mode, allow, resync, budget, quiesce, bootFiles (did you mean "resync"?)'],
    ),
    (
        "unknown key in another spelling",
        [("sevSnp: enabled", "sev_snp: enabled")],
        ['8:5: spec.platform.sev_snp: found an unknown key, expected one of iommu, sevSnp, kernelArgs, modules, nvidiaDriver (did you mean "sevSnp"?)'],
    ),
    (
        "unknown key without a near one",
        [("{name: lab}", "{name: lab, zzz: 1}")],
        ["3:23: metadata.zzz: found an unknown key, expected one of name"],
    ),
    (
        "required key",
        [("      unit: sglang.service\n", "")],
        ['18:5: spec.services.qwen.unit: found nothing, expected a name of a systemd service such as "sglang.service": this key is required'],
    ),
    (
        "quantity without unit",
        [("{mode: enforce}", "{resync: 30}")],
        ['5:20: spec.policy.resync: found 30, expected a duration with its unit, such as "30s", "5m" or "1h30m"'],
    ),
    (
        "quantity without unit as a fraction",
        [("{mode: enforce}", "{resync: 30.0}")],
        ['5:20: spec.policy.resync: found 30.0, expected a duration with its unit, such as "30s", "5m" or "1h30m"'],
    ),
    (
        "floor",
        [('1: ">= 10 tok/s"', "1: 10")],
        ['30:22: spec.services.qwen.gate.require.1: found 10, expected a floor, such as ">= 100 tok/s"'],
    ),
    (
        "level that is no number",
        [('1: ">= 10 tok/s"', 'one: ">= 10 tok/s"')],
        ["30:19: spec.services.qwen.gate.require.one: found this key, expected a whole number"],
    ),
    (
        "yes is text",
        [("driver: nvidia", "driver: nvidia\n      settings: {persistenceMode: yes}")],
        ['14:35: spec.gpus.inference.settings.persistenceMode: found "yes", expected true or false (YAML 1.2 reads yes, no, on and off as text)'],
    ),
    (
        "clocks without their unit",
        [("driver: nvidia", "driver: nvidia\n      settings: {lockedGraphicsClocks: 1500}")],
        ['14:40: spec.gpus.inference.settings.lockedGraphicsClocks: found 1500, expected clocks with their unit, lowest first, such as "300-2000MHz", or "unlocked"'],
    ),
    (
        "clocks the wrong way round",
        [("driver: nvidia", "driver: nvidia\n      settings: {lockedMemoryClocks: 2000-300MHz}")],
        ['14:38: spec.gpus.inference.settings.lockedMemoryClocks: found "2000-300MHz", expected clocks with their unit, lowest first, such as "300-2000MHz", or "unlocked"'],
    ),
    (
        "compute mode of another name",
        [("driver: nvidia", "driver: nvidia\n      settings: {computeMode: exclusive}")],
        ['14:31: spec.gpus.inference.settings.computeMode: found "exclusive", expected one of default, exclusiveProcess, prohibited'],
    ),
    (
        "target of no known sort",
        [("{lxc: 129}", "{docker: x}")],
        ["20:7: spec.services.qwen.target: found a mapping, expected host, {lxc: ID} or {ssh: user@host}"],
    ),
    (
        "target by its name alone",
        [("{lxc: 129}", "lxc")],
        ['20:15: spec.services.qwen.target: found "lxc", expected host, {lxc: ID} or {ssh: user@host}'],
    ),
    (
        "target with a key too many",
        [("{lxc: 129}", "{lxc: 129, ssh: a@b}")],
        ['20:26: spec.services.qwen.target.ssh: found an unknown key, expected one of lxc, ssh (did you mean "ssh"?)'],
    ),
    (
        "truth value for a number",
        [("{lxc: 129}", "{lxc: true}")],
        ["20:21: spec.services.qwen.target.lxc: found true, expected a whole number from 1"],
    ),
    (
        "selector",
        [("[0000:81:00.0]", "[0000:81:00]")],
        ['15:16: spec.gpus.confidential.select[0]: found "0000:81:00", expected a PCI address such as "0000:01:00.0"'],
    ),
    (
        "selector in capitals",
        [("[0000:81:00.0]", "[0000:E1:00.0]")],
        ['15:16: spec.gpus.confidential.select[0]: found "0000:E1:00.0", expected a PCI address such as "0000:01:00.0", in small letters'],
    ),
    (
        "selector of no known sort",
        [("[0000:81:00.0]", "[{bus: 81}]")],
        ['15:16: spec.gpus.confidential.select[0]: found a mapping, expected a PCI address such as "0000:01:00.0", {uuid: ...}, {serial: ...} or {slot: ...}'],
    ),
    (
        "one selector without its list",
        [("[0000:81:00.0]", "0000:81:00.0")],
        ['15:15: spec.gpus.confidential.select: found "0000:81:00.0", expected a list of PCI addresses, {uuid: ...}, {serial: ...} or {slot: ...}; or {numaNode: N, count: N}'],
    ),
    (
        "no selector",
        [("[0000:81:00.0]", "[]")],
        ["15:7: spec.gpus.confidential.select: found a list, expected at least one item"],
    ),
    (
        "half a NUMA selection",
        [("[0000:81:00.0]", "{numaNode: 1}")],
        ["15:7: spec.gpus.confidential.select.count: found nothing, expected a whole number from 1: this key is required"],
    ),
    (
        "serial as a number",
        [("[0000:81:00.0]", "[{serial: 1234}]")],
        ["15:25: spec.gpus.confidential.select[0].serial: found 1234, expected text; write it in quotes"],
    ),
    (
        "bound",
        [("[1, 8]", "[1, 0]")],
        ["29:38: spec.services.qwen.gate.benchmark.concurrency[1]: found 0, expected at least 1"],
    ),
    (
        "environment value that is a truth value",
        [("OMP_NUM_THREADS: 8", "OMP_DYNAMIC: true")],
        ["24:26: spec.services.qwen.env.OMP_DYNAMIC: found true, expected text or number; write it in quotes"],
    ),
    (
        "environment name",
        [("OMP_NUM_THREADS: 8", "OMP-THREADS: 8")],
        ['24:13: spec.services.qwen.env.OMP-THREADS: found this key, expected a name of an environment variable such as "HF_HOME"'],
    ),
    (
        "whole spec of a wrong sort",
        [("{mode: enforce}", "enforce")],
        ['5:11: spec.policy: found "enforce", expected a mapping with mode, allow, resync, budget, quiesce, bootFiles'],
    ),
    (
        "format",
        [("gpu-host/v1", "gpu-host/v9")],
        ['1:13: apiVersion: found "gpu-host/v9", expected gpu-host/v1'],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("edits", "lines"), [case[1:] for case in GOLDEN], ids=[case[0] for case in GOLDEN])
def test_each_error_says_where_what_was_found_and_what_was_expected(edits, lines):
    assert refused(*edits) == tuple(f"spec.yaml:{line}" for line in lines)


def test_the_base_has_no_problem():
    assert problems(BASE) == ()


def test_all_errors_come_at_once_in_the_order_of_the_file():
    found = refused(
        ("mode: enforce", "mode: sometimes"),
        ("sevSnp: enabled", "sevSnp: perhaps"),
        ("driver: vfio-pci", "driver: vfio"),
        ("runtime: sglang", "runtime: vllm"),
        ("gpus: inference", "gpus: nowhere"),
        ("port: 30000", "port: 0"),
        ("secrets: {", "secrets: {1: /x, "),
        ("concurrency: [1, 8]", "concurrency: [8]"),
    )
    assert [line.split(": ")[1] for line in found] == [
        "spec.policy.mode",
        "spec.platform.sevSnp",
        "spec.gpus.confidential.driver",
        "spec.services.qwen.runtime",
        "spec.services.qwen.gpus",
        "spec.services.qwen.args.port",
        "spec.services.qwen.secrets",
        "spec.services.qwen.gate.require.1",
    ]


def test_a_judgement_that_rests_on_a_wrong_value_is_not_made():
    found = refused(
        ("driver: nvidia", "driver: nvidea"), ("[1, 8]", "[0, 8]"), ("select: [0000:01", "select: [0000:0")
    )
    assert [line.split(": ")[1] for line in found] == [
        "spec.gpus.inference.select[0]",
        "spec.gpus.inference.driver",
        "spec.services.qwen.gate.benchmark.concurrency[0]",
    ]


def test_structural_and_content_errors_come_together():
    found = refused(
        ("mode: enforce", "mode: sometimes"),
        ("port: 30000", "port: 30000, port: 30001"),
        ("iommu: translated", "iommu: *x"),
    )
    assert [line.split(": ")[1] for line in found] == [
        "spec.policy.mode",
        "spec.platform.iommu",
        "spec.services.qwen.args.port",
    ]


@pytest.mark.parametrize(
    "text",
    ["[]", "x", "12", "~", "spec: 1", "spec: {services: 1}", "spec: {services: {a: 1}}", "{spec: [1, [2]]}"],
)
def test_a_file_that_is_no_spec_at_all_is_refused_in_words(text):
    found = problems(text)
    assert found
    assert all(line.startswith("spec.yaml:1:") for line in found)
    assert not any("pydantic" in line or "Input should" in line for line in found)
