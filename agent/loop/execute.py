"""Execute: the only caller of effects. Intent, act, read back, outcome.

The first failure of something that later actions need stops the plan.
"""

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from agent.core.binding import group_of
from agent.core.errors import AgentError, TerminalError
from agent.core.fact import Known, value_or
from agent.core.memory import Quarantine, Unbinding
from agent.core.observation import Observation
from agent.core.plan import Action, Plan, Stage
from agent.core.redact import redact
from agent.core.unbind_state import is_running
from agent.kind import Kind, kind_of
from agent.kinds.boot_files import VERB as EDIT_BOOT_FILES
from agent.kinds.rebind import UnbindStuckError
from agent.loop.deadline import SupersededError, showing_life
from agent.loop.journal import Journal
from agent.loop.prove import SelfTest
from agent.loop.store import StateError, Store
from agent.loop.trial import Trials
from agent.ports import Ports

BACKOFF_FIRST = 5.0  # seconds; doubles with every failure
BACKOFF_MOST = 900.0
# Seconds of the host's clock in which every kind's own deadlines end. The longest: a card of four functions, each
# unbound (60) and probed (30), the moved ones taken back (60 each), and of one it is long open whether its unbind began.
ACT_MOST = 720.0
# Seconds after which an unbind counts as one that goes on without this agent, should it be told to stop.
UNBIND_USUAL = 3.0


@dataclass(frozen=True, slots=True)
class Executed:
    """What became of a plan: how many actions were done, and why it stopped, if it did.

    ``passed_over`` counts optional actions that failed: the plan went on without them.
    """

    done: int
    failed: Action | None = None
    message: str = ""
    notes: tuple[str, ...] = ()
    passed_over: int = 0
    superseded: bool = False  # the spec was edited, and the rest of the plan left alone


@dataclass(slots=True)
class Executor:
    ports: Ports
    kinds: Sequence[Kind]
    store: Store
    journal: Journal
    trials: Trials
    selftest: SelfTest
    progress: Callable[[str], None]
    refresh: Callable[[], Awaitable[None]]  # publish what the host is like now
    # Called when the host itself is done and what is left is proving services.
    before_trial: Callable[[], None] = lambda: None
    stopping: bool = False  # set by the daemon: the plan ends after the action in hand
    interruptible: bool = False  # the action in hand may be cancelled at any await
    in_hand: Action | None = None  # one that a kind does

    async def waits_for_unbind(self) -> bool:
        """The action in hand is waiting for an unbind that has not returned. The next agent finds it and waits on."""
        action, known = self.in_hand, self.store.memory.unbinding
        if action is None or not _binds(action):
            return False
        begun = max((known[a].at for a in action.params if a in known), default=self._now)
        if self._now - begun < UNBIND_USUAL:
            return False
        try:
            return any([is_running(await self.ports.pci.unbind_state(a)) for a in action.params])
        except OSError:
            return False

    async def execute(self, plan: Plan, obs: Observation, pass_id: str) -> Executed:
        done: list[Action] = []
        notes: list[str] = []
        passed_over = 0
        for action in plan.actions:
            if self.stopping:
                left = len(plan.actions) - len(done) - passed_over
                notes.append(f"stopping: {left} of {len(plan.actions)} actions are left for the next start")
                break
            if self.trials.edited.is_set() and not _half_moved(done, plan.actions, obs):
                return await self._superseded(plan, done, notes, passed_over, pass_id)
            self.journal.append(
                self._now, "intent", plan=plan.id, pass_id=pass_id, action=action.key, text=action.description
            )
            self.progress(action.description)
            try:
                note = await self._perform(action, obs)
            except SupersededError:
                self.journal.append(
                    self._now, "outcome", pass_id=pass_id, action=action.key, result="superseded"
                )
                return await self._superseded(plan, done, notes, passed_over, pass_id)
            except StateError:
                raise  # no action's failure; the journal has its intent, and the next pass looks what became of it
            except (AgentError, OSError) as error:
                self._failed(action, error, obs, pass_id)
                if action.optional:
                    passed_over += 1
                    notes.append(f"{action.description}: {redact(str(error))}")
                    continue
                await self._revert(done, pass_id)
                return Executed(len(done), action, redact(str(error)), tuple(notes), passed_over)
            except Exception as error:
                # Not an outside failure but a bug of ours: it is recorded here and fails the pass where it is counted.
                self.journal.append(
                    self._now,
                    "outcome",
                    pass_id=pass_id,
                    action=action.key,
                    result="crashed",
                    error=repr(error),
                )
                raise
            self._succeeded(action, note, pass_id)
            done.append(action)
            await self.refresh()
            notes += [note] if note else []
        return Executed(len(done), notes=tuple(notes), passed_over=passed_over)

    async def _superseded(
        self, plan: Plan, done: list[Action], notes: list[str], passed_over: int, pass_id: str
    ) -> Executed:
        """The spec was edited: what is left was planned from the old one, and the next pass plans anew."""
        left = len(plan.actions) - len(done) - passed_over
        notes.append(
            f"the spec was edited: {left} of {len(plan.actions)} actions of the old plan are not done"
        )
        await self._revert(done, pass_id)
        return Executed(len(done), notes=tuple(notes), passed_over=passed_over, superseded=True)

    @property
    def _now(self) -> float:
        return self.ports.clock.now()

    async def _perform(self, action: Action, obs: Observation) -> str:
        """Do one action; a sentence about it where it has one."""
        match (action.kind, action.verb):
            case ("p2p", "selftest"):
                verdict = await self.selftest.run(tuple(action.params["gpus"].split(",")))
                return f"P2P self-test: {verdict.summary()}"
            case ("service", "preflight"):
                await self.trials.preflight(action.target)
            case ("service", "stop"):
                await self.trials.stop(action.target)
            case ("service", "trial"):
                return await self._trial(action.target, prove=False)
            case ("service", "prove"):
                return await self._trial(action.target, prove=True)
            case _:
                self._note_stopped(action)
                self._note_unbinds(action, obs)
                self._note_edit(action)
                await self._act(action)
        return ""

    async def _act(self, action: Action) -> None:
        work = kind_of(self.kinds, action).act(action, self.ports)
        self.in_hand = action
        try:
            await showing_life(ACT_MOST, work, self.ports.clock, lambda: self.progress(""))
        finally:
            self.in_hand = None

    async def _trial(self, name: str, *, prove: bool) -> str:
        self.before_trial()
        self.interruptible = True
        try:
            record = await self.trials.run(name, "prove" if prove else "trial")
        finally:
            self.interruptible = False
        revision = record.revision.id if record.revision else "no revision"
        match record.outcome:
            case "promoted":
                return f"{name}: revision {revision} promoted"
            case "rolled-back":
                return f"{name}: revision {revision} rolled back to {record.restored}: {record.message}"
            case _:
                return f"{name}: revision {revision} {record.outcome}: {record.message}"

    def _note_stopped(self, action: Action) -> None:
        """Before a unit is stopped, so that it comes back also after a crash in between."""
        if action.verb == "quiesce":
            self.store.update(stopped_units={**self.store.memory.stopped_units, action.target: action.why})

    def _note_unbinds(self, action: Action, obs: Observation) -> None:
        """Before an unbind is written: whatever happens to us, it is never written a second time (law 2)."""
        if _binds(action):
            entry = Unbinding(boot_id=value_or(obs.platform.boot_id, ""), at=self._now)
            self.store.update(
                unbinding={**self.store.memory.unbinding, **dict.fromkeys(sorted(action.params), entry)}
            )

    def _note_edit(self, action: Action) -> None:
        """Before a boot file is written: what the boot loader makes of it cannot be read on every host."""
        if action.verb == EDIT_BOOT_FILES:
            self.store.update(unrefreshed=action.params["path"])

    def _left_open(self, action: Action) -> dict[str, Unbinding]:
        """Unbinds that are open still once this action is known to have come back from all that it wrote."""
        known = self.store.memory.unbinding
        return {a: e for a, e in known.items() if a not in action.params} if _binds(action) else known

    def _succeeded(self, action: Action, note: str, pass_id: str) -> None:
        self.journal.append(
            self._now, "outcome", pass_id=pass_id, action=action.key, result="done", note=note
        )
        memory = self.store.memory
        changes: dict[str, object] = {}
        if _binds(action):
            changes["unbinding"] = self._left_open(action)
        if action.verb == EDIT_BOOT_FILES:
            changes["unrefreshed"] = ""
        if action.key in memory.failures:
            changes["failures"] = {k: v for k, v in memory.failures.items() if k != action.key}
            changes["retry_after"] = {k: v for k, v in memory.retry_after.items() if k != action.key}
            changes["errors"] = {k: v for k, v in memory.errors.items() if k != action.key}
        if action.verb == "restore-unit":
            changes["stopped_units"] = {u: w for u, w in memory.stopped_units.items() if u != action.target}
        if changes:
            self.store.update(**changes)

    def _failed(self, action: Action, error: Exception, obs: Observation, pass_id: str) -> None:
        terminal = isinstance(error, TerminalError)
        result, message = "terminal" if terminal else "failed", redact(str(error))
        self.journal.append(
            self._now, "outcome", pass_id=pass_id, action=action.key, result=result, error=message
        )
        memory = self.store.memory
        changes: dict[str, object] = {}
        if not _is_open_after(error):
            changes["unbinding"] = self._left_open(action)
        if isinstance(error, UnbindStuckError):
            if not error.waits_for_user:
                entry = Quarantine(
                    address=error.address, reason=error.reason, message=message,
                    boot_id=value_or(obs.platform.boot_id, ""), at=self._now,
                )  # fmt: skip
                changes["quarantine"] = {**memory.quarantine, error.address: entry}
        elif terminal:
            changes["terminal"] = {**memory.terminal, action.key: message}
        else:
            count = memory.failures.get(action.key, 0) + 1
            changes["failures"] = {**memory.failures, action.key: count}
            changes["retry_after"] = {**memory.retry_after, action.key: self._now + backoff(count)}
            changes["errors"] = {**memory.errors, action.key: message}
        self.store.update(**changes)

    async def _revert(self, done: list[Action], pass_id: str) -> None:
        """Put back what only the failed part needed: persistence mode of GPUs that stayed where they were."""
        bound = {t for a in done if a.stage == Stage.BIND for t in a.touches}
        lost = set(self.store.memory.quarantine)
        for action in reversed(done):
            if action.revert is None or action.stage not in {Stage.STOP, Stage.RELEASE}:
                continue
            if (bound | lost).intersection(action.revert.touches):
                continue  # its driver did change, or it must not be touched any more
            self.journal.append(
                self._now, "intent", pass_id=pass_id, action=action.revert.key, text=action.revert.description
            )
            try:
                await self._act(action.revert)
            except (AgentError, OSError) as error:
                self.journal.append(
                    self._now,
                    "outcome",
                    pass_id=pass_id,
                    action=action.revert.key,
                    result="failed",
                    error=str(error),
                )
                continue
            self._succeeded(action.revert, "put back", pass_id)


def _is_open_after(error: Exception) -> bool:
    """Whether an unbind returned is for the port to say, from pass to pass: nothing here proves that it ever does not."""
    if isinstance(error, UnbindStuckError):
        return error.waits_for_user
    return isinstance(error, TimeoutError | ConnectionError)


def _binds(action: Action) -> bool:
    return (action.kind, action.verb) == ("driver-binding", "bind")


def _half_moved(done: Sequence[Action], actions: Sequence[Action], obs: Observation) -> bool:
    """Some cards of an IOMMU group have changed drivers, and others of it are still to follow: law 3."""
    pci = obs.pci.value if isinstance(obs.pci, Known) else None
    if pci is None:
        return False

    def groups(moving: Sequence[Action]) -> set[int]:
        functions = [pci.functions.get(t) for a in moving if a.stage == Stage.BIND for t in a.touches]
        found = [group_of(f, pci) for f in functions if f is not None]
        return {g.number for g in found if g is not None}

    return bool(groups(done) & groups(actions[len(done) :]))


def backoff(failures: int) -> float:
    """Seconds until the next try: doubling, bounded, with jitter so that hosts do not march in step."""
    base = min(BACKOFF_MOST, BACKOFF_FIRST * 2.0 ** (failures - 1))
    return base * random.uniform(0.8, 1.2)
