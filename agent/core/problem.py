"""A problem in a spec file: where it is, what was found, what was expected; and how it is written for people.

Values are shown through ``show`` only: it never repeats what looks like a secret.
"""

import json
import re
from dataclasses import dataclass

Path = tuple[str | int, ...]
Mark = tuple[int, int]  # line and column, both from 1

_LONGEST = 60
_HIDDEN = "a value (not shown)"

_TOKEN_SHAPE = re.compile(
    r"""(?:^|(?<=[\s=:,;"'@(]))(?:
        hf_[A-Za-z0-9]{10,} | sk-[A-Za-z0-9_-]{10,} | nvapi-[A-Za-z0-9_-]{10,} | gh[pousr]_[A-Za-z0-9]{10,}
        | github_pat_[A-Za-z0-9_]{10,} | glpat-[A-Za-z0-9_-]{10,} | xox[abeprs]-[A-Za-z0-9-]{10,}
        | AKIA[0-9A-Z]{16} | AIza[0-9A-Za-z_-]{30,} | eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}
    )
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY
    | ://[^/\s:@]{1,200}:[^/\s@]{1,200}@
    | (?i:token|secret|password|passwd|api[_-]?key)["']?[ ]?[=:][ ]?["']?[^\s"']""",
    re.VERBOSE,
)
_SWITCHES = {"", "0", "1", "true", "false", "yes", "no", "on", "off"}
_NOT_SECRET_ENDS = {"PATH", "FILE", "DIR", "ID"}
_SECRET_WORDS = {"SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "APIKEY"}
_SECRET_ENDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "APIKEY", "CREDENTIAL", "CREDENTIALS")
_KEY_OWNERS = {"API", "ACCESS", "PRIVATE", "AUTH", "SECRET", "ENCRYPTION", "SIGNING", "MASTER", "ACCOUNT"}
_COUNTED = {"PER", "EOS", "BOS", "PAD", "STOP", "MAX", "MIN", "NUM"}  # EOS_TOKEN: a token, not a credential


@dataclass(frozen=True, slots=True)
class Problem:
    """``uses``: other paths that the judgement rests on; where one of them is itself wrong, it is not made."""

    path: Path
    text: str
    at_key: bool = False  # points at the key, not at its value
    mark: Mark | None = None  # where no path leads there
    uses: tuple[Path, ...] = ()


def say_path(path: Path) -> str:
    """``spec.gpus.inference.select[1]``; the root is ``(document)``."""
    words = ""
    for step in path:
        if isinstance(step, int):
            words += f"[{step}]"
        else:
            words += ("." if words else "") + _say_step(step)
    return words or "(document)"


def _say_step(step: str) -> str:
    if secret_value(step):
        return "(not shown)"
    text = step if step.isprintable() else json.dumps(step)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def secret_name(name: str) -> bool:
    """The name of an environment variable or a flag says that its value is a credential: HF_TOKEN, api-key."""
    words = [word for word in re.split(r"[^A-Z0-9]+", name.upper()) if word and not word.isdigit()]
    if not words or words[-1] in _NOT_SECRET_ENDS:
        return False
    before = words[-2] if len(words) > 1 else ""
    if before in _COUNTED:
        return False
    is_key = words[-1] == "KEY" and before in _KEY_OWNERS
    return is_key or words[-1].endswith(_SECRET_ENDS) or bool(_SECRET_WORDS.intersection(words))


def secret_value(value: object) -> bool:
    """A well-known shape of credentials: hf_..., sk-..., a private key, a password in a URL."""
    return isinstance(value, str) and _TOKEN_SHAPE.search(value) is not None


def secret_setting(name: str, value: object) -> bool:
    """A credential given as a value: by its shape, or by its name unless it only switches something."""
    if secret_value(value):
        return True
    return secret_name(name) and value is not None and str(value).strip().lower() not in _SWITCHES


def show(value: object, path: Path = ()) -> str:
    """A value as the operator wrote it, short enough for one line."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if _hidden(value, path):
        return _HIDDEN
    if isinstance(value, str):
        return json.dumps(value if len(value) <= _LONGEST else value[:_LONGEST] + "...", ensure_ascii=False)
    return str(value)


def _hidden(value: object, path: Path) -> bool:
    steps = [step for step in path if isinstance(step, str)]
    if "secrets" in steps[:-1] or secret_value(value):
        return True
    return any(secret_setting(step, value) for step in steps)
