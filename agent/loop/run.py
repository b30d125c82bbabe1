"""The daemon: triggers in, passes out. A trigger carries no data; every one runs the same full pass."""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from agent.loop.reconcile import PassResult, Reconciler
from agent.loop.store import StateError
from agent.ports import NotifyPort

STOP_PATIENCE = 90.0  # seconds that an action in hand may take to finish after SIGTERM
FAILED_PASS_PAUSE = 5.0
ALIVE_EVERY = (
    5.0  # real seconds of work in one pass before it counts as a sign of life, and between two of them
)
EXTEND_START = 120_000_000  # microseconds, asked for at every sign of life before READY
Watch = Callable[[asyncio.Event], AsyncIterator[None]]


@dataclass(slots=True)
class Triggers:
    """Reasons for a pass, folded: however many come, one pass follows."""

    _event: asyncio.Event = field(default_factory=asyncio.Event)
    _reason: str = ""

    def fire(self, reason: str) -> None:
        self._reason = reason if not self._event.is_set() else self._reason
        self._event.set()

    async def wait(self, seconds: float) -> str:
        """The first reason since the last call, or "resync" when none came in time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), seconds)
        reason = self._reason if self._event.is_set() else "resync"
        self._event.clear()
        return reason


@dataclass(slots=True)
class Daemon:
    reconciler: Reconciler
    triggers: Triggers
    notify: NotifyPort
    watch: Watch
    edited: asyncio.Event
    log: Callable[..., None]
    watchdog: float = 0.0  # seconds without a sign of life after which systemd kills us; 0: never
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _ready: bool = False
    _alive_at: float = 0.0  # loop time of the last sign of life, or of the beginning of the pass

    async def run(self) -> None:
        """Until SIGTERM or SIGINT. SIGHUP asks for a pass at once."""
        self._signals()
        self.reconciler.executor.before_trial = self._say_ready
        watcher = asyncio.create_task(self._follow())
        stopper = asyncio.create_task(self._stop.wait())
        try:
            await self._loop(stopper)
        finally:
            for task in (watcher, stopper):
                task.cancel()
            await asyncio.gather(watcher, stopper, return_exceptions=True)
            await self.reconciler.observer.health.close()
            self.notify.send("STOPPING=1")
            self.reconciler.publisher.last_words(
                "Stopped: nothing is watched until the agent runs again.", trusted=False
            )

    def stop(self) -> None:
        self._stop.set()

    def progress(self, text: str) -> None:
        """Work inside a pass that has a deadline and has not passed it.

        A sign of life only where it takes long: a pass that soon fails must not feed the watchdog on its way.
        """
        self.reconciler.publisher.activity(text)
        if asyncio.get_running_loop().time() - self._alive_at >= ALIVE_EVERY:
            self._alive()

    def _signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)

    def _reload(self) -> None:
        self.notify.send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")
        self.triggers.fire("SIGHUP")
        if self.reconciler.executor.interruptible:
            self._say_ready()  # a trial goes on, longer than systemd waits for a reload; the pass comes after it

    async def _follow(self) -> None:
        """Spec saved, request left: look whether the content changed, and ask for a pass."""
        async for _ in self.watch(self._stop):
            if await self.reconciler.specs.peek_changed():
                self.edited.set()
            self.triggers.fire("file changed")

    async def _loop(self, stopper: "asyncio.Task[bool]") -> None:
        trigger = "start"
        while not self._stop.is_set():
            result = await self._guarded(trigger, stopper)
            if self._stop.is_set():
                return
            if result is not None:
                self._say_ready()
                self._alive()
            if result is not None and result.again:
                trigger = "progress"
                continue
            waiter = asyncio.create_task(self.triggers.wait(self._pause(result)))
            await asyncio.wait({waiter, stopper}, return_when=asyncio.FIRST_COMPLETED)
            if not waiter.done():
                waiter.cancel()
                return
            trigger = waiter.result()

    def _pause(self, result: PassResult | None) -> float:
        """Seconds until the next pass. Whatever the resync: only passes feed the watchdog and keep status fresh."""
        host = self.reconciler.specs.host
        resync = host.spec.policy.resync if host else 30.0
        waits = [resync, self.reconciler.publisher.stale_after / 3]
        if self.watchdog:
            waits.append(self.watchdog / 3)
        if result is None:
            waits.append(FAILED_PASS_PAUSE)
        elif result.retry_in is not None:
            waits.append(result.retry_in)
        return min(waits)

    async def _guarded(self, trigger: str, stopper: "asyncio.Task[bool]") -> PassResult | None:
        """One pass that may fail without ending the loop; None then, and no sign of life is given."""
        self._alive_at = asyncio.get_running_loop().time()
        task = asyncio.create_task(self.reconciler.run_pass(trigger))
        await asyncio.wait({task, stopper}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await self._finish(task)
        try:
            return task.result()
        except asyncio.CancelledError:
            return None
        except StateError as error:
            self._without_state(error, trigger)
            return None
        except Exception as error:
            # Whatever an adapter or a kind raised, the host goes on being watched; the watchdog is not fed for it.
            self.log("pass failed", trigger=trigger, error=repr(error), exc_info=error)
            self.reconciler.publisher.last_words(
                f"The pass failed: {error!r}; this is a defect of the agent.", trusted=False
            )
            return None

    def _without_state(self, error: StateError, trigger: str) -> None:
        """The pass ended because our own files cannot be written, a full disk for instance.

        The loop is well and knows why, and a restart would not help: once ready, the watchdog is fed.
        """
        self.log("state cannot be written", trigger=trigger, error=str(error))
        self.reconciler.publisher.last_words(
            f"The pass could not go on: {error}. Next: {error.next_step}.", trusted=False
        )
        if self._ready:
            self.notify.send("WATCHDOG=1")

    async def _finish(self, task: "asyncio.Task[PassResult]") -> None:
        """Stopping: the action in hand may finish, a trial is left to be resumed."""
        executor = self.reconciler.executor
        executor.stopping = True
        loop = asyncio.get_running_loop()
        end = loop.time() + STOP_PATIENCE
        while not task.done() and loop.time() < end and not executor.interruptible:
            if await executor.waits_for_unbind():
                break
            self.notify.send(f"EXTEND_TIMEOUT_USEC={EXTEND_START}")
            await asyncio.wait({task}, timeout=0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def _alive(self) -> None:
        self._alive_at = asyncio.get_running_loop().time()
        self.notify.send("WATCHDOG=1")
        if not self._ready:
            self.notify.send(f"EXTEND_TIMEOUT_USEC={EXTEND_START}")

    def _say_ready(self) -> None:
        """READY once the host itself is as specified as it can be; also the end of a reload."""
        self.notify.send("READY=1")
        self._ready = True
