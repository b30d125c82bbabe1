"""The accepted spec: read from its source, checked, kept. A bad one changes nothing."""

from collections.abc import Callable
from dataclasses import dataclass, field

from agent.core.errors import SpecError
from agent.core.memory import Identity, Memory
from agent.core.spec import GpuHost
from agent.core.spec_load import LoadedSpec, load
from agent.loop.journal import Journal
from agent.loop.store import Store
from agent.ports import SpecSource


@dataclass(slots=True)
class Specs:
    """Holds the spec in force. The generation counts accepted contents; comments and order of keys make none."""

    source: SpecSource
    store: Store
    journal: Journal
    now: Callable[[], float]
    current: LoadedSpec | None = None
    problems: tuple[str, ...] = ()
    path: str = ""
    _last_text: str | None = field(default=None)

    @property
    def host(self) -> GpuHost | None:
        return self.current.spec if self.current else None

    @property
    def accepted(self) -> bool:
        return self.current is not None and not self.problems

    async def refresh(self) -> None:
        """Read the source; accept what is new and right, else keep what is in force and say why."""
        if self.current is None:
            self._restore()
        try:
            source = await self.source.read()
            self.path = source.origin
            if source.text == self._last_text:
                return
            loaded = load(source.text, source.origin)
        except SpecError as error:
            self._last_text = None
            self.problems = error.problems
            return
        except OSError as error:
            self._last_text = None
            self.problems = (f"{self.path or 'spec'}: cannot be read: {error.strerror or error}",)
            return
        self.problems = ()
        self._accept(loaded, source.text)
        self._last_text = source.text  # accepted and kept: else the next pass tries again

    async def peek_changed(self) -> bool:
        """Whether the source now holds an accepted-to-be content other than the one in force."""
        try:
            source = await self.source.read()
            if source.text == self._last_text:
                return False
            return self.current is None or load(source.text, source.origin).digest != self.current.digest
        except (SpecError, OSError):
            return False

    def _restore(self) -> None:
        """The last good spec of an earlier run, for a daemon that starts beside a broken file."""
        self._settle()
        text = self.store.accepted_text()
        if text is None:
            return
        try:
            self.current = load(text, "the last accepted spec")
        except SpecError as error:
            self.problems = error.problems

    def _settle(self) -> None:
        """An acceptance that a kill cut short: it holds if the memory has it, else it never was."""
        text = self.store.staged_text()
        if text is not None:
            self.store.settle_staged(accepted=_digest(text) == self.store.memory.spec_digest)

    def _accept(self, loaded: LoadedSpec, text: str) -> None:
        memory, before = self.store.memory, self.host
        adopted = adopt(memory, before, loaded)
        if adopted is not memory:
            self.journal.append(self.now(), "generation", generation=adopted.generation, digest=loaded.digest)
            self.store.stage_text(text)
            self.store.save(adopted)
        self.current = loaded
        if adopted is not memory:
            self.store.settle_staged(accepted=True)


def _digest(text: str) -> str:
    try:
        return load(text, "the staged spec").digest
    except SpecError:
        return ""


def adopt(memory: Memory, before: GpuHost | None, loaded: LoadedSpec) -> Memory:
    """The memory under this content: the same object when it is the one in force, else a new generation's.

    A new generation is a person's answer to every failure of the old one; rejections name their revision and gate
    themselves and so outlive it.
    """
    if loaded.digest == memory.spec_digest:
        return memory
    changes: dict[str, object] = {
        "generation": memory.generation + 1, "spec_digest": loaded.digest, "failures": {}, "retry_after": {},
        "errors": {}, "terminal": {}, "grant": None, "approved": "",
        "identities": _kept(memory.identities, before, loaded.spec),
    }  # fmt: skip
    return memory.model_copy(update=changes)


def _kept(known: dict[str, Identity], before: GpuHost | None, after: GpuHost) -> dict[str, Identity]:
    """Only a person who names the cards anew has looked at where they are now: then places are learned anew.

    Which UUID belongs to which serial number stays known: a card on vfio-pci shows only the serial number.
    """
    if before is not None and _selects(before) == _selects(after):
        return known
    return {f"serial {i.serial}": i for i in known.values() if i.serial and i.uuid}


def _selects(host: GpuHost) -> dict[str, object]:
    return {name: group.select for name, group in host.spec.gpus.items()}
