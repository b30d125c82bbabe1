"""An observation as plain data for programs: every fact says whether it is known, absent or unknown.

Law 10 holds here too: of a process's environment only what the agent itself reads is shown, and no text that
looks like a credential.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass

from agent.core.fact import Absent, Known, Unknown
from agent.core.observation import Observation, Process
from agent.core.problem import secret_name, secret_setting, secret_value

HIDDEN = "(not shown)"
OURS = ("NCCL_", "CUDA_", "SGLANG_", "NVIDIA_", "SPT_", "VLLM_", "TORCH_")


def observation_to_dict(obs: Observation) -> dict[str, object]:
    """JSON-able, and the same for the same observation: mappings are sorted by key.

    A fact is ``{"known": value}``, ``{"absent": reason}`` or ``{"unknown": reason, "code": code}``.
    """
    return {f.name: _plain(getattr(obs, f.name)) for f in fields(obs)}


def _plain(value: object) -> object:
    match value:
        case Known(inner):
            return {"known": _plain(inner)}
        case Absent(reason):
            return {"absent": reason}
        case Unknown(reason, code):
            return {"unknown": shown(reason), "code": code}
        case str():
            return shown(value)
        case Process(pid, argv, env):
            return {"pid": pid, "argv": shown_argv(argv), "env": shown_env(env)}
        case Mapping():
            return {str(key): _plain(value[key]) for key in sorted(value)}
        case tuple() | list():
            return [_plain(item) for item in value]
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return value


def shown(text: str) -> str:
    """Text without the lines that look like a credential."""
    if not secret_value(text):
        return text
    return "\n".join(HIDDEN if secret_value(line) else line for line in text.split("\n"))


def shown_env(env: Mapping[str, str]) -> dict[str, str]:
    """Every name; the values of the variables that the agent has to do with."""
    return {
        name: env[name] if name.startswith(OURS) and not secret_setting(name, env[name]) else HIDDEN
        for name in sorted(env)
    }


def shown_argv(argv: tuple[str, ...]) -> list[str]:
    """The words of a command, without what follows a flag for a credential."""
    told = []
    for before, word in zip(("", *argv), argv, strict=False):
        name, equals, value = word.partition("=")
        if before.startswith("--") and not word.startswith("--") and secret_name(before):
            told.append(HIDDEN)
        elif equals and name.startswith("--") and secret_setting(name, value):
            told.append(f"{name}={HIDDEN}")
        else:
            told.append(shown(word))
    return told
