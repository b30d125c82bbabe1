"""Preflight: what can be known before a running service is stopped. A failed check costs no downtime."""

from agent.core.fact import Absent, Fact, Known, Unknown, say
from agent.core.inputs import Inputs
from agent.core.observation import TargetFacts
from agent.core.placing import placed
from agent.core.plan import Refusal
from agent.core.revision import Revision, option
from agent.core.spec import Service, target_name

# With P2P off NCCL moves data through /dev/shm; below this it fails or hangs at start.
SHM_NEEDED = 1 << 30


def preflight(name: str, service: Service, revision: Revision, inputs: Inputs) -> list[Refusal]:
    """Every reason not to stop and start this service now, where this revision runs."""
    service = placed(service, revision)
    place = target_name(service.target)
    target = inputs.obs.targets.get(place)
    if target is None:
        return [_refusal(name, "TargetUnknown", f"{place} was not observed", "wait for the next pass")]
    if not isinstance(target.reachable, Known) or not target.reachable.value:
        why = "it is not running" if isinstance(target.reachable, Known | Absent) else target.reachable.reason
        message = f"{place} cannot be reached: {why}"
        return [_refusal(name, "TargetUnreachable", message, "start the container or repair the connection")]
    checks = (
        _unit(name, service, inputs),
        _driver(name, place, target, inputs),
        _nvml_inside(name, place, target, inputs),
        _nvml_on_host(name, inputs),
        _shm(name, target, revision),
        _model(name, revision, inputs),
        _parallelism(name, service, revision),
    )
    return [refusal for refusal in checks if refusal is not None]


def _refusal(name: str, reason: str, message: str, next_step: str) -> Refusal:
    return Refusal("service", name, reason, message, next_step)


def _unit(name: str, service: Service, inputs: Inputs) -> Refusal | None:
    facts = inputs.obs.services.get(name)
    if facts is not None and facts.at not in {None, (target_name(service.target), service.unit)}:
        return None  # it runs elsewhere, so its new unit was not looked at: loop/lifecycle.py does, before any stop
    unit = facts.unit if facts else Unknown("not observed")
    if isinstance(unit, Unknown):
        return _refusal(
            name, "UnitUnknown", f"its unit cannot be read: {unit.reason}", "wait for the next pass"
        )
    if isinstance(unit, Absent) or unit.value.load_state == "not-found":
        return unit_missing(name, service)
    return None


def unit_missing(name: str, service: Service) -> Refusal:
    message = f"there is no unit {service.unit} in {target_name(service.target)}"
    step = "create the unit there; the agent owns only a drop-in of it"
    return _refusal(name, "UnitMissing", message, step)


def driver_versions(target: TargetFacts, inputs: Inputs) -> tuple[str, str] | None:
    """(user space in the target, kernel module) when both are known and differ."""
    user, kernel = target.user_driver, inputs.obs.platform.nvidia_driver
    if isinstance(user, Known) and isinstance(kernel, Known) and user.value != kernel.value:
        return user.value, kernel.value
    return None


def _driver(name: str, place: str, target: TargetFacts, inputs: Inputs) -> Refusal | None:
    if (differ := driver_versions(target, inputs)) is not None:
        message = (
            f"user-space driver {differ[0]} in {place}, kernel module {differ[1]} on the host (NVML error 18)"
        )
        return _refusal(name, "DriverMismatch", message, f"install user-space driver {differ[1]} in {place}")
    if isinstance(target.user_driver, Absent):
        return _refusal(
            name, "DriverMissing", f"no NVIDIA user-space driver in {place}", f"install it in {place}"
        )
    return None


def _nvml_inside(name: str, place: str, target: TargetFacts, inputs: Inputs) -> Refusal | None:
    """The host may see GPUs that the target has lost, for instance after a daemon-reload."""
    if not isinstance(target.nvml, Unknown) or not target.nvml.code.startswith("Nvml"):
        return None
    message = f"NVML fails in {place}: {target.nvml.reason}"
    if target.nvml.code == "NvmlVersionMismatch":
        if driver_versions(target, inputs) is not None:
            return None  # said with both versions already
        version = say(inputs.obs.platform.nvidia_driver)
        return _refusal(name, "DriverMismatch", message, f"install user-space driver {version} in {place}")
    return _refusal(name, "TargetLostGpus", message, f"restart {place} so that it gets its devices back")


def _nvml_on_host(name: str, inputs: Inputs) -> Refusal | None:
    """Without NVML nothing could tell, once the service is stopped, whether its GPUs are free for the next start."""
    if not isinstance(inputs.obs.nvml, Unknown):
        return None
    message = f"NVML fails on the host: {inputs.obs.nvml.reason}"
    return _refusal(name, "HostNvmlFails", message, "see DriverVersionsAgree; else wait for the next pass")


def _shm(name: str, target: TargetFacts, revision: Revision) -> Refusal | None:
    size: Fact[int] = target.shm_bytes
    if revision.p2p or len(revision.gpus) < 2 or not isinstance(size, Known) or size.value >= SHM_NEEDED:
        return None
    message = f"/dev/shm is {size.value >> 20} MiB, and with P2P off NCCL needs at least {SHM_NEEDED >> 20} MiB there"
    return _refusal(
        name, "ShmTooSmall", message, "enlarge /dev/shm in the target: mount -o remount,size=16G /dev/shm"
    )


def _model(name: str, revision: Revision, inputs: Inputs) -> Refusal | None:
    """Only the spec's model is looked for, at the spec's target: of a revision with another nothing is known."""
    facts, meant = inputs.obs.services.get(name), inputs.spec.services[name]
    path = option(revision.argv, "model-path")
    looked_for = (target_name(meant.target), meant.args.get("model-path"))
    if (revision.target, path) != looked_for:
        return None
    if facts is not None and facts.model_present == Known(value=False):
        return _refusal(
            name,
            "ModelMissing",
            f"the model path {path} does not exist in the target",
            "mount or copy the model there",
        )
    return None


def _parallelism(name: str, service: Service, revision: Revision) -> Refusal | None:
    given = (option(revision.argv, flag) for flag in ("tensor-parallel-size", "tp-size", "tp"))
    tp = next((int(size) for size in given if size.isdecimal()), 1)
    if tp > len(revision.gpus):
        message = f"tensor-parallel-size {tp} needs {tp} GPUs; group {service.gpus} has {len(revision.gpus)}"
        return _refusal(name, "TooFewGpus", message, "correct the group or tensor-parallel-size")
    return None
