"""Where a service is: a revision keeps its own target, unit, port and served name, whatever the spec says by now."""

from agent.core.fact import Known
from agent.core.memory import Memory
from agent.core.observation import ServiceFacts
from agent.core.quantity import whole_number
from agent.core.render import DEFAULT_PORT, port_of
from agent.core.revision import Revision, option
from agent.core.spec import LxcTarget, Service, Spec, SshTarget, Target, target_name

Place = tuple[str, str]  # target_name() and unit


def placed(service: Service, revision: Revision) -> Service:
    """The service as this revision has it; its gate and its policies stay the spec's."""
    args = {**service.args, "port": revision.port, "served-model-name": revision.served_name}
    return at_place(service, (revision.target, revision.unit)).model_copy(update={"args": args})


def as_found(service: Service, facts: ServiceFacts) -> Service:
    """The service where it was found, and as the command line of its running process has it."""
    found = at_place(service, facts.at) if facts.at is not None else service
    return as_run(found, facts.process.value.argv) if isinstance(facts.process, Known) else found


def as_run(service: Service, argv: tuple[str, ...]) -> Service:
    """What another program than the server was told says nothing about port and name: then the spec's hold."""
    model = option(argv, "model-path")
    if not model:
        return service
    port, name = whole_number(option(argv, "port")), option(argv, "served-model-name")
    args = {
        **service.args,
        "port": port if port is not None and 0 < port < 1 << 16 else DEFAULT_PORT,
        "served-model-name": name or model,
    }
    return service.model_copy(update={"args": args})


def other_places(name: str, spec: Spec, memory: Memory) -> tuple[Place, ...]:
    """Where the agent started this service before, and where the spec now has neither it nor another service."""
    trial = memory.trials.get(name)
    records = (memory.promoted.get(name), memory.previous.get(name))
    known = [trial.revision if trial else None, *(p.revision for p in records if p is not None)]
    places = dict.fromkeys((r.target, r.unit) for r in known if r is not None)
    now = {(target_name(s.target), s.unit) for s in spec.services.values()}
    return tuple(p for p in places if p not in now)


def taken(revision: Revision, spec: Spec) -> bool:
    """Its unit or its port belongs to another service of the spec by now: to start it would stop that one."""
    others = [s for name, s in spec.services.items() if name != revision.service]
    return any(
        target_name(s.target) == revision.target and (s.unit == revision.unit or port_of(s) == revision.port)
        for s in others
    )


def at_place(service: Service, place: Place) -> Service:
    target, unit = place
    return service.model_copy(update={"target": _target(target), "unit": unit})


def _target(name: str) -> Target:
    """The inverse of ``target_name``."""
    kind, _, rest = name.partition(":")
    if kind == "lxc":
        return LxcTarget(lxc=int(rest))
    return SshTarget(ssh=rest) if kind == "ssh" else "host"
