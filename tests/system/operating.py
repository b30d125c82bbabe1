"""The agent as a guest's service, worked as a person would: edit the spec, read the status, look at the kernel.

    host = Operated(vm)
    host.start(vfio=GPUS[4:])          # writes the spec, starts the service, waits until it is so
    host.edit(vfio=GPUS)               # the spec alone
    host.wait_bound(GPUS)              # status and the kernel's own links agree
    host.condition("DriversBound")     # as in status.json

Status is read from its file: a call of the command line takes seconds here.
"""

import json
import re
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from tests.system.guest_agent import SPEC, STATE, STATUS, UNIT, look
from tests.system.vm.machine import AUDIO, GPUS, PCI, VirtualMachine

JOURNAL = f"{STATE}/journal.jsonl"
_NVML_CALLS = "/run/nvml-calls"
_TRACING = "/sys/kernel/tracing"
# The kernel's own functions behind the three files; the name of the third differs between versions.
_PROBES = {
    "unbind_store": "unbind device=+0(%si):string",
    "drivers_probe_store": "probe device=+0(%si):string",
    "driver_set_override": "override device=+0(+0(%di)):string value=+0(%dx):string",
    "__device_set_driver_override": "override2 device=+0(+0(%di)):string value=+0(%si):string",
}
_WAIT = 400.0  # seconds; a card takes 5 to move, and many more where other work has the processors
_FIRST_LOOK, _NEXT_LOOK = 1.0, 6.0  # seconds until a waiting test tells the agent to look


class Write(NamedTuple):
    """A write to a file that binds: ``unbind``, ``probe`` or ``override``, of which device."""

    file: str
    device: str


def spec(gpus: Iterable[str], vfio: Iterable[str], **changes: Any) -> str:
    """Those on vfio-pci and the other GPUs on nvidia. ``changes``: more of the policy; ``rest``: more of the spec."""
    given = list(vfio)
    rest = changes.pop("rest", {})
    groups = {"nvidia": [gpu for gpu in gpus if gpu not in given], "vfio-pci": given}
    gpus = {driver: {"select": cards, "driver": driver} for driver, cards in groups.items() if cards}
    policy = {"mode": "enforce", "allow": ["live", "restart", "rebind"], "resync": "20s", **changes}
    head = {"apiVersion": "gpu-host/v1", "kind": "GpuHost", "metadata": {"name": "guest"}}
    return json.dumps({**head, "spec": {"policy": policy, "gpus": gpus, **rest}}, indent=2)


class Operated:
    """One guest with the agent as its service, and everything that can be asked about the two."""

    def __init__(self, vm: VirtualMachine) -> None:
        self.vm = vm
        self.gpus = GPUS[: vm.hardware.gpus]
        self.audio = AUDIO[: vm.hardware.gpus]
        drop_in = f"[Service]\nEnvironment=NVML_STUB_TRACE={_NVML_CALLS}\n"
        vm.put(f"/run/systemd/system/{UNIT}.d/trace.conf", drop_in)
        vm.check("systemctl daemon-reload")
        self._probe_the_kernel()

    # The agent

    def start(self, vfio: Iterable[str] = (), **changes: Any) -> None:
        """With a spec; returns when the bindings are as it says."""
        given = list(vfio)
        self.edit(given, **changes)
        self.vm.check(f"systemctl start {UNIT}", timeout=300)
        self.wait_bound(given)

    def restart(self) -> None:
        """Returns when the agent says that it is ready for work."""
        self.vm.check(f"systemctl restart {UNIT}", timeout=300)

    def edit(self, vfio: Iterable[str], **changes: Any) -> None:
        self.vm.put(SPEC, spec(self.gpus, vfio, **changes))

    def status(self) -> dict[str, Any]:
        """status.json; {} where there is none yet."""
        try:
            found: dict[str, Any] = json.loads(self.vm.read(STATUS))
        except FileNotFoundError:
            return {}
        return found

    def condition(self, kind: str) -> dict[str, Any]:
        """The condition of that type; {} where it is not there."""
        return next((c for c in self.status().get("conditions", ()) if c["type"] == kind), {})

    def intents(self) -> list[str]:
        """Keys of the actions in the agent's own journal, oldest first."""
        records = (json.loads(line) for line in self.vm.read(JOURNAL).splitlines())
        return [record["action"] for record in records if record["event"] == "intent"]

    def passes(self) -> list[dict[str, Any]]:
        """What the agent logged of each pass since the guest's boot, oldest first."""
        lines = self.vm.check(f'journalctl -u {UNIT} -o cat --no-pager | grep \'"event": "pass"\' || true')
        return [json.loads(line) for line in lines.splitlines()]

    def nvml_calls(self) -> list[str]:
        """Every call of an NVML function by the agent since ``forget_nvml_calls``, with the GPU it was about."""
        try:
            return self.vm.read(_NVML_CALLS).splitlines()
        except FileNotFoundError:
            return []

    def forget_nvml_calls(self) -> None:
        self.vm.check(f"rm -f {_NVML_CALLS}")

    # Waiting

    def wait(self, condition: Callable[[], bool], what: str, *, by_itself: bool = False) -> None:
        """Ask until it is so; fails with the status, the links and the guest's journal.

        The agent is told to look now and then, so that its own rhythm may be slow: each of its passes is work for the
        processor that is emulated. ``by_itself``: it is not told.
        """
        begun = time.monotonic()
        next_look = begun + (_WAIT if by_itself else _FIRST_LOOK)
        while not condition():
            now = time.monotonic()
            assert now < begun + _WAIT, f"waited {_WAIT:g}s for {what}\n{self.seen()}"
            if now > next_look:
                look(self.vm)
                next_look = now + _NEXT_LOOK
            time.sleep(0.3)

    def wait_condition(
        self, kind: str, status: str, reason: str, *, text: str = "", by_itself: bool = False
    ) -> dict[str, Any]:
        """The condition, once it is so and its message has that text in it."""

        def so() -> bool:
            found = self.condition(kind)
            return (found.get("status"), found.get("reason")) == (status, reason) and text in found["message"]

        self.wait(so, f"{kind} to be {status} for {reason} with {text!r}", by_itself=by_itself)
        return self.condition(kind)

    def wait_bound(self, vfio: Iterable[str], *, by_itself: bool = False) -> None:
        """Until status is Ready with those GPUs on vfio-pci; then the kernel must say the same of every function.

        Overrides as they must be left behind, too: vfio-pci's own, and no other.
        """
        given = set(vfio)
        wanted = {gpu: "vfio-pci" if gpu in given else "nvidia" for gpu in self.gpus}

        def so() -> bool:
            status = self.status()
            said = {g["address"]: (g["desired_driver"], g["driver"]) for g in status.get("gpus", ())}
            return (
                status.get("ready") == "True"
                and not status["activity"]
                and said == {gpu: (driver, driver) for gpu, driver in wanted.items()}
            )

        self.wait(
            so, f"{sorted(given) or 'nothing'} to be on vfio-pci, and the rest on nvidia", by_itself=by_itself
        )
        for gpu, audio in zip(self.gpus, self.audio, strict=True):
            wanted[audio] = "vfio-pci" if gpu in given else "snd_hda_intel"
        assert self.vm.links(wanted) == wanted, self.seen()
        overrides = {address: self.vm.override(address) for address in wanted}
        assert overrides == {a: d if d == "vfio-pci" else "" for a, d in wanted.items()}, self.seen()

    def wait_passes(self, count: int) -> None:
        """Until that many further passes have ended, each asked for by SIGHUP: a resync would take its time."""
        for _ in range(count):
            before = self._last_pass()
            look(self.vm)
            self.wait(partial(self._passed, before), "another pass to end")

    def _passed(self, before: float) -> bool:
        return self._last_pass() > before

    def _last_pass(self) -> float:
        """When it began, by the guest's clock; 0 before the first has ended."""
        return float((self.status().get("last_pass") or {}).get("started_at", 0.0))

    def seen(self) -> str:
        """For the message of a failure."""
        status = self.status()
        said = [
            f"{c['type']} {c['status']} {c['reason']}: {c['message']}" for c in status.get("conditions", ())
        ]
        notes = [f"{g['address']}: {g['note']}" for g in status.get("gpus", ()) if g["note"]]
        doing = [
            f"ready {status.get('ready')}, doing {status.get('activity')!r}",
            str(status.get("last_pass")),
        ]
        return "\n".join(
            [*doing, *said, *notes, str(self.vm.links([*self.gpus, *self.audio])), self.vm.log_tail()]
        )

    # The kernel

    def _probe_the_kernel(self) -> None:
        known = self.vm.check("cat /proc/kallsyms")
        for function, event in _PROBES.items():
            if re.search(rf" [tT] {function}$", known, re.MULTILINE):
                name, _, arguments = event.partition(" ")
                line = f"p:bindings/{name} {function} {arguments}"
                self.vm.check(f"echo '{line}' >> {_TRACING}/kprobe_events")
        self.vm.check(f"echo 1 > {_TRACING}/events/bindings/enable")

    def writes(self) -> list[Write]:
        """Every write to an unbind, drivers_probe or driver_override file since ``forget_writes``, whoever made it.

        Seen by probes in the kernel, in the order of the writes.
        """
        pattern = r": (unbind|probe|override)2?: \(.*?\) device=\"([0-9a-f:.]*)"
        found = re.findall(pattern, self.vm.check(f"cat {_TRACING}/trace"))
        return [Write(file, device) for file, device in found]

    def forget_writes(self) -> None:
        self.vm.check(f"echo > {_TRACING}/trace")

    def minors(self) -> dict[str, int]:
        """The minor number of each GPU on nvidia: N of its /dev/nvidiaN."""
        lines = self.vm.check("grep -H 'Device Minor:' /proc/driver/nvidia/gpus/*/information || true")
        return {line.split("/")[5]: int(line.rpartition(":")[2]) for line in lines.splitlines()}

    def kernel_saw_no_unbind_in_use(self) -> bool:
        """The driver has never been asked to let go of a card that somebody used."""
        return not any("non-zero usage count" in line for line in self.vm.kernel_log())

    def gone(self, address: str) -> bool:
        return not self.vm.names(f"{PCI}/{address}")
