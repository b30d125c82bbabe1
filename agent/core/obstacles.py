"""What stands against starting a service or testing its GPUs: nothing is stopped that could not start again."""

from collections.abc import Iterable

from agent.core.binding import SlotBinding, belongs_to
from agent.core.fact import Known, say
from agent.core.former import in_the_way
from agent.core.inputs import Inputs
from agent.core.memory import Memory
from agent.core.observation import Holder
from agent.core.p2p_decision import P2PDecision, unreadable
from agent.core.plan import Refusal
from agent.core.preflight import preflight
from agent.core.revision import Revision
from agent.core.spec import Service
from agent.core.verdict import fingerprint


def gpu_refusals(
    name: str, service: Service, gpus: tuple[str, ...], inputs: Inputs, slots: tuple[SlotBinding, ...]
) -> list[Refusal]:
    """GPUs that are not, and will not after this plan be, fit for the service."""
    if not isinstance(inputs.obs.pci, Known):
        message = f"the PCI tree cannot be read: {inputs.obs.pci.reason or 'not there'}"
        return [Refusal("service", name, "PciUnknown", message, "wait for the next pass")]
    wanted = inputs.spec.gpus[service.gpus].select
    count = len(wanted) if isinstance(wanted, tuple) else wanted.count
    refusals = []
    if len(gpus) < count:
        message = f"group {service.gpus} has {len(gpus)} of its {count} GPUs"
        refusals.append(
            Refusal("service", name, "GpusMissing", message, "see the driver binding's condition")
        )
    for slot in slots:
        if slot.gpu not in gpus or slot.ready or slot.refusal is None:
            continue
        why = slot.refusal
        reason = why.reason if why.terminal else "GpusNotReady"
        message = f"{slot.gpu} cannot be given to it: {why.message}"
        refusals.append(Refusal("service", name, reason, message, why.next_step, terminal=why.terminal))
    return refusals


def unasked(name: str, revision: Revision, memory: Memory) -> bool:
    """Nobody asked for another start of this revision: under this spec it has been started, or proved, already.

    Every edit asks for one start. After a rejection only an operator can ask for the next one.
    """
    trial, promoted = memory.trials.get(name), memory.promoted.get(name)
    if trial is None and promoted is not None:
        return (promoted.revision.id, promoted.generation) == (revision.id, memory.generation)
    if trial is None or trial.revision is None or trial.generation != memory.generation:
        return False
    started = any(n.phase == "start" for n in trial.notes)
    concluded = trial.outcome in {"promoted", "degraded"}
    open_still = trial.outcome in {None, "failed"}
    return trial.revision.id == revision.id and (concluded or (started and open_still))


def start_refusals(
    name: str, service: Service, revision: Revision, inputs: Inputs, *, remedy: bool
) -> list[Refusal]:
    """Every reason against a start of this revision; ``remedy``: nobody asked for it, and that has a budget."""
    refusals = preflight(name, service, revision, inputs)
    budget = inputs.spec.policy.budget.restarts
    used = [t for t in inputs.memory.starts if inputs.now - t < budget.window]
    if remedy and len(used) >= budget.count:  # a spec edit is the operator's will, not remediation
        message = (
            f"{len(used)} service starts in the last {budget.window:g} s, and the budget is {budget.count}"
        )
        step = f"look at the service's log, then run: agent retry {name}"
        refusals.append(Refusal("service", name, "BudgetExhausted", message, step))
    refusals += in_the_way(name, revision.gpus, revision.target, revision.port, inputs)
    terminal = inputs.memory.terminal.get(f"service/trial/{name}")
    if terminal:
        step = f"mend it, then run: agent retry {name}"
        refusals.append(Refusal("service", name, "TrialFailed", terminal, step, terminal=True))
    return refusals


def p2p_refusal(
    name: str, revision: Revision, p2p: P2PDecision, obstacle: str, inputs: Inputs
) -> Refusal | None:
    """p2p: required, and this revision is without: refused once a test has spoken, or when none can be run now."""
    if not p2p.refusal or revision.p2p:
        return None
    verdict = p2p.verdict
    tested = verdict is not None and verdict.fingerprint == fingerprint(inputs.obs, revision.gpus)
    if not tested and not obstacle:
        return None  # the self-test comes before the start in the same plan, and decides
    more = "" if tested else f"; the self-test cannot run now: {obstacle}"
    return Refusal(
        "service", name, "P2PRequired", p2p.refusal + more, "see the P2P condition, or set p2p: auto"
    )


def selftest_waits(name: str, inputs: Inputs) -> str:
    """The last self-test could not judge, and the time for the next has not come; "" when it has."""
    key = f"p2p/selftest/{name}"
    if key in inputs.memory.terminal:
        return f"{inputs.memory.terminal[key]}; not tried again before: agent retry {name}"
    left = inputs.memory.retry_after.get(key, 0.0) - inputs.now
    if left <= 0:
        return ""
    return f"{inputs.memory.errors.get(key, 'the last try failed')}; tried again in {left:.0f} s"


def selftest_obstacle(
    gpus: tuple[str, ...], slots: tuple[SlotBinding, ...], stopping: Iterable[Service], inputs: Inputs
) -> str:
    """Why the self-test of these GPUs cannot run in this plan; "" when it can.

    They must be, or by then will be, on nvidia and idle (a test disturbs who uses them), and the host must be
    readable: a verdict that is bound to unknown circumstances is worth nothing.
    """
    if unread := unreadable(inputs.obs, gpus):
        return unread
    stopped = list(stopping)
    for gpu in gpus:
        slot = next((s for s in slots if s.gpu == gpu), None)
        if slot is None or slot.driver != "nvidia":
            return f"{gpu} is not a GPU of the spec on nvidia"
        if not slot.ready:
            return f"{gpu}: {slot.refusal.message}" if slot.refusal else f"{gpu} is not ready"
        holders = inputs.obs.holders_of(gpu)
        if not isinstance(holders, Known):
            return f"who holds {gpu} is {say(holders)}"
        for holder in holders.value:
            if not _lets_be(holder, stopped, inputs):
                return f"{gpu}: {holder.describe()}"
    return ""


def _lets_be(holder: Holder, stopping: list[Service], inputs: Inputs) -> bool:
    """It uses no GPU, or is gone by then; units that the operator lets us stop hold GPUs without using them."""
    if holder.kind in {"persistence", "module"}:
        return True
    monitor = holder.unit in inputs.spec.policy.quiesce and not holder.container
    return monitor or any(belongs_to(holder, service) for service in stopping)
