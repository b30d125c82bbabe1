"""The spec in force: what makes a generation, what a bad file changes (nothing), and what a kill leaves."""

import errno
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.core.errors import SpecError
from agent.core.memory import Grant, Identity
from agent.loop.journal import Journal
from agent.loop.specs import Specs
from agent.loop.store import Store
from agent.ports import SpecText
from tests.forked import fork, wait
from tests.rig import RECIPE, recipe

GOOD = RECIPE.read_text()
CARD = Identity(address="0000:01:00.0", uuid="GPU-1", serial="", slot="1")


@dataclass
class Source:
    """``SpecSource`` whose text a test replaces; an exception in its place is raised."""

    text: str | Exception = GOOD
    reads: int = field(default=0)

    async def read(self) -> SpecText:
        self.reads += 1
        if isinstance(self.text, Exception):
            raise self.text
        return SpecText(self.text, "spec.yaml")


@dataclass
class Kept:
    """A state directory on which specs are opened anew, as after a restart."""

    folder: Path
    source: Source = field(default_factory=Source)
    journals: list[Journal] = field(default_factory=list)

    def open(self) -> Specs:
        journal = Journal(self.folder / "journal.jsonl")
        self.journals.append(journal)
        return Specs(self.source, Store(self.folder), journal, lambda: 1.0)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    made = Kept(tmp_path)
    yield made
    for journal in made.journals:
        journal.close()


async def test_the_first_accepted_content_is_generation_1(kept: Kept) -> None:
    specs = kept.open()
    await specs.refresh()
    assert specs.accepted
    assert specs.host is not None
    assert specs.store.memory.generation == 1


async def test_another_content_is_another_generation_and_the_same_one_is_not(kept: Kept) -> None:
    specs = kept.open()
    await specs.refresh()
    kept.source.text = recipe()
    await specs.refresh()
    await specs.refresh()
    assert specs.store.memory.generation == 2


@pytest.mark.parametrize(
    "text", ["# a comment\n" + GOOD, GOOD + "\n\n", GOOD.replace("driver: nvidia", 'driver: "nvidia"')]
)
async def test_comments_blanks_and_quotes_make_no_generation(kept: Kept, text: str) -> None:
    specs = kept.open()
    await specs.refresh()
    assert text != GOOD
    kept.source.text = text
    assert not await specs.peek_changed()
    await specs.refresh()
    assert specs.accepted
    assert specs.store.memory.generation == 1


async def test_a_restart_makes_no_generation(kept: Kept) -> None:
    await kept.open().refresh()
    again = kept.open()
    await again.refresh()
    assert again.store.memory.generation == 1


@pytest.mark.parametrize(
    "broken",
    [
        GOOD.replace("driver: nvidia", "driver: nvidai"),
        "",
        FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "spec.yaml"),
        SpecError(("spec.yaml: group-writable: chmod g-w spec.yaml",)),
    ],
)
async def test_a_spec_that_is_refused_changes_nothing_and_its_problems_are_said(
    kept: Kept, broken: str | Exception
) -> None:
    specs = kept.open()
    await specs.refresh()
    before = (specs.host, specs.store.memory)
    kept.source.text = broken
    assert not await specs.peek_changed()
    await specs.refresh()
    assert not specs.accepted
    assert any("spec.yaml" in problem for problem in specs.problems)
    assert (specs.host, specs.store.memory) == before
    kept.source.text = GOOD
    await specs.refresh()
    assert specs.accepted
    assert specs.store.memory.generation == 1


async def test_beside_a_broken_file_a_restart_keeps_the_last_good_spec_in_force(kept: Kept) -> None:
    await kept.open().refresh()
    kept.source.text = "spec: ["
    again = kept.open()
    await again.refresh()
    assert again.host is not None
    assert not again.accepted
    assert again.store.memory.generation == 1


async def test_a_host_that_never_had_a_good_spec_has_none(kept: Kept) -> None:
    kept.source.text = "spec: ["
    specs = kept.open()
    await specs.refresh()
    assert specs.host is None
    assert specs.problems
    assert specs.store.memory.generation == 0


async def test_peeking_sees_a_change_and_accepts_nothing(kept: Kept) -> None:
    specs = kept.open()
    await specs.refresh()
    kept.source.text = recipe()
    assert await specs.peek_changed()
    assert specs.store.memory.generation == 1


async def test_a_new_generation_answers_the_failures_and_approvals_of_the_old_one(kept: Kept) -> None:
    specs = kept.open()
    await specs.refresh()
    grant = Grant(plan_id="p", generation=1, disruption=3, touches=("u",), at=1.0)
    specs.store.update(
        failures={"a": 3}, retry_after={"a": 9.0}, terminal={"b": "x"}, grant=grant, approved="p"
    )
    kept.source.text = recipe()
    await specs.refresh()
    memory = specs.store.memory
    assert (memory.failures, memory.retry_after, memory.terminal) == ({}, {}, {})
    assert (memory.grant, memory.approved) == (None, "")


async def test_cards_stay_known_while_the_selection_stays(kept: Kept) -> None:
    specs = kept.open()
    await specs.refresh()
    specs.store.update(identities={CARD.address: CARD})
    kept.source.text = recipe()
    await specs.refresh()
    assert specs.store.memory.identities == {CARD.address: CARD}


async def test_cards_are_learned_anew_where_the_selection_changed(kept: Kept) -> None:
    specs = kept.open()
    await specs.refresh()
    specs.store.update(identities={CARD.address: CARD})
    kept.source.text = GOOD.replace("0000:01:00.0", "0000:02:00.0")
    await specs.refresh()
    assert specs.store.memory.generation == 2
    assert CARD.address not in specs.store.memory.identities


@pytest.mark.parametrize("moment", ["stage_text", "save", "settle_staged"])
@pytest.mark.parametrize("after", [False, True])
async def test_law_8_killed_while_it_accepts_a_spec_the_old_one_or_the_new_one_is_in_force_whole(
    kept: Kept, moment: str, after: bool
) -> None:
    first = kept.open()
    await first.refresh()
    first.store.update(identities={CARD.address: CARD})
    new = GOOD.replace("0000:01:00.0", "0000:02:00.0")
    kept.source.text = new

    def work() -> None:
        specs = kept.open()
        with pytest.MonkeyPatch.context() as patch:
            _kill_at(patch, moment, after=after)
            run_without_a_loop(specs)

    assert wait(fork(work, kept.folder / "notes"), kept.folder / "notes") == -signal.SIGKILL
    kept.source.text = "spec: ["  # what is in force now must not come from the file
    again = kept.open()
    await again.refresh()
    memory, host = again.store.memory, again.host
    assert host is not None
    takes_new = "0000:02:00.0" in host.spec.gpus["inference"].select
    assert takes_new == (memory.generation == 2)
    assert takes_new == (CARD.address not in memory.identities)
    kept.source.text = new
    await again.refresh()
    assert again.store.memory.generation == 2
    assert CARD.address not in again.store.memory.identities
    assert not (kept.folder / "spec.staged.yaml").exists()


def _kill_at(patch: pytest.MonkeyPatch, moment: str, *, after: bool) -> None:
    work = getattr(Store, moment)

    def killing(*arguments: object, **named: object) -> None:
        if after:
            work(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    patch.setattr(Store, moment, killing)


def run_without_a_loop(specs: Specs) -> None:
    """``refresh`` waits for nothing here, so it ends at its first step."""
    with pytest.raises(StopIteration):
        specs.refresh().send(None)
