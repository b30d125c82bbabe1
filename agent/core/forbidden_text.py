"""What no text of a plan may say: advice that costs SEV-SNP (law 5), and the values of secrets (law 10)."""

import re
from collections.abc import Iterable

from agent.core.inputs import Inputs
from agent.core.problem import secret_value

_UNTRANSLATED = re.compile(
    r"\b(?:iommu=(?:\S*,)?(?:pt|off)|(?:amd|intel)_iommu=(?:\S*,)?off|iommu\.passthrough=(?:1|y|on))\b"
)
_TAKES_AWAY = re.compile(r"\b(remove|drop|delete|without|no|not|never)\b", re.IGNORECASE)


def proposes_untranslated(text: str) -> bool:
    """Some clause names a kernel argument that takes DMA out of translation, and does not take that away."""
    clauses = re.split(r"[;:.]\s|\bthen\b|\n", text)
    return any(_UNTRANSLATED.search(clause) and not _TAKES_AWAY.search(clause) for clause in clauses)


def secret_names(inputs: Inputs) -> list[str]:
    """Names of every secret that a service of the spec uses."""
    return sorted({n for s in inputs.spec.services.values() for n in s.secrets})


def secrets_said(inputs: Inputs, texts: Iterable[str]) -> list[str]:
    """Names of secrets that are given a value, and anything of the well-known shapes of credentials."""
    text = " ".join(texts)
    named = [n for n in secret_names(inputs) if re.search(rf"\b{re.escape(n)}=", text)]
    return named or (["of a well-known shape"] if secret_value(text) else [])
