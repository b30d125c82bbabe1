"""The trial's transition table, replayed over every sequence of results: it ends, and only a clean run is promoted."""

from collections.abc import Iterator
from itertools import product
from typing import get_args

import pytest

from agent.core.memory import Phase
from agent.core.trial import (
    PROVE_PHASES,
    RESTORE_PHASES,
    TRIAL_PHASES,
    PhaseResult,
    Step,
    TrialState,
    after_restore,
    deadline_of,
    next_step,
)  # fmt: skip

RESULTS: tuple[PhaseResult, ...] = get_args(PhaseResult)
POLICIES = list(product((True, False), ("rollback", "hold")))
Walk = tuple[tuple[Phase, PhaseResult], ...]


def runs(phases: tuple[Phase, ...], last_good: bool, on_failure: str) -> Iterator[tuple[Walk, Step]]:
    """Every possible trial: what happened phase by phase over both attempts, and how it ended."""
    stack: list[tuple[tuple[Phase, ...], Phase, int, Walk]] = [(phases, phases[0], 1, ())]
    while stack:
        sequence, phase, attempt, walked = stack.pop()
        assert len(walked) <= len(PROVE_PHASES) + 2 * len(TRIAL_PHASES), "a trial must end"
        for result in RESULTS:
            state = TrialState(sequence, phase, attempt, last_good, on_failure)  # type: ignore[arg-type]
            step, now = next_step(state, result), (*walked, (phase, result))
            if step.kind == "phase":
                assert step.phase is not None
                stack.append((sequence, step.phase, attempt, now))
            elif step.kind == "again":
                stack.append((TRIAL_PHASES, TRIAL_PHASES[0], attempt + 1, now))
            else:
                yield now, step


@pytest.mark.parametrize("phases", [TRIAL_PHASES, PROVE_PHASES], ids=["trial", "prove"])
@pytest.mark.parametrize(("last_good", "on_failure"), POLICIES)
def test_S8_every_sequence_of_results_ends_in_an_outcome(
    phases: tuple[Phase, ...], last_good: bool, on_failure: str
) -> None:
    endings = list(runs(phases, last_good, on_failure))
    assert len(endings) > 50
    for walked, step in endings:
        assert step.outcome is not None
        if step.kind == "restore":
            assert (last_good, on_failure) == (True, "rollback"), walked


@pytest.mark.parametrize("phases", [TRIAL_PHASES, PROVE_PHASES], ids=["trial", "prove"])
@pytest.mark.parametrize(("last_good", "on_failure"), POLICIES)
def test_only_a_trial_whose_last_attempt_was_ok_in_every_phase_is_promoted(
    phases: tuple[Phase, ...], last_good: bool, on_failure: str
) -> None:
    promoted = [walked for walked, step in runs(phases, last_good, on_failure) if step.outcome == "promoted"]
    assert promoted
    for walked in promoted:
        second = [n for n, (_, result) in enumerate(walked) if result == "inconclusive"]
        attempt = walked[second[-1] + 1 :] if second else walked
        assert tuple(phase for phase, _ in attempt) == (TRIAL_PHASES if second else phases)
        assert {result for _, result in attempt} == {"ok"}


@pytest.mark.parametrize(("last_good", "on_failure"), POLICIES)
def test_S6_no_data_is_never_a_pass_and_gets_one_more_start(last_good: bool, on_failure: str) -> None:
    for walked, step in runs(TRIAL_PHASES, last_good, on_failure):
        count = sum(result == "inconclusive" for _, result in walked)
        assert count <= 2
        if count == 2:
            assert step.outcome != "promoted"


@pytest.mark.parametrize("phases", [TRIAL_PHASES, PROVE_PHASES], ids=["trial", "prove"])
@pytest.mark.parametrize(("last_good", "on_failure"), POLICIES)
def test_S7_a_spec_edited_meanwhile_ends_the_trial_without_a_verdict(
    phases: tuple[Phase, ...], last_good: bool, on_failure: str
) -> None:
    for walked, step in runs(phases, last_good, on_failure):
        edited = walked[-1][1] == "superseded"
        assert (step.outcome == "superseded") == edited


@pytest.mark.parametrize(("last_good", "on_failure"), POLICIES)
def test_S4_and_S5_where_neither_revision_could_start_nothing_is_taken_back(
    last_good: bool, on_failure: str
) -> None:
    for walked, step in runs(TRIAL_PHASES, last_good, on_failure):
        phase, result = walked[-1]
        if phase == "assert-stopped" and result in {"failed", "timeout"}:
            assert step == Step("finish", outcome="failed")
        elif result in {"failed", "timeout"}:
            assert step.outcome in {"rolled-back", "held"}


def test_a_restored_revision_is_a_rollback_only_when_it_came_back_whole() -> None:
    assert {r: after_restore(r) for r in RESULTS} == {
        "ok": "rolled-back", "failed": "failed", "timeout": "failed", "inconclusive": "failed", "superseded": "superseded",
    }  # fmt: skip


@pytest.mark.parametrize(
    "phase", sorted({*TRIAL_PHASES, *PROVE_PHASES, *RESTORE_PHASES, "preflight", "drain"})
)
def test_S8_every_phase_has_a_deadline(phase: Phase) -> None:
    assert deadline_of(phase, start=1800.0, drain=60.0, stop=120.0, benchmark=3600.0) > 0
