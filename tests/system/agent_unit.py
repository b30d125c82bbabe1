"""gpu-host-agent.service as it is shipped, in a ring: installed, changed by drop-ins, and taken away again."""

import json
import time
from collections.abc import Callable
from typing import Any

from tests.system.booted_systemd import REPOSITORY, BootedSystemd

NAME = "gpu-host-agent.service"
UNIT = REPOSITORY / "systemd" / NAME
INSTALLED = f"/etc/systemd/system/{NAME}"
SPEC = "apiVersion: gpu-host/v1\nkind: GpuHost\nmetadata: {name: ring}\nspec: {}\n"
PATIENCE = 60.0  # seconds until a state that does come; what never comes fails the test then


class AgentUnit:
    def __init__(self, ring: BootedSystemd) -> None:
        self.ring = ring
        ring.put(INSTALLED, UNIT.read_text())
        ring.put("/etc/gpu-host-agent/spec.yaml", SPEC)
        ring.do("systemctl", "daemon-reload")

    def drop_in(self, text: str) -> None:
        self.ring.put(f"{INSTALLED}.d/test.conf", text)
        self.ring.do("systemctl", "daemon-reload")

    def systemctl(self, verb: str, timeout: float = PATIENCE) -> None:
        self.ring.do("systemctl", verb, NAME, timeout=timeout)

    def show(self) -> dict[str, str]:
        return self.ring.show(NAME)

    def show_of(self, other: str) -> dict[str, str]:
        return self.ring.show(other)

    def pid(self) -> int:
        return int(self.show()["MainPID"])

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(
            self.ring.run(["agent", "status", "--host", "real", "-o", "json"])[1]
        )
        return status

    def journal(self) -> str:
        return self.ring.journal(NAME)

    def until(self, condition: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        """The unit's properties once they fulfil the condition. Raises AssertionError where they never do."""
        end = time.monotonic() + PATIENCE
        while not condition(found := self.show()):
            assert time.monotonic() < end, f"{found}\n{self.journal()}"
            time.sleep(0.1)
        return found

    def remove(self) -> None:
        self.ring.run(["systemctl", "disable", NAME])
        self.ring.run(["systemctl", "kill", "--signal=KILL", "--kill-who=all", NAME])
        self.ring.run(["systemctl", "stop", NAME])
        self.ring.run(["systemctl", "reset-failed", NAME])
        places = (INSTALLED, f"{INSTALLED}.d", "/etc/gpu-host-agent", "/var/lib/gpu-host-agent")
        self.ring.do("rm", "-rf", *places, "/run/gpu-host-agent")
        self.ring.do("systemctl", "daemon-reload")
        self.ring.do("journalctl", "--rotate", "--vacuum-time=1us")
