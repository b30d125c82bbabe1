"""The agent in a virtual machine, as its tests ask it: specs, plans, observations, and what the daemon says."""

import contextlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.system.vm.machine import VirtualMachine

SPEC = "/etc/gpu-host-agent/spec.yaml"
STATUS = "/run/gpu-host-agent/status.json"
STATE = "/var/lib/gpu-host-agent"
GUEST_CODE = Path(__file__).parent / "vm/guest_code"
_STEPS = (GUEST_CODE / "agent_steps.py").read_text()
UNIT = "gpu-host-agent.service"
_LOOK_EVERY = 20  # questions, five in a second

Document = dict[str, Any]


def look(vm: VirtualMachine) -> None:
    """Ask the guest's daemon for a pass, if it runs, and do not wait for it.

    Its own rhythm may so be slow: each of its passes is work for the processor that is emulated.
    """
    vm.run(f"systemctl -q is-active {UNIT} && systemctl reload --no-block {UNIT}")


class Step(NamedTuple):
    """A plan for ``spec``, made after ``files`` (path -> text) were written."""

    spec: str
    files: Mapping[str, str] = {}


def spec(body: str, *, mode: str = "observe") -> str:
    """A spec with this body, indented as below ``spec:``."""
    head = "apiVersion: gpu-host/v1\nkind: GpuHost\nmetadata: {name: guest}\nspec:\n"
    return f"{head}  policy: {{mode: {mode}, resync: 20s}}\n{body}"


class GuestAgent:
    """The agent of one guest: its commands, which need no daemon, and the daemon's own words."""

    def __init__(self, vm: VirtualMachine) -> None:
        self._vm = vm

    # Commands

    def plans(self, steps: Sequence[Step]) -> list[Document]:
        """The plan of every step, by ``agent plan``, in the steps' order."""
        argv = ["plan", "--host", "real", "-o", "json"]
        asked = [{"files": {SPEC: s.spec, **s.files}, "argv": argv} for s in steps]
        return self._ask(asked, {0, 2, 3})

    def plan(self, text: str, files: Mapping[str, str] | None = None) -> Document:
        (plan,) = self.plans([Step(text, files or {})])
        return plan

    def observation(self) -> Document:
        """All that ``agent observe`` shows; asserts that it is no simulated host's."""
        (seen,) = self._ask([{"files": {}, "argv": ["observe", "--host", "real", "-o", "json"]}], {0})
        assert seen["simulated"] == ""
        return seen

    def _ask(self, steps: Sequence[Document], allowed: set[int]) -> list[Document]:
        answers = json.loads(self._vm.python(_STEPS, json.dumps(steps), timeout=120).splitlines()[-1])
        for status, out in answers:
            assert status in allowed, f"the agent ended with status {status}:\n{out}"
        return [json.loads(out) for _, out in answers]

    # The daemon

    def put_spec(self, text: str) -> None:
        """At once and whole, as an editor would."""
        self._vm.put(f"{SPEC}.new", text)
        self._vm.check(f"mv {SPEC}.new {SPEC}")

    def systemctl(self, verb: str) -> None:
        self._vm.check(f"systemctl {verb} {UNIT}", timeout=180)

    def status(self) -> Document:
        document: Document = json.loads(self._vm.read(STATUS))
        return document

    def condition(self, kind: str) -> Document:
        """The daemon's condition of that type; empty where it says nothing of it."""
        found = [c for c in self.status()["conditions"] if c["type"] == kind]
        return found[0] if found else {}

    def saved_events(self) -> list[Document]:
        """What the daemon has counted of the kernel log."""
        events: list[Document] = json.loads(self._vm.read(f"{STATE}/kernel-log.json"))["events"]
        return events

    def until(self, condition: Callable[[], bool], what: str, timeout: float = 180) -> None:
        """Ask until it is so. A failure shows what the daemon said last, and the journal."""

        looks = itertools.count(1)

        def now() -> bool:
            with contextlib.suppress(FileNotFoundError):  # it has written nothing yet
                if condition():
                    return True
            if next(looks) % _LOOK_EVERY == 1:
                look(self._vm)
            return False

        try:
            self._vm.wait_for(now, what, timeout)
        except AssertionError as error:
            said = self._vm.run(f"cat {STATUS} {STATE}/kernel-log.json").out
            raise AssertionError(f"{error}\n--- status and kernel log\n{said}") from error


def drift(plan: Document, field: str) -> Document:
    """What the plan says is not as specified; empty where it is."""
    found: list[Document] = [d for d in plan["drifts"] if d["field"] == field]
    return found[0] if found else {}


def refusal(plan: Document, target: str) -> Document:
    found: list[Document] = [r for r in plan["refusals"] if r["target"] == target]
    return found[0] if found else {}
