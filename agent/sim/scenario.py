"""Scenarios: how a simulated host differs from its profile, what fails, and what happens when.

``docs/reference/scenario.md`` has the grammar. Keys are camelCase in files.
"""

import builtins
import difflib
import errno as errnos
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from agent.core.problem import Path as Place
from agent.sim.initial import initial_state
from agent.sim.merge import patched
from agent.sim.profile import Answer, ProfileModel, Seconds, When, load_profile
from agent.sim.yaml_text import LineOf, ScenarioError, read_yaml, say_problems

CALLS = frozenset(
    {
        "platform.read",
        "platform.load_module",
        "platform.make_device_nodes",
        "platform.set_module_parameter",
        "platform.refresh_boot_loader",
        "pci.read",
        "pci.read_driver",
        "pci.set_override",
        "pci.unbind",
        "pci.unbind_state",
        "pci.probe",
        "pci.set_group_type",
        "nvml.read",
        "nvml.set_persistence_mode",
        "nvml.set_power_limit",
        "nvml.set_locked_graphics_clocks",
        "nvml.set_locked_memory_clocks",
        "nvml.set_ecc",
        "nvml.set_compute_mode",
        "nvml.set_mig",
        "holders.read",
        "kernel_log.read",
        "target.facts",
        "target.unit",
        "target.process",
        "target.exists",
        "target.read_file",
        "target.write_file",
        "target.remove_file",
        "target.install_secrets",
        "target.daemon_reload",
        "target.start_unit",
        "target.stop_unit",
        "target.kill_unit",
        "target.reset_failed",
        "target.unit_log",
        "p2p.run",
    }
)
RULES = frozenset({"p2p.pair", "p2p.control", "service.start", "service.stop", "server"})

PairText = Literal["good", "corrupt", "hung", "error", "unsupported", "not-run"]
AnswerFault = Literal[
    "ok", "empty", "exclaim", "nonsense", "no-tokens", "error500", "hang", "die-half-way", "no-usage"
]


class ServerChange(ProfileModel):
    """What about a service's HTTP server differs from its profile."""

    answer: AnswerFault | None = None
    health: int | Literal["hang"] | None = Field(default=None, description="HTTP status of /health, or hang.")
    after_requests: int | None = Field(default=None, description="Answers before the fault begins.")
    requests: int | None = Field(default=None, description="How many requests the fault lasts.")
    load_seconds: float | None = None
    factor: float | None = Field(default=None, description="Speed, as a factor.")
    ttft_seconds: float | None = None
    drain_seconds: float | None = None
    sigterm: Literal["drain", "ignore"] | None = None
    max_total_tokens: int | None = None
    version: str | None = None
    answers: tuple[Answer, ...] | None = None
    default_answer: str | None = None
    server_info: dict[str, Any] | None = Field(default=None, description="Merged over /server_info.")
    dying_words: tuple[str, ...] | None = Field(default=None, description="Unit log lines when it dies.")

    def changes(self) -> dict[str, Any]:
        own = set(ServerChange.model_fields)
        return self.model_dump(mode="json", exclude_none=True, include=own)


class Crash(ProfileModel):
    """The process ends ``after`` its start, by exit ``status`` or by ``signal``."""

    status: int = 1
    signal: int | None = None
    after: Seconds = 3.0
    log: tuple[str, ...] = ()


_EFFECTS = (
    "errno",
    "raises",
    "block",
    "succeed_without_effect",
    "value",
    "unknown",
    "absent",
    "code",
    "result",
    "detail",
    "crash",
    "hang",
)


class Fault(ServerChange):
    """One thing that goes wrong at one port call or rule."""

    on: str
    target: str | None = Field(default=None, description="What the call is about; * and ? match.")
    times: int | None = Field(default=None, ge=1, description="How often it strikes; unset: always.")
    after: int = Field(default=0, ge=0, description="How many matching calls pass before it strikes.")
    when: When | None = Field(default=None, description="Only for services started like this.")
    unless: When | None = Field(default=None, description="Not for services started like this.")
    while_exists: str | None = Field(default=None, description="Only while this path exists in the target.")

    errno: str | None = None
    raises: str | None = Field(default=None, alias="raise")
    block: bool | None = None
    delay: Seconds | None = None
    succeed_without_effect: bool | None = None
    value: dict[str, Any] | None = Field(default=None, description="Fields of what is read.")
    unknown: str | None = Field(default=None, description="The fact is Unknown for this reason.")
    absent: str | None = Field(default=None, description="The fact is Absent for this reason.")
    code: int | None = Field(default=None, description="NVML error code.")

    source: str = "*"
    destination: str = "*"
    path: str = "*"
    gpus: int | None = Field(default=None, description="Only in tests of this many GPUs.")
    result: PairText | None = None
    detail: str = ""

    crash: Crash | None = None
    hang: bool | None = None

    @field_validator("on")
    @classmethod
    def _known_call(cls, value: str) -> str:
        if value not in CALLS | RULES:
            near = difflib.get_close_matches(value, CALLS | RULES, 1)
            raise ValueError(f"expected a port call or rule{f', such as {near[0]}' if near else ''}")
        return value

    @field_validator("errno")
    @classmethod
    def _known_errno(cls, value: str | None) -> str | None:
        if value is not None and not hasattr(errnos, value):
            raise ValueError("expected an errno by name, such as EIO")
        return value

    @field_validator("raises")
    @classmethod
    def _known_exception(cls, value: str | None) -> str | None:
        kind = getattr(builtins, value, None) if value is not None else Exception
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            message = "expected a built-in exception by name, such as RuntimeError"
            raise ValueError(message)  # noqa: TRY004 - pydantic collects ValueErrors
        return value

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        effects = [name for name in _EFFECTS if getattr(self, name) not in (None, "")]
        if self.on == "server":
            if not self.changes():
                raise ValueError("expected what changes about the server, such as answer: exclaim")
        elif self.on == "p2p.pair" and self.result is None:
            raise ValueError("expected result: good, corrupt, hung, error, unsupported or not-run")
        elif not effects and self.delay is None:
            raise ValueError("expected what goes wrong, such as errno: EIO, block: true or unknown: a reason")
        return self


class LogEntry(ProfileModel):
    text: str
    repeat: int = Field(default=1, ge=1)


class UnitDies(ProfileModel):
    unit: str
    target: str | None = None
    signal: int | None = 9
    status: int = 0
    log: tuple[str, ...] = ()


class SpecEdit(ProfileModel):
    """A change to the spec file: the whole ``text``, or keys merged in by ``set`` (null removes)."""

    text: str | None = None
    set: dict[str, Any] | None = None
    how: Literal["rename", "write", "delete"] = "rename"


class Reboot(ProfileModel):
    """A boot: with this command line from now on, and ``set`` applied to the host that comes up."""

    cmdline: tuple[str, ...] | None = None
    set: dict[str, Any] = {}


class Do(ProfileModel):
    """What an event does; several keys act in this order."""

    log: str | LogEntry | tuple[str | LogEntry, ...] | None = None
    reboot: Reboot | None = None
    set: dict[str, Any] | None = None
    renumber: dict[str, str] | None = None
    rescan: tuple[str, ...] | None = None
    unit_dies: UnitDies | None = None
    server: ServerChange | None = None
    fault: Fault | None = None
    vm_start: str | None = None
    vm_stop: str | None = None
    edit_spec: SpecEdit | tuple[SpecEdit, ...] | None = None

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("expected what happens, such as log: or unitDies:")
        return self


class Event(ProfileModel):
    """``at`` simulated seconds after the host was created, or after ``after_calls`` was reached."""

    at: Seconds = 0.0
    after_calls: dict[str, int] = {}
    do: Do

    @field_validator("after_calls")
    @classmethod
    def _known_calls(cls, value: dict[str, int]) -> dict[str, int]:
        for name in value:
            if name not in CALLS:
                near = difflib.get_close_matches(name, CALLS, 1)
                raise ValueError(f"{name} is no port call{f'; {near[0]} is' if near else ''}")
        return value


class Scenario(ProfileModel):
    description: str = ""
    profile: str = "esc8000a"
    time_factor: float | None = Field(default=None, gt=0)
    spec: str | dict[str, Any] | None = Field(
        default=None, description="A path beside the scenario, a mapping, or the text itself (several lines)."
    )
    set: dict[str, Any] = {}
    renumber: dict[str, str] = {}
    faults: tuple[Fault, ...] = ()
    events: tuple[Event, ...] = ()

    @property
    def spec_text(self) -> str | None:
        """The spec's text, when it is given in the scenario itself rather than by path."""
        if isinstance(self.spec, dict):
            return yaml.safe_dump(self.spec, sort_keys=False)
        return self.spec if self.spec and "\n" in self.spec else None

    @property
    def spec_path(self) -> Path | None:
        return Path(self.spec) if isinstance(self.spec, str) and "\n" not in self.spec else None


def parse_scenario(text: str, origin: str) -> Scenario:
    """Raises ``ScenarioError`` with every problem, each with its file, line, place and what was expected."""
    data, line_of = read_yaml(text, origin)
    if not isinstance(data, dict):
        raise ScenarioError(
            (f"{origin}:1: expected a mapping with keys such as profile, set, faults, events",)
        )
    try:
        scenario = Scenario.model_validate(data)
    except ValidationError as error:
        raise say_problems(error, origin, line_of) from error
    _check_sets(scenario, origin, line_of)
    return scenario


def _check_sets(scenario: Scenario, origin: str, line_of: LineOf) -> None:
    """Try every ``set`` on the profile now, so that a typing error shows before the host is in use."""
    fresh = initial_state(load_profile(scenario.profile))
    sets: list[tuple[Place, dict[str, Any]]] = [(("set",), scenario.set)]
    for index, event in enumerate(scenario.events):
        sets.append((("events", index, "do", "set"), event.do.set or {}))
        sets.append(
            (("events", index, "do", "reboot", "set"), event.do.reboot.set if event.do.reboot else {})
        )
    problems: list[str] = []
    for at, values in sets:
        try:
            patched(fresh, values, origin, line_of, at)
        except ScenarioError as error:
            problems += error.problems
    if problems:
        raise ScenarioError(tuple(problems))


def load_scenario(path: Path) -> Scenario:
    """Raises ``ScenarioError``, or ``OSError`` when the file cannot be read. A spec path becomes relative to it."""
    scenario = parse_scenario(path.read_text(encoding="utf-8"), str(path))
    if scenario.spec_path is not None:
        return scenario.model_copy(update={"spec": str(path.parent / scenario.spec_path)})
    return scenario
