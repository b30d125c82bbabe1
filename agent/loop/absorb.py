"""What an observation teaches the memory: who the cards are, and which of them are lost."""

from collections.abc import Mapping
from typing import TypeVar

from agent.core.fact import Known, Unknown, value_or
from agent.core.kernel_log import is_lost, note
from agent.core.memory import Identity, Memory, Quarantine, Unbinding
from agent.core.observation import Observation
from agent.core.p2p_decision import standing
from agent.core.redact import redact
from agent.core.selection import identify, same_card
from agent.core.unbind_state import is_running
from agent.core.wedged import busy_alone


def absorb(memory: Memory, obs: Observation, now: float) -> Memory:
    """Memory with identities, quarantines and revoked verdicts brought up to date; the same object when nothing is new."""
    changes: dict[str, object] = {}
    identities = learned(memory, obs)
    if identities != memory.identities:
        changes["identities"] = identities
    unbinding = _unbinding(memory, obs)
    if unbinding != memory.unbinding:
        changes["unbinding"] = unbinding
    quarantine = _quarantine(memory, obs, now)
    if quarantine != memory.quarantine:
        changes["quarantine"] = quarantine
    alone = busy_alone(memory.busy_alone, obs, now)
    if alone != memory.busy_alone:
        changes["busy_alone"] = alone
    verdicts = tuple(standing(v, obs, v.gpus) or v for v in memory.verdicts)
    if verdicts != memory.verdicts:
        changes["verdicts"] = verdicts  # the line that revokes may be overwritten in the kernel's ring buffer
    asked = tuple(name for name in memory.asked if _silent(name, obs))
    if asked != memory.asked:
        changes["asked"] = asked
    return memory.model_copy(update=changes) if changes else memory


def _silent(name: str, obs: Observation) -> bool:
    facts = obs.services.get(name)
    return facts is not None and not isinstance(facts.health, Known)


def learned(memory: Memory, obs: Observation) -> dict[str, Identity]:
    """The cards as far as they are known by now.

    First seen stays: another card at a known address is the selection's to refuse, not ours to learn.
    """
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


Entry = TypeVar("Entry", Quarantine, Unbinding)


def _of_this_boot(entries: Mapping[str, Entry], boot: str) -> dict[str, Entry]:
    """Another boot ends them. What was recorded while the boot could not be told is taken for this one's from now on."""
    if not boot:
        return dict(entries)
    kept = {a: e for a, e in entries.items() if e.boot_id in {"", boot}}
    return {a: e if e.boot_id else e.model_copy(update={"boot_id": boot}) for a, e in kept.items()}


def _unbinding(memory: Memory, obs: Observation) -> dict[str, Unbinding]:
    """Unbinds that an agent before this one may have begun, and of which nothing proves that they have returned."""
    left = _of_this_boot(memory.unbinding, value_or(obs.platform.boot_id, ""))
    return {a: entry for a, entry in left.items() if not _returned(a, obs)}


def _returned(address: str, obs: Observation) -> bool:
    state = obs.unbinds.get(address)
    if not isinstance(state, Known) or not isinstance(obs.pci, Known):
        return False
    return not is_running(state.value) and address not in obs.pci.value.pending_unbinds


def _quarantine(memory: Memory, obs: Observation, now: float) -> dict[str, Quarantine]:
    boot = value_or(obs.platform.boot_id, "")
    kept = _of_this_boot(memory.quarantine, boot)
    for event in value_or(obs.kernel_events, ()):
        if boot and event.address and event.address not in kept and is_lost(event):
            message = f"{note(event).meaning}: {redact(event.sample)}"
            kept[event.address] = Quarantine(
                address=event.address, reason="GpuLost", message=message, boot_id=boot, at=now
            )
    for address, gpu in obs.nvml.value.gpus.items() if isinstance(obs.nvml, Known) else ():
        if isinstance(gpu, Unknown) and gpu.code == "GpuLost" and address not in kept and boot:
            kept[address] = Quarantine(
                address=address, reason="GpuLost", message=redact(gpu.reason), boot_id=boot, at=now
            )
    return kept
