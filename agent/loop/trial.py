"""A trial, run: phases with deadlines, then promoted, rolled back, held or superseded (core/trial.py decides which)."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from agent.core.bench import FORMULA, BenchmarkKey, BenchmarkResult, LevelResult
from agent.core.errors import TerminalError, TransientError
from agent.core.fact import say
from agent.core.gate import add_result, baseline_for, certain_failure, judge
from agent.core.inputs import Inputs
from agent.core.memory import Memory, Outcome, Phase, PhaseNote, Promoted, Rejected, TrialRecord
from agent.core.obstacles import unasked
from agent.core.p2p_decision import decide
from agent.core.placing import placed
from agent.core.redact import redact
from agent.core.render import without_p2p
from agent.core.resolve import ResolvedService, last_good, p2p_allowed, resolve, trial_key
from agent.core.revision import Revision, option
from agent.core.smoke import prompts_for
from agent.core.spec import Service, SmokePrompt
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
from agent.loop.deadline import SupersededError, within
from agent.loop.journal import Journal
from agent.loop.lifecycle import Lifecycle, PhaseFailedError
from agent.loop.store import Store

Mode = Literal["trial", "prove"]
LOG_READ = 30.0  # seconds for reading the log of a failed start
KILL_GRACE = 60.0  # seconds for SIGKILL to take effect, beyond the time a stop may take


@dataclass(slots=True)
class Trials:
    """Runs trials for the executor. ``look`` observes anew; ``edited`` is set when the spec's content changes."""

    lifecycle: Lifecycle
    store: Store
    journal: Journal
    look: Callable[[], Awaitable[Inputs]]
    edited: asyncio.Event
    progress: Callable[[str], None]
    refresh: Callable[[], Awaitable[None]]

    async def preflight(self, name: str) -> None:
        inputs = await self.look()
        service = resolve(inputs).services[name]
        if service.effective is None:
            raise TransientError(f"{name}: {service.reason}", reason="NotRenderable")
        try:
            at = placed(service.service, service.effective)
            await self.lifecycle.preflight(name, at, service.effective, inputs)
        except PhaseFailedError as error:
            said = redact(str(error), service.service.secrets)
            raise TransientError(said, reason=error.reason) from error

    async def stop(self, name: str) -> None:
        """Drain, stop, assert stopped: the plan's stop action.

        Raises SupersededError when the spec is edited before the stop: users need not lose it for an old plan.
        """
        inputs = await self.look()
        service = resolve(inputs).services[name]
        gate, steps, running = service.service.gate, self.lifecycle, service.found
        try:
            with contextlib.suppress(TimeoutError):  # drained or not, it is stopped now
                drain = steps.drain(running, gate.drain_timeout)
                await self._step(name, "drain", gate.drain_timeout + 10.0, drain, self.edited)
            if self.edited.is_set():
                raise SupersededError
            stop = steps.stop(running, gate.stop_timeout)
            await self._step(name, "stop", gate.stop_timeout + KILL_GRACE, stop)
            await self._step(name, "assert-stopped", 60.0, steps.assert_stopped(running, service.gpus))
        except PhaseFailedError as error:
            said = redact(str(error), service.service.secrets)
            raise TransientError(f"{name}: {said}", reason=error.reason) from error

    async def _step(
        self,
        name: str,
        phase: Phase,
        limit: float,
        work: Coroutine[Any, Any, None],
        unless: asyncio.Event | None = None,
    ) -> None:
        """A phase outside a trial: its deadline ends it, and an edit of the spec only where ``unless`` says so."""
        self.progress(f"{name}: {phase}")
        try:
            await within(limit, work, self.lifecycle.ports.clock, lambda: self.progress(""), unless)
        except TimeoutError as error:
            raise TimeoutError(f"{name}: {phase} was not done within {limit:g} s") from error

    async def run(self, name: str, mode: Mode) -> TrialRecord:
        inputs = await self.look()
        resolved = resolve(inputs).services[name]
        trial = _Trial(self, inputs, resolved)
        return await trial.run(mode)


@dataclass(slots=True)
class _Trial:
    """One trial of one service."""

    trials: Trials
    inputs: Inputs
    resolved: ResolvedService
    notes: list[PhaseNote] = field(default_factory=list)
    attempt: int = 1
    started: Revision | None = None  # what this trial started last, or found running
    again: bool = False  # nobody asked for its first start
    benchmark: BenchmarkResult | None = None
    started_at: float = 0.0
    failure: tuple[str, str] = ("", "")

    @property
    def name(self) -> str:
        return self.resolved.name

    @property
    def service(self) -> Service:
        return self.resolved.service

    @property
    def now(self) -> float:
        return self.trials.lifecycle.ports.clock.now()

    async def run(self, mode: Mode) -> TrialRecord:
        self.started_at = self.now
        revision = self.resolved.effective
        if revision is None or self._refused():
            return self._refuse()
        self.again = self.resolved.fallback or unasked(self.name, revision, self.trials.store.memory)
        self.started = revision if mode == "prove" else None
        # This is the other try that an operator asked for: silence after it is judged like any silence.
        memory = self.trials.store.memory
        self.trials.store.update(asked=tuple(n for n in memory.asked if n != self.name))
        self._remember(revision, "assert-stopped" if mode == "trial" else "ready")
        phases = TRIAL_PHASES if mode == "trial" else PROVE_PHASES
        step = await self._walk(phases, revision)
        while step.kind == "again":
            self.attempt += 1
            await self._stop_quietly(revision)
            step = await self._walk(TRIAL_PHASES, revision)
        return await self._end(step, revision)

    def _refused(self) -> bool:
        """What the self-test found may forbid a start that the plan still hoped for."""
        return any(r.reason in {"P2PRequired", "GpuIdentityUnknown"} for r in self.resolved.refusals)

    def _refuse(self) -> TrialRecord:
        refusals = self.resolved.refusals
        reason, message = (
            (refusals[0].reason, refusals[0].message) if refusals else ("NotRenderable", self.resolved.reason)
        )
        self.failure = (reason, message)
        return self._finish(self.resolved.effective, "refused")

    async def _walk(self, phases: tuple[Phase, ...], revision: Revision) -> Step:
        """Phases in order until one ends the walk; the pure transition table says what comes next."""
        step = Step("phase", phases[0])
        while step.kind == "phase" and step.phase is not None:
            result = await self._phase(step.phase, revision)
            if result != "ok":
                await self._learn(revision)
                self.inputs = await self.trials.look()  # what may be started now, not when the trial began
            good = last_good(self.name, self.inputs, besides=revision)
            state = TrialState(
                phases, step.phase, self.attempt, good is not None, self.service.gate.on_failure
            )
            step = next_step(state, result)
        return step

    async def _learn(self, revision: Revision) -> None:
        """Of a failure that a setting mends: the next revision has it, and is not the one that failed."""
        with contextlib.suppress(OSError):  # a log that cannot be read teaches nothing
            steps = self.trials.lifecycle
            why = await within(LOG_READ, steps.host_memory(revision), steps.ports.clock, self._alive)
            known = self.trials.store.memory.host_memory
            if why and revision.target not in known:
                self.trials.store.update(host_memory={**known, revision.target: why})

    async def _phase(self, phase: Phase, revision: Revision, label: str = "") -> PhaseResult:
        gate = self.service.gate
        limit = deadline_of(
            phase, start=gate.start_timeout, drain=gate.drain_timeout, stop=gate.stop_timeout + KILL_GRACE,
            benchmark=gate.benchmark.timeout,
        )  # fmt: skip
        self._remember(revision, phase)
        self.trials.progress(f"{self.name}: {label}{phase}")
        self.trials.journal.append(
            self.now, "phase", service=self.name, phase=label + phase, revision=revision.id
        )
        clock = self.trials.lifecycle.ports.clock
        begun = clock.monotonic()
        result: PhaseResult = "ok"
        detail = ""
        try:
            said = await within(limit, self._do(phase, revision), clock, self._alive, self.trials.edited)
            detail = said or ""
        except SupersededError:
            result, detail = "superseded", "the spec was edited"
            self.failure = ("Superseded", "the spec was edited during the trial")
        except TimeoutError:
            result, detail = "timeout", f"not done within {limit:g} s"
            self.failure = (f"{phase.title().replace('-', '')}Timeout", f"{phase} was {detail}")
        except _NotAllowedError as error:
            result, detail = "superseded", str(error)
            self.failure = ("P2PNotProved", str(error))
        except _InconclusiveError as error:
            result, detail = "inconclusive", str(error)
            self.failure = ("Inconclusive", str(error))
        except PhaseFailedError as error:
            result, detail = "failed", redact(str(error), self.service.secrets)
            self.failure = (error.reason, detail)
        except OSError as error:
            result, detail = "failed", redact(str(error), self.service.secrets)
            self.failure = ("HostError", f"{phase}: {detail}")
        self.notes.append(
            PhaseNote(
                phase=label + phase, result=result, detail=detail, seconds=round(clock.monotonic() - begun, 2)
            )
        )
        self.trials.journal.append(
            self.now, "phase-end", service=self.name, phase=label + phase, result=result, detail=detail
        )
        await self.trials.refresh()
        return result

    def _alive(self) -> None:
        self.trials.progress("")

    async def _do(self, phase: Phase, revision: Revision) -> str | None:
        steps, service = self.trials.lifecycle, placed(self.service, revision)
        match phase:
            case "stop":
                await steps.stop(placed(self.service, self.started or revision), service.gate.stop_timeout)
            case "assert-stopped":
                started = placed(self.service, self.started or revision)
                if self.started is not None and started != service:
                    await steps.assert_stopped(started, self.started.gpus)
                await steps.assert_stopped(service, revision.gpus)
            case "render":
                return await steps.render(self.name, service, revision)
            case "start":
                await self._assert_allowed(revision)
                self._count_start(revision)
                self.started = revision
                await steps.start(service)
            case "ready":
                await steps.ready(service)
            case "effective":
                return await steps.effective(self.name, service, revision)
            case "smoke":
                await steps.smoke(service, self._prompts(revision))
            case "benchmark":
                await self._measure(revision)
            case "judge":
                return self._judge()
            case _:
                raise PhaseFailedError("UnknownPhase", phase)
        return None

    def _prompts(self, revision: Revision) -> tuple[SmokePrompt, ...]:
        return prompts_for(self.service, revision, self.resolved.desired, self.trials.store.memory)

    async def _assert_allowed(self, revision: Revision) -> None:
        """Law 4 at the last moment: a page fault since the plan was made takes the verdict away."""
        self.inputs = await self.trials.look()
        if not p2p_allowed(revision, self.inputs):
            why = decide(self.service, revision.gpus, self.inputs).reason
            raise _NotAllowedError(f"it must not start with P2P any more: {why}")

    def _count_start(self, revision: Revision) -> None:
        """Starts that nobody asked for count against the remediation budget."""
        effective = self.resolved.effective
        restored = effective is None or revision.id != effective.id
        if self.again or self.attempt > 1 or restored:
            starts = (*self.trials.store.memory.starts, self.now)[-100:]
            self.trials.store.update(starts=starts)

    def _is_last_good(self, revision: Revision) -> bool:
        """There is nothing better than it: also when it is the promoted one, which had to give up P2P."""
        promoted = self.trials.store.memory.promoted.get(self.name)
        if promoted is None or self.resolved.fallback or promoted.revision.id == revision.id:
            return promoted is not None
        same = without_p2p(promoted.revision).id == revision.id
        return same and last_good(self.name, self.inputs, besides=revision) is None

    async def _measure(self, revision: Revision) -> None:
        gate, clock = self.service.gate, self.trials.lifecycle.ports.clock
        key, begun = self._key(revision), clock.monotonic()
        baseline = baseline_for(self.trials.store.memory.baselines, key)
        target = self.trials.lifecycle.ports.targets(revision.target)
        levels: list[LevelResult] = []
        for concurrency in gate.benchmark.concurrency:
            label = f"{self.name}: benchmark C={concurrency}"

            def report(done: int, total: int, label: str = label) -> None:
                self.trials.progress(f"{label} {done}/{total}")

            level = await self.trials.lifecycle.ports.inference.benchmark_level(
                target.endpoint(revision.port), revision.served_name, gate.benchmark, concurrency, report
            )
            levels.append(level)
            self.trials.progress(f"{label} {level.throughput:,.1f} tok/s")
            self.benchmark = BenchmarkResult(
                levels=tuple(levels), key=key, started_at=self.started_at, seconds=round(clock.monotonic() - begun, 2),
                complete=len(levels) == len(gate.benchmark.concurrency),
            )  # fmt: skip
            if certain := certain_failure(level, gate, baseline):
                # The verdict cannot change any more: the remaining levels would only cost the users time.
                raise PhaseFailedError("BelowGate", certain)

    def _key(self, revision: Revision) -> BenchmarkKey:
        facts = self.inputs.obs.targets.get(revision.target)
        bench = self.service.gate.benchmark
        return BenchmarkKey(
            formula=FORMULA,
            model=option(revision.argv, "model-path"),
            runtime=f"{self.service.runtime} {say(facts.sglang_version) if facts else 'unknown'}",
            driver=say(self.inputs.obs.platform.nvidia_driver),
            gpus=revision.gpus,
            p2p=revision.p2p,
            workload=f"in {bench.input_tokens}, out {bench.output_tokens}, {bench.requests_per_slot} per slot",
            simulated=self.inputs.simulated,
        )

    def _judge(self) -> str:
        baseline = (
            baseline_for(self.trials.store.memory.baselines, self.benchmark.key) if self.benchmark else None
        )
        judgement = judge(self.benchmark, self.service.gate, baseline)
        if judgement.verdict == "fail":
            raise PhaseFailedError(judgement.reason, judgement.message)
        if judgement.verdict == "inconclusive":
            raise _InconclusiveError(judgement.message)
        return judgement.message

    async def _end(self, step: Step, revision: Revision) -> TrialRecord:
        if step.outcome == "promoted":
            return self._promote(revision)
        if step.outcome == "superseded":
            return self._finish(revision, "superseded")
        if step.kind == "finish":
            if self.failure[0] == "GpuWedged":
                return self._wedged(revision, self.failure[1])
            record = self._finish(revision, "failed")
            raise TransientError(f"{self.name}: {record.message}", reason=record.reason)
        if self._is_last_good(revision):
            return await self._last_good_failed(revision)
        if self.failure[0] == "TargetLostGpus":
            # No revision could start there, so none is to blame. Preflight says what to do, and waits for it.
            record = self._finish(revision, "failed")
            raise TransientError(f"{self.name}: {record.message}", reason=record.reason)
        self._reject(revision)
        if step.kind == "stop":
            await self._stop_quietly(revision)
            return self._finish(revision, "held")
        return await self._restore(revision)

    async def _last_good_failed(self, revision: Revision) -> TrialRecord:
        """The last good revision itself did not pass: slower is reported and stays up; dead is tried again later."""
        if self.notes[-1].phase in {"benchmark", "judge"}:
            return self._finish(revision, "degraded")
        await self._stop_quietly(revision)
        record = self._finish(revision, "failed")
        raise TransientError(f"{self.name}: {record.message}", reason=record.reason)

    def _promote(self, revision: Revision) -> TrialRecord:
        memory = self.trials.store.memory
        old = memory.promoted.get(self.name)
        changes: dict[str, Any] = {}
        if old is not None and old.revision.id != revision.id:
            changes["previous"] = {**memory.previous, self.name: old}
        promoted = Promoted(
            revision=revision, generation=self.inputs.generation, at=self.now, benchmark=self.benchmark,
            smoke=self._prompts(revision),
        )  # fmt: skip
        changes["promoted"] = {**memory.promoted, self.name: promoted}
        if self.benchmark is not None:
            changes["baselines"] = add_result(memory.baselines, self.benchmark)
        if not self.resolved.fallback:
            changes["rejected"] = {n: r for n, r in memory.rejected.items() if n != self.name}
        self.trials.store.update(**changes)
        return self._finish(revision, "promoted")

    def _reject(self, revision: Revision) -> None:
        """Before anything is taken back: a crash from here on must not try this revision again."""
        reason, message = self.failure
        rejected = Rejected(
            revision=trial_key(revision, self.service.gate), generation=self.inputs.generation,
            reason=reason, message=message, at=self.now,
        )  # fmt: skip
        self.trials.store.update(rejected={**self.trials.store.memory.rejected, self.name: rejected})

    async def _restore(self, failed: Revision) -> TrialRecord:
        cause = self.failure
        good = last_good(self.name, self.inputs, besides=failed)
        if good is None:
            await self._stop_quietly(failed)
            return self._finish(failed, "held")
        for phase in RESTORE_PHASES:
            result = await self._phase(phase, good.revision, label="rollback: ")
            if result != "ok":
                break
        outcome = after_restore(result)
        if outcome == "rolled-back":
            self.failure = cause
            return self._finish(failed, outcome, restored=good.revision.id)
        if outcome == "superseded":
            return self._finish(
                good.revision, outcome
            )  # it may run by now, and nothing has proved that start
        if self.failure[0] == "GpuWedged":
            message = f"{cause[1]}; the last good revision is not started: {self.failure[1]}"
            return self._wedged(failed, message)
        message = f"{cause[1]}; and the last good revision did not come back: {self.failure[1]}"
        self.failure = ("RollbackFailed", message)
        await self._stop_quietly(good.revision)
        self._finish(failed, "failed")
        raise TransientError(f"{self.name}: {message}", reason="RollbackFailed")

    def _wedged(self, revision: Revision, message: str) -> NoReturn:
        """No revision could start on such a GPU: none is to blame, and none is tried."""
        self.failure = ("GpuWedged", message)
        self._finish(revision, "failed")
        raise TerminalError(f"{self.name}: {message}", reason="GpuWedged")

    async def _stop_quietly(self, revision: Revision) -> None:
        """Stop what must not go on running. Where that fails, or a kill comes first, the next pass stops what was
        rejected; a last good revision is judged there by its health.
        """
        steps, allowed = self.trials.lifecycle, self.service.gate.stop_timeout
        stop = steps.stop(placed(self.service, self.started or revision), allowed)
        with contextlib.suppress(PhaseFailedError, OSError):
            await within(allowed + KILL_GRACE, stop, steps.ports.clock, self._alive)

    def _remember(self, revision: Revision, phase: Phase) -> None:
        record = self._record(revision).model_copy(update={"phase": phase})
        self._save(record)

    def _finish(self, revision: Revision | None, outcome: Outcome, restored: str = "") -> TrialRecord:
        reason, message = self.failure if outcome != "promoted" else ("Promoted", self.notes[-1].detail)
        record = self._record(revision).model_copy(
            update={
                "phase": "judge", "outcome": outcome, "reason": reason, "message": message,
                "finished_at": self.now, "restored": restored,
            }
        )  # fmt: skip
        self._save(record)
        self.trials.journal.append(
            self.now, "trial", service=self.name, outcome=outcome, reason=reason, message=message
        )
        self.trials.lifecycle.observer.health.forget(self.name)
        return record

    def _record(self, revision: Revision | None) -> TrialRecord:
        return TrialRecord(
            service=self.name, generation=self.inputs.generation, revision=revision, attempt=self.attempt,
            started_at=self.started_at, notes=tuple(self.notes), benchmark=self.benchmark,
        )  # fmt: skip

    def _save(self, record: TrialRecord) -> Memory:
        return self.trials.store.update(trials={**self.trials.store.memory.trials, self.name: record})


class _NotAllowedError(Exception):
    """The revision must not be started any more, and that is not its fault."""


class _InconclusiveError(Exception):
    """Too little data to judge: never a pass."""
