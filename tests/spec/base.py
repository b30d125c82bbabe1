"""A small good spec, and what becomes of it when lines of it are changed."""

from agent.core.errors import SpecError
from agent.core.spec_load import LoadedSpec, load

BASE = """\
apiVersion: gpu-host/v1
kind: GpuHost
metadata: {name: lab}
spec:
  policy: {mode: enforce}
  platform:
    iommu: translated
    sevSnp: enabled
    kernelArgs: {require: [pcie_aspm=off], forbid: ["vfio-pci.ids=*"]}
  gpus:
    inference:
      select: [0000:01:00.0, 0000:11:00.0]
      driver: nvidia
    confidential:
      select: [0000:81:00.0]
      driver: vfio-pci
  services:
    qwen:
      runtime: sglang
      target: {lxc: 129}
      unit: sglang.service
      gpus: inference
      args: {model-path: /models/m, tp-size: 2, port: 30000}
      env: {OMP_NUM_THREADS: 8}
      nccl: {NCCL_DEBUG: INFO}
      secrets: {HF_TOKEN: /etc/secrets/hf}
      gate:
        smoke: [{ask: "2 + 2?", expect: "4"}]
        benchmark: {concurrency: [1, 8]}
        require: {1: ">= 10 tok/s"}
"""


def edited(*edits: tuple[str, str]) -> str:
    text = BASE
    for old, new in edits:
        assert old in text, f"the base has no {old!r}"
        text = text.replace(old, new, 1)
    return text


def accepted(*edits: tuple[str, str]) -> LoadedSpec:
    return load(edited(*edits), "spec.yaml")


def problems(text: str) -> tuple[str, ...]:
    try:
        load(text, "spec.yaml")
    except SpecError as error:
        return error.problems
    return ()


def refused(*edits: tuple[str, str]) -> tuple[str, ...]:
    return problems(edited(*edits))
