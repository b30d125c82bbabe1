"""Status leaves through this one door: the file under the run directory and systemd's STATUS line."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from agent import __version__
from agent.core.condition import Condition
from agent.core.plan import render_plan
from agent.core.redact import redact
from agent.core.report import (
    PROOF_REAL,
    PROOF_SIMULATED,
    budget_text,
    gpu_statuses,
    host_status,
    p2p_statuses,
    service_statuses,
)  # fmt: skip
from agent.core.status import HostStatus, PassStatus, PlanStatus, SpecStatus, Status, ready_of
from agent.loop.journal import Journal
from agent.loop.specs import Specs
from agent.loop.store import write_atomic
from agent.ports import Clock, NotifyPort

if TYPE_CHECKING:
    from agent.loop.reconcile import Decision

JOURNAL_LINES = 12
ACTIVITY_EVERY = 1.0  # real seconds between two publications of progress
AGE = 10.0  # real seconds: an unchanged status is written again only when the published one is older


@dataclass(frozen=True, slots=True)
class View:
    """The pass that a publication belongs to."""

    pass_id: str
    trigger: str
    started_at: float
    seconds: float


@dataclass(slots=True)
class Publisher:
    """Writes the status file whole, by rename; readers never see half of it. Not fsynced: it lives in memory.

    Status is told, not needed: a file that cannot be written is said to systemd and in the log, and fails nothing.
    """

    path: Path
    clock: Clock
    journal: Journal
    notify: NotifyPort
    simulated: str
    stale_after: float = 120.0
    log: Callable[..., None] = lambda *_args, **_fields: None
    _status: Status | None = field(default=None)
    _shown: tuple[object, ...] = ()  # what the published status was made from
    _activity: str = ""
    _activity_at: float = 0.0
    _later: asyncio.TimerHandle | None = None
    _problem: str = ""  # why the last status could not be written

    @property
    def doing(self) -> str:
        """The activity that was told last."""
        return self._activity

    def publish(
        self,
        decision: "Decision",
        specs: Specs,
        conditions: tuple[Condition, ...],
        sentence: str,
        view: View,
        *,
        activity: str = "",
    ) -> None:
        """Publish the whole status. ``activity`` only from the middle of a plan."""
        inputs, plan = decision.inputs, decision.plan
        made_from = (decision, conditions, specs.problems, sentence, activity)
        if self._fresh(made_from):
            return
        shown = None
        if plan.actions or plan.refusals:
            approve = f"agent approve {plan.id}" if decision.approvable else ""
            shown = PlanStatus(
                id=plan.id, text=render_plan(plan), actions=len(plan.actions), disruption=str(plan.disruption),
                blocked=decision.blocked, approve=approve,
            )  # fmt: skip
        written = self._write(
            Status(
                agent_version=__version__,
                pid=os.getpid(),
                host=host_status(inputs, self.simulated),
                published_at=self.clock.now(),
                stale_after=self.stale_after,
                activity=activity,
                ready=ready_of(conditions),
                spec=SpecStatus(
                    path=specs.path,
                    accepted=specs.accepted,
                    problems=specs.problems,
                    generation=inputs.generation,
                ),
                last_pass=self._pass(view, sentence),
                conditions=conditions,
                gpus=gpu_statuses(inputs, decision.resolved),
                p2p=p2p_statuses(decision.resolved),
                services=service_statuses(inputs, decision.resolved),
                plan=shown,
                budget=budget_text(inputs),
                journal=tuple(self.journal.tail(JOURNAL_LINES)),
                proof=PROOF_SIMULATED if self.simulated else PROOF_REAL,
            ),
            sentence,
        )
        self._shown = made_from if written else ()

    def _fresh(self, made_from: tuple[object, ...]) -> bool:
        status = self._status
        return (
            status is not None
            and made_from == self._shown
            and 0 <= self.clock.now() - status.published_at < AGE
        )

    def publish_without_spec(
        self, specs: Specs, conditions: tuple[Condition, ...], sentence: str, view: View
    ) -> None:
        self._write(
            Status(
                agent_version=__version__,
                pid=os.getpid(),
                host=HostStatus(name="", simulated=self.simulated),
                published_at=self.clock.now(),
                stale_after=self.stale_after,
                ready="False",
                spec=SpecStatus(path=specs.path, accepted=False, problems=specs.problems),
                last_pass=self._pass(view, sentence),
                conditions=conditions,
                proof=PROOF_SIMULATED if self.simulated else PROOF_REAL,
            ),
            sentence,
        )

    def activity(self, text: str) -> None:
        """What is being done right now: published at most once a second, the last of several, for people who watch."""
        if self._status is None:
            return
        self._activity = text or self._activity
        wait = ACTIVITY_EVERY - (self.clock.now() - self._activity_at)
        if not 0 < wait <= ACTIVITY_EVERY:
            self._show_activity()
        elif self._later is None:
            self._later = asyncio.get_running_loop().call_later(wait, self._show_activity)

    def _show_activity(self) -> None:
        if self._status is not None:
            self._activity_at = self.clock.now()
            update = {"activity": self._activity, "published_at": self._activity_at}
            self._write(self._status.model_copy(update=update), self._activity)

    def last_words(self, sentence: str, *, trusted: bool) -> None:
        """The agent stops, or a pass failed: the last status with that sentence, no longer ready unless trusted."""
        if self._status is None:
            self._tell(sentence)
            return
        last = self._status.last_pass
        update: dict[str, object] = {
            "activity": "", "published_at": self.clock.now(),
            "last_pass": last.model_copy(update={"sentence": redact(sentence)}) if last else None,
        }  # fmt: skip
        if not trusted:
            update["ready"] = "Unknown"
        self._write(self._status.model_copy(update=update), sentence)

    def _pass(self, view: View, sentence: str) -> PassStatus:
        return PassStatus(
            id=view.pass_id, trigger=view.trigger, sentence=redact(sentence), started_at=view.started_at,
            seconds=round(view.seconds, 4),
        )  # fmt: skip

    def _write(self, status: Status, line: str) -> bool:
        """False when the file could not be written: the next publication tries again, changed or not."""
        if self._later is not None:
            self._later.cancel()
            self._later = None
        self._status, self._shown, self._activity = status, (), status.activity
        problem = ""
        try:
            write_atomic(self.path, status.model_dump_json().encode(), mode=0o644, sync=False)
        except OSError as error:
            problem = f"{self.path} cannot be written: {error.strerror or error}"
        if problem != self._problem:
            self.log("status cannot be written" if problem else "status is written again", problem=problem)
        self._problem = problem
        self._tell(f"{problem}; {line}" if problem else line)
        return not problem

    def _tell(self, line: str) -> None:
        prefix = "SIMULATED: " if self.simulated else ""
        self.notify.send(f"STATUS={prefix}{redact(line)}"[:400].replace("\n", " "))
