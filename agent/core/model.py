"""The model of the host that plans are walked through: an observation with one thing changed."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.inputs import Inputs
from agent.core.memory import Memory
from agent.core.observation import Gpu, Holder, Nvml, Pci, PciFunction, ServiceFacts


def with_function(inputs: Inputs, function: PciFunction) -> Inputs:
    if not isinstance(inputs.obs.pci, Known):
        return inputs
    pci = inputs.obs.pci.value
    functions = {**pci.functions, function.address: function}
    obs = replace(inputs.obs, pci=Known(Pci(functions, pci.groups, pci.pending_unbinds)))
    return replace(inputs, obs=obs)


def with_gpu(inputs: Inputs, address: str, change: Callable[[Gpu], Gpu]) -> Inputs:
    if not isinstance(inputs.obs.nvml, Known):
        return inputs
    nvml = inputs.obs.nvml.value
    gpu = nvml.gpus.get(address)
    if not isinstance(gpu, Known):
        return inputs
    return with_gpus(inputs, {**nvml.gpus, address: Known(change(gpu.value))})


def with_gpus(inputs: Inputs, gpus: Mapping[str, Fact[Gpu]]) -> Inputs:
    nvml: Fact[Nvml] = inputs.obs.nvml
    if isinstance(nvml, Known):
        nvml = Known(replace(nvml.value, gpus=dict(gpus)))
    elif isinstance(nvml, Unknown):
        return inputs  # an NVML that failed goes on failing: the model knows no better
    elif gpus:
        nvml = Known(Nvml(driver_version=inputs.obs.platform.nvidia_driver, gpus=dict(gpus)))
    return replace(inputs, obs=replace(inputs.obs, nvml=nvml if gpus else Absent("no GPU is on nvidia")))


def without_holders(inputs: Inputs, gone: Callable[[Holder], bool]) -> Inputs:
    """Holders for which ``gone`` is true have let go."""
    holders = {
        address: Known(tuple(h for h in fact.value if not gone(h))) if isinstance(fact, Known) else fact
        for address, fact in inputs.obs.holders.items()
    }
    return replace(inputs, obs=replace(inputs.obs, holders=holders))


def with_service(inputs: Inputs, name: str, change: Callable[[ServiceFacts], ServiceFacts]) -> Inputs:
    facts = inputs.obs.services.get(name, ServiceFacts())
    return replace(inputs, obs=replace(inputs.obs, services={**inputs.obs.services, name: change(facts)}))


def with_memory(inputs: Inputs, **changes: object) -> Inputs:
    memory: Memory = inputs.memory.model_copy(update=changes)
    return replace(inputs, memory=memory)
