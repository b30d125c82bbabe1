"""Law 10 on a whole host: what a unit's log, an error or the kernel quotes is nobody's to read, and stops nothing."""

import asyncio
from pathlib import Path

import pytest

from tests.cases.operating import CANDIDATE, TARGET, UNIT, patient_health, qwen, recipe, rig, steady
from tests.rig import Rig

TOKEN = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ01234567"
KEY = "verysecretverysecret0000"
LICENSE = "4711-0815-4711"  # no well-known shape: secret because the spec says so
LOG = [f"ServerArgs(api_key='{KEY}')", f"401 for token {TOKEN}", f"LICENSE={LICENSE} is void"]
FILE = "/etc/secrets/license"
SECRETS = qwen(secrets={"LICENSE": FILE})
FILES = ("var/lib/gpu-host-agent/journal.jsonl", "var/lib/gpu-host-agent/memory.json")
STATUS = "run/gpu-host-agent/status.json"


class Told:
    """``NotifyPort`` and the log: everything that was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def send(self, state: str) -> None:
        self.lines.append(state)

    def log(self, *events: object, **fields: object) -> None:
        self.lines.append(repr((events, fields)))


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    patient_health(monkeypatch)
    steady(monkeypatch)


def listen(host: Rig) -> Told:
    told = Told()
    host.agent.reconciler.publisher.notify = told
    host.agent.reconciler.log = told.log
    return told


async def promoted(host: Rig) -> None:
    await host.agent.ports.targets(TARGET).write_file(FILE, LICENSE)
    await host.converge()
    assert host.condition("ServiceReady/qwen").reason == "Promoted"


def crash_at_start(host: Rig, times: int) -> None:
    with host.world.change() as state:
        crash = {"status": 1, "after": 1, "log": LOG}
        state.added_faults.append({"on": "service.start", "times": times, "crash": crash})


def nothing_was_told(host: Rig, told: Told) -> None:
    said = {name: (host.root / name).read_text() for name in (*FILES, STATUS)} | {
        "STATUS= and log": "\n".join(told.lines)
    }
    assert "401 for token (not shown)" in said[FILES[0]]
    for place, text in said.items():
        for secret in (TOKEN, KEY, LICENSE):
            assert secret not in text, f"{place} tells a secret"


async def test_law_10_a_credential_in_the_log_of_a_unit_that_died_is_told_nowhere_and_it_is_started_again(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, spec=recipe(**SECRETS)) as host:
        await promoted(host)
        told = listen(host)
        crash_at_start(host, times=1)
        await host.agent.ports.targets(TARGET).stop_unit(UNIT)
        await host.one_pass()
        nothing_was_told(host, told)
        for _ in range(20):
            await asyncio.sleep(0.1)
            result = await host.converge()
            if host.condition("ServiceReady/qwen").status == "True":
                break
        assert not result.blocked
        assert host.condition("ServiceReady/qwen").reason == "Promoted"


async def test_law_10_a_credential_in_the_reason_of_a_rejection_does_not_keep_the_last_good_one_down(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path, spec=recipe(**SECRETS)) as host:
        await promoted(host)
        told = listen(host)
        crash_at_start(host, times=1)
        host.write_spec(recipe(**qwen(args=CANDIDATE, secrets={"LICENSE": FILE})))
        await host.converge()
        assert host.condition("ServiceReady/qwen").reason == "RolledBack"
        nothing_was_told(host, told)
        await host.agent.ports.targets(TARGET).stop_unit(UNIT)
        result = await host.converge()
        assert not result.blocked
        assert host.condition("ServiceReady/qwen").reason == "RolledBack"
