"""What an observation teaches the memory: who the cards are, and which of them are lost."""

from agent.core.fact import Known, Unknown, value_or
from agent.core.kernel_log import is_lost, note
from agent.core.memory import Identity, Memory, Quarantine
from agent.core.observation import Observation
from agent.core.p2p_decision import standing
from agent.core.selection import identify, same_card


def absorb(memory: Memory, obs: Observation, now: float) -> Memory:
    """Memory with identities, quarantines and revoked verdicts brought up to date; the same object when nothing is new."""
    changes: dict[str, object] = {}
    identities = _identities(memory, obs)
    if identities != memory.identities:
        changes["identities"] = identities
    quarantine = _quarantine(memory, obs, now)
    if quarantine != memory.quarantine:
        changes["quarantine"] = quarantine
    verdicts = tuple(standing(v, obs, v.gpus) or v for v in memory.verdicts)
    if verdicts != memory.verdicts:
        changes["verdicts"] = verdicts  # the line that revokes may be overwritten in the kernel's ring buffer
    return memory.model_copy(update=changes) if changes else memory


def _identities(memory: Memory, obs: Observation) -> dict[str, Identity]:
    """First seen stays: another card at a known address is the selection's to refuse, not ours to learn."""
    known = dict(memory.identities)
    if not isinstance(obs.pci, Known):
        return known
    for address, function in obs.pci.value.functions.items():
        if not function.is_gpu:
            continue
        seen = identify(address, function, obs, {})
        old = known.get(address)
        if old is None:
            if seen.uuid or seen.serial:
                known[address] = identify(address, function, obs, known)
        elif same_card(old, seen) and ((seen.uuid and not old.uuid) or (seen.serial and not old.serial)):
            known[address] = old.model_copy(update={k: v for k, v in seen.model_dump().items() if v})
    return known


def _quarantine(memory: Memory, obs: Observation, now: float) -> dict[str, Quarantine]:
    boot = value_or(obs.platform.boot_id, "")
    kept = {a: q for a, q in memory.quarantine.items() if not boot or q.boot_id == boot}
    for event in value_or(obs.kernel_events, ()):
        if boot and event.address and event.address not in kept and is_lost(event):
            message = f"{note(event).meaning}: {event.sample}"
            kept[event.address] = Quarantine(
                address=event.address, reason="GpuLost", message=message, boot_id=boot, at=now
            )
    for address, gpu in obs.nvml.value.gpus.items() if isinstance(obs.nvml, Known) else ():
        if isinstance(gpu, Unknown) and gpu.code == "GpuLost" and address not in kept and boot:
            kept[address] = Quarantine(
                address=address, reason="GpuLost", message=gpu.reason, boot_id=boot, at=now
            )
    return kept
