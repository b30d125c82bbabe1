"""A service by the whole agent on a real systemd: written, started, proved, kept as it is, brought back.

The spec names the unit by an alias. What is served is a stand-in without a model, and the GPU is made of files.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.agent_unit import AgentUnit
from tests.system.booted_systemd import BootedSystemd
from tests.system.requirements import need_programs
from tests.system.ring_card import CARD, ENVIRONMENT, insert_card, remove_card

pytestmark = pytest.mark.system
UNIT, ALIAS, NAME = "model-own.service", "model.service", "model"
DROP_IN = f"/etc/systemd/system/{ALIAS}.d/50-gpu-host-agent.conf"
SECRETS = f"/run/gpu-host-agent/secrets/{NAME}.env"
SECRET = 's3cret $HOME "q" `x` \\'
STATUS = "/run/gpu-host-agent/status.json"
JOURNAL = "/var/lib/gpu-host-agent/journal.jsonl"
SERVER = Path(__file__).with_name("launch_server.py").read_text()
UNIT_FILE = f"[Service]\nExecStart=/bin/false\n[Install]\nWantedBy=multi-user.target\nAlias={ALIAS}\n"
NASTY = {
    "json-model-override-args": '{"a b": "$HOME ${HOME} $$", "c": "100%n"}',
    "chat-template": 'it\'s ünïcode ✓ back\\slash\\ "quoted" ; *',
}
ENV = {"PYTHONPATH": "/opt/served", "NASTY": "a  b $X %n \\ \"q\" 'é'"}
PATIENCE = 60.0  # seconds until a state that does come
SPEC = {
    "apiVersion": "gpu-host/v1",
    "kind": "GpuHost",
    "metadata": {"name": "guest"},
    "spec": {
        "policy": {"resync": "20s", "budget": {"restarts": "30 per 1h"}},
        "gpus": {"card": {"select": [CARD], "driver": "nvidia"}},
        "services": {
            NAME: {
                "runtime": "sglang",
                "unit": ALIAS,
                "gpus": "card",
                "p2p": "off",
                "args": {"model-path": "/srv/model", "port": 30017, **NASTY},
                "env": ENV,
                "secrets": {"HF_TOKEN": "/etc/hf-token"},
                "gate": {
                    "benchmark": {
                        "concurrency": [1],
                        "inputTokens": 4,
                        "outputTokens": 10,
                        "requestsPerSlot": 1,
                        "repeats": 1,
                    },
                    "regression": {"throughput": "90%", "latencyP50": "900%", "latencyP95": "900%"},
                },
            }
        },
    },
}


class Served:
    """A ring with the agent as its service, and the one service that its spec names."""

    def __init__(self, ring: BootedSystemd) -> None:
        self.ring = ring
        self.agent = AgentUnit(ring)

    def start(self) -> None:
        """Returns when the service is promoted."""
        ring = self.ring
        ring.put("/opt/served/sglang/__init__.py", "")
        ring.put("/opt/served/sglang/launch_server.py", SERVER)
        ring.put("/srv/model/config.json", "{}")
        ring.put("/etc/hf-token", f"{SECRET}\n", 0o600)
        ring.put(f"/etc/systemd/system/{UNIT}", UNIT_FILE)
        ring.put("/etc/gpu-host-agent/spec.yaml", json.dumps(SPEC))
        ring.do("systemctl", "daemon-reload")
        ring.do("systemctl", "enable", UNIT)
        self.agent.drop_in(ENVIRONMENT)
        self.agent.systemctl("start")
        self.wait_proved(0.0)

    def remove(self) -> None:
        self.agent.remove()
        for verb in (("kill", "--signal=KILL"), ("stop",), ("reset-failed",), ("disable",)):
            self.ring.run(["systemctl", *verb, UNIT])
        places = (f"/etc/systemd/system/{name}{end}" for name in (UNIT, ALIAS) for end in ("", ".d"))
        self.ring.do("rm", "-rf", *places, "/opt/served", "/srv/model", "/etc/hf-token")
        self.ring.do("systemctl", "daemon-reload")

    # What the agent says

    def status(self) -> dict[str, Any]:
        out = self.ring.run(["cat", STATUS])[1]
        found: dict[str, Any] = json.loads(out) if out.startswith("{") else {}
        return found

    def service(self) -> dict[str, Any]:
        found: dict[str, Any] = next(iter(self.status().get("services", ())), {})
        return found

    def trial(self) -> dict[str, Any]:
        found: dict[str, Any] = self.service().get("trial") or {}
        return found

    def reason(self) -> str:
        """Of the service's condition."""
        conditions = self.status().get("conditions", ())
        return next((c["reason"] for c in conditions if c["type"] == f"ServiceReady/{NAME}"), "")

    def passes(self) -> list[dict[str, Any]]:
        """What the agent logged of each pass, oldest first."""
        lines = self.agent.journal().splitlines()
        return [json.loads(line) for line in lines if '"event": "pass"' in line]

    # What systemd and the kernel say

    def show(self, *names: str) -> list[str]:
        """Properties of the unit, asked for by its alias."""
        found = self.ring.show(ALIAS)
        return [found[name] for name in names]

    def pid(self) -> int:
        return int(self.show("MainPID")[0])

    def of_process(self, file: str) -> list[str]:
        """The words of /proc/PID/cmdline or environ of what runs."""
        return self.ring.read(f"/proc/{self.pid()}/{file}").removesuffix("\0").split("\0")

    # Waiting

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, f"waited {PATIENCE:g} s for {what}\n{self.seen()}"
            time.sleep(0.05)

    def wait_proved(self, since: float) -> None:
        """Until a trial that ended after ``since`` has promoted what runs."""

        def proved() -> bool:
            trial = self.trial()
            ended = trial.get("finished_at") or 0.0
            return trial.get("outcome") == "promoted" and ended > since and self.reason() == "Promoted"

        self.wait(proved, "the service to be proved and promoted")

    def wait_trigger(self, trigger: str, after: int) -> None:
        """Until a pass has ended that this began, beyond the first ``after``: it ends when its trials have."""
        self.wait(
            lambda: trigger in [found["trigger"] for found in self.passes()[after:]],
            f"the end of a pass that {trigger!r} began",
        )

    def seen(self) -> str:
        """For the message of a failure."""
        status = {**self.status(), "journal": (), "plan": {}}
        journal = self.ring.run(["tail", "-n", "30", JOURNAL])[1]
        return f"{json.dumps(status, indent=1)[-6000:]}\n{journal}\n{self.agent.journal()[-3000:]}"


@pytest.fixture(scope="module")
def served(ring: BootedSystemd) -> Iterator[Served]:
    need_programs(gcc="gcc")
    insert_card(ring)
    service = Served(ring)
    try:
        service.start()
        yield service
    finally:
        service.remove()
        remove_card(ring)


def test_a_service_is_written_started_proved_and_promoted_under_an_alias_of_its_unit(served: Served) -> None:
    assert served.show("Id", "ActiveState", "SubState", "Result", "NeedDaemonReload") == [
        UNIT, "active", "running", "success", "no",
    ]  # fmt: skip
    assert DROP_IN in served.show("DropInPaths")[0].split()
    service = served.service()
    assert (service["unit"], service["state"], service["health"]) == (ALIAS, "active", "ok")
    assert service["revision"] == service["promoted"] != ""
    (level,) = service["benchmark"]["levels"]
    assert (level["ok"], level["tokens"]) == (level["requests"], level["expected_tokens"])
    assert level["requests"] > 0
    assert served.status()["host"]["simulated"] == ""


def test_S12_the_process_has_exactly_the_words_and_variables_of_the_spec(served: Served) -> None:
    words = [
        "/usr/bin/python3",
        "-m",
        "sglang.launch_server",
        "--model-path",
        "/srv/model",
        "--port",
        "30017",
    ]
    for name, value in NASTY.items():
        words += [f"--{name}", value]
    assert served.of_process("cmdline") == [*words, "--disable-custom-all-reduce"]
    environ = dict(pair.split("=", 1) for pair in served.of_process("environ"))
    wanted = {**ENV, "HF_TOKEN": SECRET, "NCCL_P2P_DISABLE": "1"}
    assert {name: environ.get(name) for name in wanted} == wanted


def test_S13_a_secret_is_in_one_file_that_only_root_reads_and_nowhere_else(served: Served) -> None:
    modes = served.ring.do("stat", "-c", "%a %U:%G", SECRETS, str(Path(SECRETS).parent)).splitlines()
    assert modes == ["600 root:root", "700 root:root"]
    word = SECRET.split(maxsplit=1)[0]
    assert word in served.ring.read(SECRETS)
    places = ("/var/lib/gpu-host-agent", "/etc/systemd/system", STATUS)
    assert served.ring.run(["grep", "-rl", word, *places]) == (1, "")
    assert word not in served.agent.journal()
    assert word not in str(served.ring.show(ALIAS))


def test_a_killed_service_is_seen_by_systemds_signal_and_brought_back_proved(
    served: Served, record_property: Callable[[str, object], None]
) -> None:
    before, passes, since = served.pid(), len(served.passes()), time.time()
    served.ring.do("kill", "-KILL", str(before))
    killed = time.monotonic()
    served.wait(lambda: served.reason() != "Promoted", "the agent to see that the service is gone")
    record_property("a killed service is seen after, seconds", round(time.monotonic() - killed, 2))
    served.wait_proved(since)
    assert served.pid() not in {0, before}
    assert served.show("ActiveState", "NRestarts") == ["active", "0"], "only the agent may start it again"
    served.wait_trigger("unit changed", passes)


def test_a_drop_in_edited_by_a_foreign_hand_is_taken_back_and_what_runs_is_proved_anew(
    served: Served, record_property: Callable[[str, object], None]
) -> None:
    written, since = served.ring.read(DROP_IN), time.time()
    served.ring.put(DROP_IN, written.replace("[Service]\n", "[Service]\nEnvironment=FOREIGN=1\n"))
    edited = time.monotonic()
    served.wait(lambda: served.ring.read(DROP_IN) == written, "the drop-in to be as the agent wrote it")
    record_property("an edited drop-in is repaired after, seconds", round(time.monotonic() - edited, 2))
    served.wait_proved(since)
    assert served.show("NeedDaemonReload") == ["no"]
    assert "FOREIGN=1" not in served.of_process("environ")


def test_an_edit_that_systemd_has_read_already_is_taken_back_too(
    served: Served, record_property: Callable[[str, object], None]
) -> None:
    """The reload is a signal: no resync is waited for."""
    written, passes, since = served.ring.read(DROP_IN), len(served.passes()), time.time()
    served.ring.put(DROP_IN, written.replace("[Service]\n", "[Service]\nEnvironment=FOREIGN=1\n"))
    served.ring.do("systemctl", "daemon-reload")
    reloaded = time.monotonic()
    assert "FOREIGN=1" in served.show("Environment")[0]
    served.wait(lambda: served.ring.read(DROP_IN) == written, "the drop-in to be as the agent wrote it")
    record_property(
        "an edit that was loaded is repaired after, seconds", round(time.monotonic() - reloaded, 2)
    )
    served.wait_proved(since)
    assert "FOREIGN=1" not in served.show("Environment")[0]
    served.wait_trigger("unit changed", passes)


def test_a_later_drop_in_of_somebody_else_is_found_in_what_runs_and_said(served: Served) -> None:
    """It changes a variable that the agent decides, in a file that is not the agent's: nothing is promoted on it."""
    foreign = f"/etc/systemd/system/{UNIT}.d/90-foreign.conf"
    written = served.ring.read(DROP_IN)
    served.ring.put(foreign, "[Service]\nEnvironment=NCCL_P2P_DISABLE=0\n")
    served.ring.do("systemctl", "daemon-reload")
    served.ring.do("kill", "-KILL", str(served.pid()))
    served.wait(
        lambda: served.trial().get("reason") == "NotEffective",
        "the agent to say that what runs is not what was rendered",
    )
    assert served.ring.read(DROP_IN) == written
    assert served.ring.run(["test", "-e", foreign])[0] == 0, "what is not the agent's is not touched"
