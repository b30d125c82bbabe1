"""Law 10 for text that others wrote: logs, errors, reasons, without what looks like a credential.

Such text is shown, remembered and journalled, and nobody chose its words. It is never a reason to stop working on the
host; so it is made harmless where it comes in, and once more where the agent speaks.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from agent.core.condition import Condition
from agent.core.plan import Drift, Plan, Refusal
from agent.core.spec import Spec

HIDDEN = "(not shown)"

_KEY_BLOCK = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_LOGIN = re.compile(r"://[^/\s:@]{1,200}:[^/\s@]{1,200}@")
_BEARER = re.compile(r"\b(bearer)\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_TOKEN = re.compile(
    r"""(?:
        (?<![A-Za-z0-9])sk-[A-Za-z0-9_-]{10,} | hf_[A-Za-z0-9]{10,} | nvapi-[A-Za-z0-9_-]{10,} | gh[pousr]_[A-Za-z0-9]{10,}
        | github_pat_[A-Za-z0-9_]{10,} | glpat-[A-Za-z0-9_-]{10,} | xox[abeprs]-[A-Za-z0-9-]{10,}
        | AKIA[0-9A-Z]{16} | AIza[0-9A-Za-z_-]{30,} | eyJ[A-Za-z0-9_-]{10,}(?:\.[A-Za-z0-9_-]+)+
    )""",
    re.VERBOSE,
)
_OWNERS = "access|private|auth|encryption|signing|master|account"
_WORDS = rf"token|secret|password|passwd|passphrase|api[_-]?key|credentials?|(?:{_OWNERS})[_-]?key"
_VALUE = r"(?:\(not shown\)[^\s\"',;)\]}]*|\"[^\"]+\"|'[^']+'|[\"']?[^\s\"'][^\s\"',;)\]}]*)"
_FLAG = re.compile(rf"(--[a-z0-9-]*(?:{_WORDS}))\s+(?!-){_VALUE}", re.IGNORECASE)


def redact(text: str, names: Iterable[str] = ()) -> str:
    """``text`` with every credential replaced by "(not shown)": well-known shapes, and values of what is named like one.

    ``names``: further variables whose values are secret, whatever they are called. The same text twice is the same.
    """
    text = _KEY_BLOCK.sub(HIDDEN, text)
    text = _LOGIN.sub(f"://{HIDDEN}@", text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    text = _settings(tuple(sorted(names))).sub(lambda m: f"{m[m.lastgroup or 0]} {HIDDEN}", text)
    text = _FLAG.sub(rf"\1 {HIDDEN}", text)
    return _TOKEN.sub(HIDDEN, text)


@lru_cache(maxsize=64)
def _settings(names: tuple[str, ...]) -> re.Pattern[str]:
    """NAME=value, NAME: value, 'name': 'value'; the name stays, the sign goes with the value."""
    sign = r"[\"']?\s?[=:]\s?"
    pattern = rf"(?P<name>(?i:{_WORDS})){sign}{_VALUE}"
    if names:
        pattern += rf"|\b(?P<named>{'|'.join(map(re.escape, names))}){sign}(?:{_VALUE})?"
    return re.compile(pattern)


def redact_all(value: object) -> object:
    """Plain data (as for JSON) with every text in it redacted."""
    match value:
        case str():
            return redact(value)
        case dict():
            return {key: redact_all(item) for key, item in value.items()}
        case list() | tuple():
            return [redact_all(item) for item in value]
    return value


def secret_names(spec: Spec) -> tuple[str, ...]:
    """Every variable that some service of the spec gets as a secret."""
    return tuple(sorted({name for service in spec.services.values() for name in service.secrets}))


def redacted_plan(plan: Plan, names: tuple[str, ...]) -> Plan:
    """Drift and refusals tell what was seen, in words of others. Actions are the agent's own: law 10 judges them."""
    return replace(
        plan,
        drifts=tuple(_drift(d, names) for d in plan.drifts),
        refusals=tuple(_refusal(r, names) for r in plan.refusals),
    )


def _drift(drift: Drift, names: tuple[str, ...]) -> Drift:
    desired, observed = redact(drift.desired, names), redact(drift.observed, names)
    return replace(drift, desired=desired, observed=observed, why=redact(drift.why, names))


def _refusal(refusal: Refusal, names: tuple[str, ...]) -> Refusal:
    message, step = redact(refusal.message, names), redact(refusal.next_step, names)
    return replace(refusal, message=message, next_step=step)


def redacted_condition(condition: Condition, names: tuple[str, ...]) -> Condition:
    message, step = redact(condition.message, names), redact(condition.next_step, names)
    if (message, step) == (condition.message, condition.next_step):
        return condition
    return condition.model_copy(update={"message": message, "next_step": step})
