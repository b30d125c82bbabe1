"""An observation for people: what is known, what is absent, and what could not be read, each said as such."""

import shlex
import time
from collections.abc import Mapping
from typing import Any

from agent.app.observe_dict import HIDDEN, shown, shown_argv, shown_env
from agent.app.observe_nvml import nvml_rows
from agent.app.observe_pci import bridges_and_groups, nvidia_functions
from agent.app.observe_text import Row, columns, tell
from agent.app.terminal import Style, escape
from agent.core.fact import Fact, Known
from agent.core.kernel_log import note
from agent.core.observation import Holder, KernelEvent, Module, Observation, ServiceFacts, Unit

RELEVANT_MODULES = ("nvidia", "nouveau", "vfio", "kvm", "snd_hda_intel", "ccp")


def render_observation(obs: Observation, *, color: bool) -> str:
    """Every section of the observation, without a last line feed."""
    style = Style(on=color)
    sections: list[tuple[str, list[str]]] = [
        ("Platform", columns(_platform(obs, style))),
        ("Kernel modules", _modules(obs, style)),
        ("PCI: NVIDIA functions", nvidia_functions(obs, style)),
        ("PCI: bridges and the rest", bridges_and_groups(obs, style)),
        ("Holders", columns([(a, tell(f, style, _holders)) for a, f in sorted(obs.holders.items())])),
        ("NVML", _nvml(obs, style)),
        ("Targets", _targets(obs, style)),
        ("Services", _services(obs, style)),
        ("Units that may be quiesced", columns([(n, tell(f, style, _unit)) for n, f in sorted(obs.quiesced.items())])),
        ("Files of the agent on this host", columns([(p, tell(f, style, _size)) for p, f in sorted(obs.host_files.items())])),
        ("Kernel events since boot", _events(obs, style)),
    ]  # fmt: skip
    blocks = ["\n".join([style.strong(title), *lines]) for title, lines in sections if lines]
    return "\n\n".join(blocks)


def _platform(obs: Observation, style: Style) -> list[Row]:
    seen = obs.platform
    facts: dict[str, Fact[Any]] = {
        "boot id": seen.boot_id, "kernel": seen.kernel_release, "command line": seen.cmdline, "SEV-SNP": seen.sev_snp,
        "NVIDIA kernel driver": seen.nvidia_driver, "systemd": seen.systemd, "modprobe.d options": seen.module_options,
        "boot loader": seen.boot_loader, "next command line": seen.next_cmdline,
    }  # fmt: skip
    rows = [(name, tell(fact, style)) for name, fact in facts.items()]
    return [
        *rows,
        (
            "GPU drivers in the initramfs",
            tell(seen.initramfs, style, lambda i: " ".join(i.modules) or "none"),
        ),
    ]


def _modules(obs: Observation, style: Style) -> list[str]:
    modules = obs.platform.modules
    if not isinstance(modules, Known):
        return columns([("modules", tell(modules, style))])
    relevant = [m for name, m in sorted(modules.value.items()) if name.startswith(RELEVANT_MODULES)]
    lines = columns([(m.name, escape(_module(m))) for m in relevant])
    return [*lines, f"  (other modules loaded: {len(modules.value) - len(relevant)})"]


def _module(module: Module) -> str:
    users = f" by {', '.join(module.users)}" if module.users else ""
    parameters = " ".join(f"{k}={v}" for k, v in sorted(module.parameters.items()))
    return f"used {module.use_count} times{users}" + (f"; {parameters}" if parameters else "")


def _holders(holders: tuple[Holder, ...]) -> str:
    return "; ".join(h.describe() for h in holders) or "nothing holds it"


def _nvml(obs: Observation, style: Style) -> list[str]:
    seen = obs.nvml
    return columns(nvml_rows(seen.value, style) if isinstance(seen, Known) else [("NVML", tell(seen, style))])


def _targets(obs: Observation, style: Style) -> list[str]:
    lines = []
    for name, seen in sorted(obs.targets.items()):
        facts: dict[str, Fact[Any]] = {
            "reachable": seen.reachable, "user-space driver": seen.user_driver, "NVML inside": seen.nvml,
            "/dev/shm bytes": seen.shm_bytes, "device nodes": seen.device_nodes, "SGLang": seen.sglang_version,
        }  # fmt: skip
        lines += [f"  {escape(name)}"] if len(obs.targets) > 1 or name != "host" else []
        lines += columns([(f"  {label}", tell(fact, style)) for label, fact in facts.items()])
    return lines


def _services(obs: Observation, style: Style) -> list[str]:
    return [line for name, seen in sorted(obs.services.items()) for line in _service(name, seen, style)]


def _service(name: str, seen: ServiceFacts, style: Style) -> list[str]:
    rows = [
        ("  unit", tell(seen.unit, style, _unit)),
        ("  health", tell(seen.health, style)),
        ("  model present", tell(seen.model_present, style)),
        ("  files", tell(seen.files, style, _sizes)),
    ]
    if isinstance(seen.process, Known):
        process = seen.process.value
        rows.append(("  process", escape(f"{process.pid}: {shlex.join(shown_argv(process.argv))}")))
        rows += _environment(process.env)
    else:
        rows.append(("  process", tell(seen.process, style)))
    return [f"  {escape(name)}", *columns(rows)]


def _environment(env: Mapping[str, str]) -> list[Row]:
    told = shown_env(env)
    rows = [("  environment", escape(f"{name}={value}")) for name, value in told.items() if value != HIDDEN]
    hidden = [name for name, value in told.items() if value == HIDDEN]
    return [*rows, ("  environment", f"values not shown: {escape(' '.join(hidden))}")] if hidden else rows


def _unit(unit: Unit) -> str:
    if unit.load_state != "loaded":
        return f"{unit.load_state}"
    told = f"{unit.active_state} ({unit.sub_state}), main pid {unit.main_pid or 'none'}, {len(unit.pids)} processes"
    failed = unit.result not in {"", "success"}
    return told + (f", result {unit.result}, exit status {unit.exit_status}" if failed else "")


def _size(text: str) -> str:
    return f"{len(text.encode(errors='replace'))} bytes"


def _sizes(files: Mapping[str, str]) -> str:
    return ", ".join(f"{path} ({_size(text)})" for path, text in sorted(files.items())) or "none"


def _events(obs: Observation, style: Style) -> list[str]:
    events = obs.kernel_events
    if not isinstance(events, Known):
        return columns([("kernel log", tell(events, style))])
    gaps = [("kernel log", "lines of this boot were overwritten unread")] if obs.kernel_gaps else []
    left = (
        [("kernel log", "it grows faster than it can be read: lines are left")] if obs.kernel_unread else []
    )
    if not events.value and not gaps and not left:
        return ["  none that the agent knows"]
    return columns([*gaps, *left, *(row for event in events.value for row in _event(event))])


def _event(event: KernelEvent) -> list[Row]:
    code = "" if event.code is None else f" {event.code:#x}" if event.sort != "xid" else f" {event.code}"
    peer = f", peer {event.peer}" if event.peer else ""
    last = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(event.last))
    told = f"{event.sort}{code}, count {event.count} or more, last {last}{peer}"
    told_of = note(event)
    meant = f"{told_of.meaning}; next: {told_of.next_step}"
    return [(event.address or "host", escape(told)), ("", escape(shown(event.sample))), ("", escape(meant))]
