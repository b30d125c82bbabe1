"""Driver binding, done: the writes behind each verb, each read back (law 6).

Order on the device: override first, so that nothing can grab it in between; then unbind, where it can be abandoned;
then probe; then the driver link, which alone tells. What fails goes back where it was, the whole card with it.
Sources: Documentation/ABI/testing/sysfs-bus-pci, NVIDIA open-gpu-kernel-modules (nv_pci_remove waits for ever).
"""

import contextlib

from agent.core.errors import TerminalError, TransientError
from agent.core.fact import Absent, Fact, Known, Unknown, say, value_or
from agent.core.unbind_state import REBOOT, blocked_in, is_running, waits_for_user
from agent.ports import START_WITHIN, Ports

UNBIND_DEADLINE = 60.0  # seconds; NVIDIA's remove() either returns in a few or never
# The write to drivers_probe comes back when the driver's probe() has; only a probe that was put off comes later.
PROBE_DEADLINE = 5.0
UNIT_DEADLINE = 60.0
POLL = 0.25
# After START_WITHIN, for what was started in its last moment to be seen at work.
STARTED_LATE = 2.0
UDEV_RULES = "/etc/udev/rules.d/50-gpu-host-agent.rules"
MODULES = {
    "nvidia": "nvidia",
    "vfio-pci": "vfio-pci",
    "snd_hda_intel": "snd_hda_intel",
    "xhci_hcd": "xhci_pci",
}

Move = tuple[str, str]  # a function's address and the driver it goes to; "": whatever the host gives it


class UnbindStuckError(TerminalError):
    """An unbind did not return: the device is out of reach until a reboot (law 2).

    ``waits_for_user``: or until a VFIO user lets go of it, for then the kernel is known to go on.
    """

    def __init__(self, address: str, seconds: float, state: str = "running") -> None:
        super().__init__(
            f"the unbind of {address} has not returned for {seconds:.0f} s{blocked_in(state)}:"
            " something in the kernel still holds it",
            reason="RebootRequired",
            next_step=f"{REBOOT}; until then this GPU is left alone",
        )
        self.address = address
        self.waits_for_user = waits_for_user(state)


async def set_persistence(address: str, ports: Ports, *, on: bool) -> None:
    await ports.nvml.set(address, "persistence-mode", "on" if on else "off")
    if await _persistence(address, ports) != Known(on):
        raise TransientError(f"persistence mode of {address} reads back unchanged", reason="ReadBackFailed")


async def _persistence(address: str, ports: Ports) -> Fact[bool]:
    nvml = await ports.nvml.read()
    gpu = nvml.value.gpus.get(address) if isinstance(nvml, Known) else None
    return gpu.value.persistence_mode if isinstance(gpu, Known) else Unknown("NVML does not show this GPU")


async def switch_unit(unit: str, ports: Ports, *, on: bool) -> None:
    host = ports.targets("host")
    await (host.start_unit(unit) if on else host.stop_unit(unit))
    wanted = {"active"} if on else {"inactive", "failed"}
    deadline = ports.clock.monotonic() + UNIT_DEADLINE
    while (await host.unit(unit)).active_state not in wanted:
        if ports.clock.monotonic() > deadline:
            raise TransientError(
                f"{unit} did not {'start' if on else 'stop'} within {UNIT_DEADLINE:.0f} s", reason="UnitStuck"
            )
        await ports.clock.sleep(POLL)


async def write_rules(text: str, ports: Ports) -> None:
    host = ports.targets("host")
    await (host.write_file(UDEV_RULES, text) if text else host.remove_file(UDEV_RULES))
    if (await host.read_file(UDEV_RULES) or "") != text:
        raise TransientError(
            f"{UDEV_RULES} reads back different from what was written", reason="ReadBackFailed"
        )


async def mend_overrides(moves: list[Move], ports: Ports) -> None:
    for address, driver in moves:
        await _override(address, driver, ports)


async def _override(address: str, driver: str, ports: Ports) -> None:
    await ports.pci.set_override(address, driver)
    function = (await ports.pci.read()).functions.get(address)
    found: Fact[str] = function.driver_override if function else Unknown("the device is gone")
    if found != Known(driver) if driver else not isinstance(found, Absent):
        message = f"driver_override of {address} was set to {driver or 'none'} and reads back {say(found)}"
        raise TransientError(message, reason="ReadBackFailed")


async def rebind(moves: list[Move], ports: Ports) -> None:
    """Move the functions of one card, the GPU first; when one cannot move, those that did go back."""
    await _assert_free([a for a, _ in moves], ports)
    moved: list[tuple[str, Fact[str]]] = []
    for address, driver in moves:
        before = await ports.pci.read_driver(address)
        if before == Known(driver):
            continue
        try:
            await _move(address, before, driver, ports)
        except (TransientError, OSError):
            for other, was in reversed(moved):
                await _go_back(other, was, ports)
            raise
        moved.append((address, before))
    if any(driver == "nvidia" for _, driver in moves):
        # The card is where it belongs with or without: what stays missing is a drift of its own.
        with contextlib.suppress(OSError):
            await ports.platform.make_device_nodes()


async def _assert_free(addresses: list[str], ports: Ports) -> None:
    """Law 1 once more, at the last moment: what was free when the plan was made may be held now."""
    for address in addresses:
        if await ports.pci.read_driver(address) == Known("nvidia"):
            mode = await _persistence(address, ports)
            if mode != Known(value=False):
                reason = "Held" if isinstance(mode, Known) else "HoldersUnknown"
                raise TransientError(f"persistence mode of {address} is not off any more", reason=reason)
    holders = await ports.holders.read(addresses)
    for address in addresses:
        fact = holders.get(address)
        if not isinstance(fact, Known):
            raise TransientError(f"who holds {address} cannot be told any more", reason="HoldersUnknown")
        if fact.value:
            raise TransientError(f"{address}: {fact.value[0].describe()}", reason="Held")


async def _move(address: str, before: Fact[str], wanted: str, ports: Ports) -> None:
    try:
        if wanted:
            await ports.platform.load_module(MODULES.get(wanted, wanted))
        await _override(address, wanted, ports)
        if isinstance(before, Known):
            await _unbind(address, before.value, ports)
        await _probe(address, wanted, ports)
        if wanted != "vfio-pci":
            await _override(address, "", ports)
    except (TransientError, OSError):  # a stuck unbind is neither: nothing more is written to that device
        await _go_back(address, before, ports)
        raise


async def _unbind(address: str, driver: str, ports: Ports) -> None:
    await _assert_free([address], ports)  # it may have been opened since the rest of its card was moved
    await _start_unbind(address, driver, ports)
    deadline = ports.clock.monotonic() + UNBIND_DEADLINE
    while is_running(state := await _unbind_state(address, ports)):
        if ports.clock.monotonic() > deadline:
            raise UnbindStuckError(address, UNBIND_DEADLINE, state)
        await ports.clock.sleep(POLL)
    if state.startswith("failed"):
        raise TransientError(f"unbinding {address} from {driver} {state}", reason="UnbindFailed")
    if isinstance(await ports.pci.read_driver(address), Known):
        raise TransientError(f"{address} is still on a driver after its unbind", reason="ReadBackFailed")


async def _start_unbind(address: str, driver: str, ports: Ports) -> None:
    """Raises only where it is certain that no unbind runs or will run: until then any other write may make it hang."""
    try:
        await ports.pci.start_unbind(address, driver, START_WITHIN)
    except (TimeoutError, ConnectionError):
        too_late = ports.clock.monotonic() + START_WITHIN + STARTED_LATE
        while not await _has_begun(address, ports):
            if ports.clock.monotonic() > too_late:
                raise
            await ports.clock.sleep(POLL)


async def _has_begun(address: str, ports: Ports) -> bool:
    """The driver link goes first. What cannot be read may well have begun."""
    try:
        if address in (await ports.pci.read()).pending_unbinds:
            return True
    except OSError:
        return True
    return isinstance(await ports.pci.read_driver(address), Absent)


async def _unbind_state(address: str, ports: Ports) -> str:
    """A state that cannot be read may be a running unbind: any other write to the device would wait behind it."""
    try:
        return await ports.pci.unbind_state(address)
    except OSError:
        return "running"


async def _probe(address: str, wanted: str, ports: Ports) -> None:
    """drivers_probe succeeds also when nothing was bound: only the driver link tells."""
    await ports.pci.probe(address)
    if not wanted:
        if await ports.pci.read_driver(address) == Known("vfio-pci"):
            message = f"{address} was probed for a driver of the host, and vfio-pci took it"
            step = "look for vfio-pci.ids= on the kernel command line and for ids= in modprobe.d"
            raise TransientError(message, reason="BindFailed", next_step=step)
        return
    deadline = ports.clock.monotonic() + PROBE_DEADLINE
    while (found := await ports.pci.read_driver(address)) != Known(wanted):
        if ports.clock.monotonic() > deadline:
            message = f"{address} was probed for {wanted}, and its driver is {say(found)}"
            raise TransientError(
                message, reason="BindFailed", next_step="see the kernel log for the driver's own error"
            )
        await ports.clock.sleep(POLL)


async def _go_back(address: str, before: Fact[str], ports: Ports) -> None:
    """Put the function back on the driver it had, as far as that goes, and leave no override behind."""
    with contextlib.suppress(TransientError, OSError):
        now = await ports.pci.read_driver(address)
        if isinstance(before, Known | Absent) and now != before:
            await ports.pci.set_override(address, value_or(before, ""))
            if isinstance(now, Known):
                await _unbind(address, now.value, ports)
            if isinstance(before, Known):
                await ports.pci.probe(address)
    if before != Known("vfio-pci"):
        with contextlib.suppress(OSError):  # the next pass finds an override that stays behind
            await ports.pci.set_override(address, "")
