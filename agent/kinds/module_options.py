"""Module options: the agent's file in modprobe.d, and the values that loaded modules have.

Source: modprobe.d(5); Documentation/ABI/testing/sysfs-module.
"""

import re
from collections.abc import Mapping

from agent.core.errors import TransientError
from agent.core.fact import Absent, Fact, Known, Unknown, value_or
from agent.core.inputs import Inputs
from agent.core.observation import Module
from agent.core.plan import Action, Disruption, Drift, Refusal, Stage
from agent.kinds.platform_finding import Finding
from agent.ports import Ports

MODPROBE_CONF = "/etc/modprobe.d/gpu-host-agent.conf"
WORD = re.compile(r"[A-Za-z0-9_.,:/=+-]+")


def option_findings(inputs: Inputs) -> list[Finding]:
    return [*_live(inputs), *_elsewhere(inputs)]


def _live(inputs: Inputs) -> list[Finding]:
    modules = inputs.obs.platform.modules
    findings = []
    for name, options in inputs.spec.platform.modules.items():
        for parameter, value in options.items():
            observed = _parameter(modules, name, parameter)
            if isinstance(observed, Absent):
                continue  # not loaded: the file that the agent writes decides when it is
            step = f"unload and load {name}, or reboot: {MODPROBE_CONF} has the option"
            wanted = _module_value(str(value), observed)
            step = _initramfs_step(name, inputs) or step
            findings.append(Finding(f"{name}.{parameter}", wanted, observed, "ModuleOptions", step))
    return findings


def _initramfs_step(module: str, inputs: Inputs) -> str:
    """A module in the initramfs has the options that the initramfs was made with."""
    inside = inputs.obs.platform.initramfs
    if not isinstance(inside, Known) or module.replace("-", "_") not in inside.value.modules:
        return ""
    return (
        f"run {inside.value.rebuild} and reboot: {module} is loaded from {inside.value.image},"
        f" which has the options of the time when it was made; {MODPROBE_CONF} has the option"
    )


def _elsewhere(inputs: Inputs) -> list[Finding]:
    """The same parameter with another value in somebody else's file: which of them counts depends on file names."""
    lines = value_or(inputs.obs.platform.module_option_files, ())
    findings = []
    for name, options in inputs.spec.platform.modules.items():
        for parameter, value in options.items():
            others = [
                (path, found)
                for path, line in lines
                if path != MODPROBE_CONF and (found := _option(line, name, parameter)) is not None
            ]
            differing = [f"{found} in {path}" for path, found in others if found != str(value)]
            if differing:
                step = f"remove {parameter} from {' and '.join(dict.fromkeys(p for p, _ in others))}"
                field = f"{name}.{parameter} in modprobe.d"
                findings.append(Finding(field, str(value), Known(", ".join(differing)), "OptionTwice", step))
    return findings


def _option(line: str, module: str, parameter: str) -> str | None:
    words = line.split()
    if len(words) < 2 or words[1].replace("-", "_") != module.replace("-", "_"):
        return None
    wanted = parameter.replace("-", "_")
    found = [w.partition("=")[2] for w in words[2:] if w.partition("=")[0].replace("-", "_") == wanted]
    return found[-1] if found else None


def _parameter(modules: Fact[Mapping[str, Module]], name: str, parameter: str) -> Fact[str]:
    if not isinstance(modules, Known):
        return Unknown(modules.reason or "modules were not read")
    module = modules.value.get(name.replace("-", "_"))  # the kernel's own spelling
    if module is None:
        return Absent("not loaded")
    found = module.parameters.get(parameter.replace("-", "_"))
    return Known(found) if found is not None else Unknown(f"{name} shows no parameter {parameter}")


def _module_value(wanted: str, observed: Fact[str]) -> str:
    """Boolean parameters read back as Y and N whatever was written."""
    if observed in (Known("Y"), Known("N")):
        return {"1": "Y", "0": "N", "y": "Y", "n": "N"}.get(wanted, wanted)
    return wanted


def modprobe_conf(inputs: Inputs) -> str:
    modules = inputs.spec.platform.modules
    if not modules:
        return ""
    lines = ["# Written by gpu-host-agent from the spec; edits here are drift and will be taken back."]
    lines += [
        f"options {m} " + " ".join(f"{k}={v}" for k, v in sorted(o.items()))
        for m, o in sorted(modules.items())
    ]
    return "\n".join(lines) + "\n"


def _differs(inputs: Inputs) -> bool:
    observed = inputs.obs.host_files.get(MODPROBE_CONF)
    wanted = modprobe_conf(inputs)
    if not isinstance(observed, Known | Absent) or _unwritable(inputs):
        return False
    return value_or(observed, "") != wanted or (not wanted and isinstance(observed, Known))


def _unwritable(inputs: Inputs) -> list[str]:
    """Names and values that would not be one word of modprobe.d: a newline in one could run a command as root."""
    words = [w for m, o in inputs.spec.platform.modules.items() for w in (m, *o, *map(str, o.values()))]
    return [w for w in words if not WORD.fullmatch(w)]


def option_drift(inputs: Inputs) -> list[Drift]:
    if not _differs(inputs):
        return []
    wanted = "as rendered" if modprobe_conf(inputs) else "none"
    return [Drift("platform", "host", MODPROBE_CONF, wanted, "different", "platform.modules")]


def option_actions(inputs: Inputs) -> list[Action]:
    if not _differs(inputs):
        return []
    text = modprobe_conf(inputs)
    return [
        Action(
            "platform", "write-module-options", "host", f"{'write' if text else 'remove'} {MODPROBE_CONF}",
            Stage.PREPARE, Disruption.NONE, params={"text": text}, undo="put back what was there",
            why="module options must hold when the modules are next loaded", optional=True,
        )
    ]  # fmt: skip


def option_refusals(inputs: Inputs) -> list[Refusal]:
    if bad := _unwritable(inputs):
        message = f"{bad[0][:40]!r} cannot be written to {MODPROBE_CONF}"
        step = "give modules, parameters and values in platform.modules as single words"
        return [Refusal("platform", "host", "NotRenderable", message, step, terminal=True)]
    observed = inputs.obs.host_files.get(MODPROBE_CONF)
    if isinstance(observed, Unknown):
        message = f"{MODPROBE_CONF} cannot be read: {observed.reason}"
        return [Refusal("platform", "host", "NotObserved", message, "wait for the next pass")]
    return []


async def write_options(text: str, ports: Ports) -> None:
    host = ports.targets("host")
    await (host.write_file(MODPROBE_CONF, text) if text else host.remove_file(MODPROBE_CONF))
    if (await host.read_file(MODPROBE_CONF) or "") != text:
        raise TransientError(
            f"{MODPROBE_CONF} reads back different from what was written", reason="ReadBackFailed"
        )
