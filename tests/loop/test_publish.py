"""Status leaves whole, in time, and never looks better than it is."""

import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.core.condition import Condition
from agent.core.status import Status
from agent.loop.journal import Journal
from agent.loop.publish import ACTIVITY_EVERY, Publisher, View
from agent.loop.specs import Specs
from agent.loop.store import Store
from agent.ports import SpecText
from tests.loop.manual_clock import ManualClock
from tests.rig import rig

VIEW = View("pass", "test", 1.0, 0.1)


@dataclass
class Told:
    """``NotifyPort`` that remembers."""

    states: list[str] = field(default_factory=list)

    def send(self, state: str) -> None:
        self.states.append(state)


class NoSource:
    async def read(self) -> SpecText:
        raise FileNotFoundError


@dataclass
class Desk:
    publisher: Publisher
    clock: ManualClock
    told: Told
    specs: Specs

    def publish(self, sentence: str = "Converged: nothing to do.", *conditions: Condition) -> None:
        self.publisher.publish_without_spec(self.specs, conditions, sentence, VIEW)

    @property
    def status(self) -> Status:
        return Status.model_validate_json(self.publisher.path.read_bytes())


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    clock, told, journal = ManualClock(), Told(), Journal(tmp_path / "journal.jsonl")
    publisher = Publisher(tmp_path / "run/status.json", clock, journal, told, "esc8000a")
    yield Desk(publisher, clock, told, Specs(NoSource(), Store(tmp_path), journal, clock.now))
    publisher.last_words("the test is over", trusted=False)
    journal.close()


def test_nothing_is_published_before_the_first_pass_has_ended(desk: Desk) -> None:
    desk.publisher.activity("binding")
    desk.publisher.last_words("The pass failed.", trusted=False)
    assert not desk.publisher.path.exists()
    assert desk.told.states == ["STATUS=SIMULATED: The pass failed."]


def test_the_status_says_when_it_was_published_and_when_it_must_not_be_believed_any_more(desk: Desk) -> None:
    desk.publish()
    assert desk.status.published_at == desk.clock.now()
    assert desk.status.stale_after > 0


def test_anybody_may_read_the_status(desk: Desk) -> None:
    desk.publish()
    assert desk.publisher.path.stat().st_mode & 0o777 == 0o644


def test_law_9_a_simulated_host_says_so_in_every_line_for_systemd(desk: Desk) -> None:
    desk.publish("Converged: nothing to do.")
    desk.publisher.activity("qwen: benchmark")
    assert all(state.startswith("STATUS=SIMULATED: ") for state in desk.told.states)
    assert desk.status.host.simulated == "esc8000a"


def test_a_line_for_systemd_is_one_line_and_short(desk: Desk) -> None:
    desk.publish("first\nsecond " + "x" * 1000)
    (line,) = desk.told.states
    assert "\n" not in line
    assert len(line) <= 400


def test_a_status_that_cannot_be_written_fails_nothing_is_told_and_is_written_when_it_can_be(
    desk: Desk,
) -> None:
    desk.publish("first")
    path, said = desk.publisher.path, list[str]()
    desk.publisher.log = lambda event, **_fields: said.append(event)
    path.unlink()
    path.mkdir()
    for _ in range(2):
        desk.publish("second")
    desk.publisher.last_words("third", trusted=False)
    assert all("status.json cannot be written: " in line for line in desk.told.states[1:])
    assert desk.told.states[-1].endswith("; third")
    assert [p.name for p in path.parent.iterdir()] == ["status.json"], "no temporary file is left beside it"
    path.rmdir()
    desk.publish("fourth")
    assert desk.status.last_pass is not None
    assert desk.status.last_pass.sentence == "fourth"
    assert said == ["status cannot be written", "status is written again"]


async def test_an_unchanged_status_that_could_not_be_written_is_tried_again_by_the_next_pass(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        path = agent.agent.paths.status
        await agent.one_pass()
        path.unlink()
        path.mkdir()
        agent.agent.reconciler.publisher.activity("looking")
        await agent.one_pass()
        path.rmdir()
        await agent.one_pass()
        assert agent.status().ready == "True"


async def test_activity_is_published_at_most_once_a_second(desk: Desk) -> None:
    desk.publish()
    desk.publisher.activity("step 1")
    assert desk.status.activity == "step 1"
    for number in range(2, 50):
        desk.publisher.activity(f"step {number}")
    assert desk.status.activity == "step 1"
    desk.clock.go_on(ACTIVITY_EVERY)
    desk.publisher.activity("step 50")
    assert desk.status.activity == "step 50"


async def test_a_sign_of_life_without_words_keeps_the_last_ones_and_makes_the_status_fresh(
    desk: Desk,
) -> None:
    desk.publish()
    desk.publisher.activity("qwen: ready")
    desk.clock.go_on(30.0)
    desk.publisher.activity("")
    assert desk.status.activity == "qwen: ready"
    assert desk.status.published_at == desk.clock.now()


async def test_the_end_of_a_pass_ends_its_activity(desk: Desk) -> None:
    desk.publish()
    desk.publisher.activity("qwen: ready")
    desk.publish()
    assert desk.status.activity == ""


async def test_law_9_after_the_last_words_nobody_takes_the_host_for_ready(tmp_path: Path) -> None:
    async with rig(tmp_path) as agent:
        await agent.converge()
        assert agent.status().ready == "True"
        agent.agent.reconciler.publisher.last_words("Stopped.", trusted=False)
        status = agent.status()
        assert status.ready == "Unknown"
        assert status.last_pass is not None
        assert status.last_pass.sentence == "Stopped."
        assert status.services[0].argv, "what was known stays readable"


def test_a_reader_never_sees_half_a_file(desk: Desk) -> None:
    desk.publish()
    seen: set[str] = set()
    broken: list[str] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            data = desk.publisher.path.read_bytes()
            try:
                seen.add(json.loads(data)["last_pass"]["sentence"][:8])
            except (ValueError, KeyError) as error:
                broken.append(f"{error!r} in {data[:80]!r}")

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(300):
            desk.publish(f"{number:08d} " + "x" * (number * 37 % 5000))
    finally:
        stop.set()
        reader.join()
    assert broken == []
    assert seen


def test_no_temporary_file_is_left_beside_the_status(desk: Desk) -> None:
    for number in range(3):
        desk.publish(str(number))
    assert [p.name for p in desk.publisher.path.parent.iterdir()] == ["status.json"]
