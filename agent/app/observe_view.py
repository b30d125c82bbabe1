"""An observation for people: what is known, what is absent, and what could not be read, each said as such."""

import shlex
import time
from collections.abc import Iterable, Mapping
from typing import Any

from agent.app.fact_words import Row, tell, value_words
from agent.app.observe_dict import HIDDEN, observation_to_dict, shown, shown_argv, shown_env
from agent.app.observe_nvml import nvml_rows
from agent.app.status_page import table
from agent.app.terminal import Style, cells, escape, pad, wrap
from agent.core.fact import Absent, Fact, Known, Unknown
from agent.core.kernel_log import note
from agent.core.observation import (
    Holder,
    KernelEvent,
    Module,
    Observation,
    Pci,
    PciFunction,
    ServiceFacts,
    Unit,
)
from agent.core.unbind_state import detail_of

__all__ = ["observation_to_dict", "render_observation"]

WIDTH = 100
NVIDIA = 0x10DE
RELEVANT_MODULES = ("nvidia", "nouveau", "vfio", "kvm", "snd_hda_intel", "ccp")
CLASSES = {0x0300: "VGA", 0x0302: "3D", 0x0403: "audio", 0x0C03: "USB", 0x0C80: "serial bus"}


def render_observation(obs: Observation, *, color: bool) -> str:
    """Every section of the observation, without a last line feed."""
    style = Style(on=color)
    sections: list[tuple[str, list[str]]] = [
        ("Platform", _rows(_platform(obs, style))),
        ("Kernel modules", _modules(obs, style)),
        ("PCI: NVIDIA functions", _pci(obs, style)),
        ("PCI: bridges and the rest", _rest(obs, style)),
        ("Holders", _rows([(a, tell(f, style, _holders)) for a, f in sorted(obs.holders.items())])),
        ("NVML", _nvml(obs, style)),
        ("Targets", _targets(obs, style)),
        ("Services", _services(obs, style)),
        ("Units that may be quiesced", _rows([(n, tell(f, style, _unit)) for n, f in sorted(obs.quiesced.items())])),
        ("Files of the agent on this host", _rows([(p, tell(f, style, _size)) for p, f in sorted(obs.host_files.items())])),
        ("Kernel events since boot", _events(obs, style)),
    ]  # fmt: skip
    blocks = ["\n".join([style.strong(title), *lines]) for title, lines in sections if lines]
    return "\n\n".join(blocks)


def _rows(rows: Iterable[Row]) -> list[str]:
    """Names and what is said of them, in two columns; long text goes on below itself."""
    told = [(escape(name), text) for name, text in rows]
    column = min(44, max((cells(name) for name, _ in told), default=0)) + 2
    lines = []
    for name, text in told:
        parts = wrap(text, WIDTH - column - 2)
        lines += [f"  {pad(name, column)}{parts[0]}", *(" " * (column + 2) + part for part in parts[1:])]
    return lines


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
        return _rows([("modules", tell(modules, style))])
    relevant = [m for name, m in sorted(modules.value.items()) if name.startswith(RELEVANT_MODULES)]
    lines = _rows([(m.name, escape(_module(m))) for m in relevant])
    return [*lines, f"  (other modules loaded: {len(modules.value) - len(relevant)})"]


def _module(module: Module) -> str:
    users = f" by {', '.join(module.users)}" if module.users else ""
    parameters = " ".join(f"{k}={v}" for k, v in sorted(module.parameters.items()))
    return f"used {module.use_count} times{users}" + (f"; {parameters}" if parameters else "")


def _pci(obs: Observation, style: Style) -> list[str]:
    if not isinstance(obs.pci, Known):
        return _rows([("PCI tree", tell(obs.pci, style))])
    pci = obs.pci.value
    ours = [f for _, f in sorted(pci.functions.items()) if f.vendor_id == NVIDIA and not f.is_bridge]
    if not ours:
        return ["  none"]
    heads = ("address", "what", "driver", "override", "group", "NUMA", "power", "slot", "link")
    # Reasons stand below the table; in it, a fact is one word.
    body = [heads, *(_function(f, pci) for f in ours)]
    lines = ["  " + line for line in table(body, left=frozenset(range(len(heads))))]
    lines += _rows(_reasons(ours, style))
    lines += _rows([(f.address, _recovery(f, style)) for f in ours if f.is_gpu])
    if pci.pending_unbinds:
        told = ", ".join(f"{a}{detail_of(obs.unbinds.get(a))}" for a in pci.pending_unbinds)
        lines.append(style.bad(f"  unbinds that have not returned: {escape(told)}"))
    return lines


def _word(fact: Fact[Any]) -> str:
    if isinstance(fact, Known):
        return escape(value_words(fact.value))
    return "none" if isinstance(fact, Absent) else "UNKNOWN"


def _function(function: PciFunction, pci: Pci) -> tuple[str, ...]:
    what = (
        "GPU"
        if function.is_gpu
        else CLASSES.get(function.class_code >> 8, f"class {function.class_code:06x}")
    )
    name = f"{what} {function.vendor_id:04x}:{function.device_id:04x}"
    group = _word(function.iommu_group)
    if isinstance(function.iommu_group, Known) and (found := pci.groups.get(function.iommu_group.value)):
        group += f" {_word(found.type)}"
    console = " (console)" if function.boot_vga == Known(value=True) else ""
    return (
        escape(function.address), name + console, _word(function.driver), _word(function.driver_override), group,
        _word(function.numa_node), _word(function.power_state), _word(function.slot), _link(function),
    )  # fmt: skip


def _link(function: PciFunction) -> str:
    now, most = (function.link_speed, function.link_width), (function.max_link_speed, function.max_link_width)
    if isinstance(now[0], Absent):
        return "none"
    told = f"{_word(now[0])} x{_word(now[1])}"
    return told if now == most else f"{told} of {_word(most[0])} x{_word(most[1])}"


def _recovery(function: PciFunction, style: Style) -> str:
    """What there is to bring a lost GPU back, and whether the kernel may put it to sleep."""
    return (
        f"reset by {tell(function.reset_methods, style)}, power control {tell(function.power_control, style)}"
    )


def _reasons(functions: list[PciFunction], style: Style) -> list[Row]:
    """Why a word in the table is UNKNOWN."""
    named = (
        "driver",
        "driver_override",
        "iommu_group",
        "numa_node",
        "power_state",
        "slot",
        "link_speed",
        "serial",
    )
    return [
        (f.address, f"{name}: {tell(fact, style)}")
        for f in functions
        for name in named
        if isinstance(fact := getattr(f, name), Unknown)
    ]


def _rest(obs: Observation, style: Style) -> list[str]:
    if not isinstance(obs.pci, Known):
        return []
    pci = obs.pci.value
    acs: dict[str, list[str]] = {}
    for address, function in sorted(pci.functions.items()):
        if function.is_bridge:
            told = (
                f"{function.acs_ctl.value:#06x}"
                if isinstance(function.acs_ctl, Known)
                else tell(function.acs_ctl, style)
            )
            acs.setdefault(told, []).append(address)
    rows = [
        (f"bridges: {len(found)}", f"ACS control {told}: {escape(' '.join(found))}")
        for told, found in acs.items()
    ]
    others = [f for f in pci.functions.values() if not f.is_bridge and f.vendor_id != NVIDIA]
    rows.append((f"others: {len(others)}", "functions by other vendors"))
    for number, group in sorted(pci.groups.items()):
        if any(pci.functions[a].vendor_id == NVIDIA for a in group.members if a in pci.functions):
            rows.append(
                (f"IOMMU group {number}", f"{tell(group.type, style)}: {escape(' '.join(group.members))}")
            )
    return _rows(rows)


def _holders(holders: tuple[Holder, ...]) -> str:
    return "; ".join(h.describe() for h in holders) or "nothing holds it"


def _nvml(obs: Observation, style: Style) -> list[str]:
    return _rows(
        nvml_rows(obs.nvml.value, style) if isinstance(obs.nvml, Known) else [("NVML", tell(obs.nvml, style))]
    )


def _targets(obs: Observation, style: Style) -> list[str]:
    lines = []
    for name, seen in sorted(obs.targets.items()):
        facts: dict[str, Fact[Any]] = {
            "reachable": seen.reachable, "user-space driver": seen.user_driver, "NVML inside": seen.nvml,
            "/dev/shm bytes": seen.shm_bytes, "device nodes": seen.device_nodes, "SGLang": seen.sglang_version,
        }  # fmt: skip
        lines += [f"  {escape(name)}"] if len(obs.targets) > 1 or name != "host" else []
        lines += _rows([(f"  {label}", tell(fact, style)) for label, fact in facts.items()])
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
    return [f"  {escape(name)}", *_rows(rows)]


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
        return _rows([("kernel log", tell(events, style))])
    gaps = [("kernel log", "lines of this boot were overwritten unread")] if obs.kernel_gaps else []
    left = (
        [("kernel log", "it grows faster than it can be read: lines are left")] if obs.kernel_unread else []
    )
    if not events.value and not gaps and not left:
        return ["  none that the agent knows"]
    return _rows([*gaps, *left, *(row for event in events.value for row in _event(event))])


def _event(event: KernelEvent) -> list[Row]:
    code = "" if event.code is None else f" {event.code:#x}" if event.sort != "xid" else f" {event.code}"
    peer = f", peer {event.peer}" if event.peer else ""
    last = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(event.last))
    told = f"{event.sort}{code}, count {event.count} or more, last {last}{peer}"
    told_of = note(event)
    meant = f"{told_of.meaning}; next: {told_of.next_step}"
    return [(event.address or "host", escape(told)), ("", escape(shown(event.sample))), ("", escape(meant))]
