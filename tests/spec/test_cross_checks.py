import pytest

from tests.spec.base import BASE, accepted, problems, refused

SECOND = """
    other:
      runtime: sglang
      target: {lxc: 129}
      unit: sglang.service
      gpus: inference
      args: {model-path: /models/m, port: 30000}
"""

ONE_PROBLEM = [
    ("gpu group that does not exist", [("gpus: inference", "gpus: inferense")], "22:13: spec.services.qwen.gpus: found", "confidential, inference"),
    ("gpu group on another driver", [("gpus: inference", "gpus: confidential"), ("tp-size: 2, ", "")], "22:13: spec.services.qwen.gpus", "a group on vfio-pci, expected a group on nvidia"),
    ("same card twice", [("[0000:81:00.0]", "[0000:01:00.0]")], "15:16: spec.gpus.confidential.select[0]", "group inference selects it already"),
    ("same card in two spellings", [("[0000:81:00.0]", "[{address: 0000:01:00.0}]")], "spec.gpus.confidential.select[0]", "group inference selects it already"),
    ("same slot twice", [("[0000:01:00.0, 0000:11:00.0]", "[{slot: '4'}, {slot: '4'}]")], "spec.gpus.inference.select[1]", "found slot 4 again"),
    ("same NUMA node twice", [("[0000:01:00.0, 0000:11:00.0]", "{numaNode: 0, count: 2}"), ("[0000:81:00.0]", "{numaNode: 0, count: 1}")], "spec.gpus.confidential.select", "NUMA node 0 again"),
    ("other function alone", [("[0000:81:00.0]", "[0000:81:00.1]")], "spec.gpus.confidential.select[0]", "found 0000:81:00.1, expected 0000:81:00.0"),
    ("settings where NVML sees nothing", [("driver: vfio-pci", "driver: vfio-pci\n      settings: {persistenceMode: true}")], "spec.gpus.confidential.settings", "only nvidia"),
    ("clocks locked without persistence mode", [("driver: nvidia", "driver: nvidia\n      settings: {lockedGraphicsClocks: 300-2000MHz}")], "14:40: spec.gpus.inference.settings.lockedGraphicsClocks", "found 300-2000MHz without persistenceMode: true"),
    ("no computing on GPUs of a service", [("driver: nvidia", "driver: nvidia\n      settings: {computeMode: prohibited}")], "14:31: spec.gpus.inference.settings.computeMode", "on the GPUs of service qwen"),
    ("MIG on GPUs of a service", [("driver: nvidia", "driver: nvidia\n      settings: {mig: true}")], "14:23: spec.gpus.inference.settings.mig", "CUDA finds no GPU there"),
    ("tensor parallel above the GPUs", [("tp-size: 2", "tensor-parallel-size: 4")], "spec.services.qwen.args.tensor-parallel-size", "found 4, expected at most 2"),
    ("tensor parallel by its short name", [("tp-size: 2", "tp: '8'")], "spec.services.qwen.args.tp", "found 8, expected at most 2"),
    ("tensor times pipeline", [("tp-size: 2", "tp-size: 2, pp-size: 2")], "spec.services.qwen.args.tp-size", "2 x 2 (pipeline)"),
    ("two names for one size", [("tp-size: 2", "tp-size: 2, tp: 2")], "spec.services.qwen.args.tp:", "a second name of tp-size"),
    ("tensor parallel of no size", [("tp-size: 2", "tp-size: all")], "spec.services.qwen.args.tp-size", "expected a whole number from 1"),
    ("floor that is not measured", [("[1, 8]", "[8]")], "30:19: spec.services.qwen.gate.require.1", "benchmark.concurrency: 8"),
    ("level twice", [("[1, 8]", "[1, 8, 8]")], "concurrency[2]", "expected each level once"),
    ("prompt without answer", [(', expect: "4"', "")], "spec.services.qwen.gate.smoke[0]", "a prompt without an expected answer"),
    ("prompt with two answers", [(', expect: "4"', ', expect: "4", expectRegex: "4"')], "spec.services.qwen.gate.smoke[0]", "both expect and expectRegex"),
    ("no prompt", [('[{ask: "2 + 2?", expect: "4"}]', "[]")], "spec.services.qwen.gate.smoke", "nothing would be proved"),
    ("bad regular expression", [('expect: "4"', 'expectRegex: "(4"')], "28:46: spec.services.qwen.gate.smoke[0].expectRegex", "unterminated subpattern"),
    ("flag with dashes", [("tp-size: 2", "--tp-size: 2")], "23:37: spec.services.qwen.args.--tp-size", '"tp-size"'),
    ("flag with underscores", [("tp-size: 2", "mem_fraction_static: 0.8")], "args.mem_fraction_static", '"mem-fraction-static"'),
    ("port out of range", [("port: 30000", "port: 70000")], "args.port", "from 1 to 65535"),
    ("port as text", [("port: 30000", "port: '30000'")], "args.port", "from 1 to 65535"),
    ("no model", [("model-path: /models/m, ", "")], "23:7: spec.services.qwen.args.model-path", "found nothing"),
    ("environment decided elsewhere", [("OMP_NUM_THREADS: 8", "CUDA_VISIBLE_DEVICES: 0")], "env.CUDA_VISIBLE_DEVICES", '"gpus" decides'),
    ("NCCL variable in env", [("OMP_NUM_THREADS: 8", "NCCL_DEBUG: INFO")], "24:13: spec.services.qwen.env.NCCL_DEBUG", 'expected it under "nccl"'),
    ("other variable in nccl", [("NCCL_DEBUG: INFO", "OMP_NUM_THREADS: 8")], "nccl.OMP_NUM_THREADS", 'go into "env"'),
    ("unknown NCCL variable", [("NCCL_DEBUG: INFO", "NCCL_P2P_DISBLE: 1")], "nccl.NCCL_P2P_DISBLE", "did you mean NCCL_P2P_DISABLE?"),
    ("verdict overruled", [("NCCL_DEBUG: INFO", "NCCL_P2P_DISABLE: 0")], "nccl.NCCL_P2P_DISABLE", 'use "p2p: required"'),
    ("P2P required and off", [("NCCL_DEBUG: INFO", "NCCL_P2P_DISABLE: 1"), ("gpus: inference", "gpus: inference\n      p2p: required")], "nccl.NCCL_P2P_DISABLE", '"p2p: off"'),
    ("P2P required and its level local", [("NCCL_DEBUG: INFO", "NCCL_P2P_LEVEL: LOC"), ("gpus: inference", "gpus: inference\n      p2p: required")], "nccl.NCCL_P2P_LEVEL", '"p2p: off"'),
    ("variable in env and secrets", [("OMP_NUM_THREADS: 8", "HF_TOKEN: ''")], "env.HF_TOKEN", '"secrets" has too'),
    ("required and forbidden", [("pcie_aspm=off]", "vfio-pci.disable_vga=1]"), ('"vfio-pci.ids=*"', '"vfio-pci.*"')], "kernelArgs.require[0]", 'forbid[0] is "vfio-pci.*"'),
    ("an edit that would take the root away", [("{mode: enforce}", "{bootFiles: edit}"), ('"vfio-pci.ids=*"', '"r*"')], "kernelArgs.forbid[0]", "leaves root=* alone"),
    ("two arguments in one", [("pcie_aspm=off]", "pcie_aspm=off quiet]")], "kernelArgs.require[0]", "expected one kernel argument"),
    ("resync without end", [("{mode: enforce}", "{resync: 1ms}")], "policy.resync", "expected at least 1 second"),
    ("a service's own unit to be quiesced", [("{mode: enforce}", "{quiesce: [sglang.service]}"), ("{lxc: 129}", "host")], "services.qwen.unit", "policy.quiesce lists too"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("edits", "place", "words"), [c[1:] for c in ONE_PROBLEM], ids=[c[0] for c in ONE_PROBLEM]
)
def test_settings_that_contradict_each_other_are_refused(edits, place, words):
    found = refused(*edits)
    assert len(found) == 1, found
    assert place in found[0]
    assert words in found[0]


ALLOWED = [
    [("tp-size: 2", "tp-size: 16, nnodes: 8")],
    [("tp-size: 2, ", "")],
    [("NCCL_DEBUG: INFO", "NCCL_P2P_DISABLE: 1")],
    [("tp-size: 2", "disable-custom-all-reduce: true")],
    [('expect: "4"', "expectRegex: '[[]a]'")],
    [("sevSnp: enabled", "sevSnp: any"), ("iommu: translated", "iommu: passthrough"), ("pcie_aspm=off]", "iommu=pt]")],
    [("[0000:81:00.0]", "{numaNode: 1, count: 4}")],
    [('"vfio-pci.ids=*"', '"r*"')],
    [("{mode: enforce}", "{bootFiles: edit}"), ('"vfio-pci.ids=*"', '"console=ttyS0"')],
]  # fmt: skip


@pytest.mark.parametrize("edits", ALLOWED)
def test_what_merely_looks_odd_is_accepted(edits):
    accepted(*edits)


def test_B5_a_slot_whose_functions_are_split_between_groups_is_refused():
    found = refused(("[0000:81:00.0]", "[0000:01:00.1]"))
    assert len(found) == 1
    assert "found 0000:01:00.1, a function of the card 0000:01:00 that group inference selects" in found[0]
    assert "select only 0000:01:00.0" in found[0]


@pytest.mark.parametrize("argument", ["vfio-pci.ids=10de:2bb5", "vfio_pci.ids=10de:2bb5,10de:22e8"])
def test_B9_vfio_ids_on_a_host_that_splits_its_cards_are_refused(argument):
    found = refused(("pcie_aspm=off]", f'"{argument}"]'), ('forbid: ["vfio-pci.ids=*"]', "forbid: []"))
    assert len(found) == 1
    assert "an id names all identical cards" in found[0]


def test_B9_vfio_ids_as_a_module_option_are_refused_too():
    found = refused(("iommu: translated", 'modules: {vfio-pci: {ids: "10de:2bb5"}}\n    iommu: translated'))
    assert len(found) == 1
    assert "spec.platform.modules.vfio-pci.ids" in found[0]


def test_B9_vfio_ids_are_fine_where_every_card_goes_to_the_same_driver():
    text = BASE.replace("driver: nvidia", "driver: vfio-pci").replace(
        "pcie_aspm=off]", '"vfio-pci.ids=10de:2bb5"]'
    )
    text = text.replace('forbid: ["vfio-pci.ids=*"]', "forbid: []").partition("  services:")[0]
    assert problems(text) == ()


@pytest.mark.parametrize("mode", ["passthrough", "off"])
def test_D1_snp_without_a_translated_iommu_is_refused_with_the_kernels_reason(mode):
    found = refused(("iommu: translated", f"iommu: {mode}"))
    assert len(found) == 1
    assert "spec.yaml:7:12: spec.platform.iommu" in found[0]
    assert "SNP: IOMMU disabled or configured in passthrough mode, SNP cannot be supported" in found[0]


@pytest.mark.parametrize(
    "argument",
    ["iommu=pt", "amd_iommu=off", "iommu=off", "intel_iommu=off", "iommu=nomerge,pt", "iommu.passthrough=1"],
)
def test_D1_kernel_arguments_that_take_snp_away_are_refused(argument):
    found = refused(("pcie_aspm=off]", f'"{argument}"]'), ("iommu: translated", "iommu: any"))
    assert len(found) == 1
    assert "SNP cannot be supported" in found[0]


def test_two_services_share_neither_gpus_nor_unit_nor_port():
    found = problems(BASE + SECOND)
    assert [line.split(": ")[1] for line in found] == [
        "spec.services.other.unit",
        "spec.services.other.gpus",
        "spec.services.other.args.port",
    ]


def test_two_services_without_a_port_share_sglangs_default():
    text = (BASE + SECOND).replace(", port: 30000", "")
    assert any("port 30000 in lxc:129" in line for line in problems(text))


def test_services_in_different_targets_may_have_the_same_unit_and_port():
    found = problems(BASE + SECOND.replace("lxc: 129", "lxc: 130"))
    assert [line.split(": ")[1] for line in found] == ["spec.services.other.gpus"]


@pytest.mark.parametrize("value", ['"a\\nExecStartPre=/bin/sh"', '"a\\tb"'])
@pytest.mark.parametrize("old", ["OMP_NUM_THREADS: 8", "tp-size: 2"])
def test_S12_control_characters_in_environment_and_arguments_are_refused(old, value):
    name = "A" if old.startswith("OMP") else "chat-template"
    found = refused((old, f"{name}: {value}"))
    assert len(found) == 1
    assert "control character" in found[0]


def test_S12_a_newline_in_an_nccl_value_is_refused():
    assert "control character" in refused(("NCCL_DEBUG: INFO", 'NCCL_DEBUG_FILE: "/x\\ny"'))[0]
