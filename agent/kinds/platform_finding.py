"""One platform property, as found."""

from dataclasses import dataclass

from agent.core.fact import Fact, Known, Unknown


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, what was wanted, and how an operator mends it. ``mended``: an action of this plan does."""

    field: str
    desired: str
    observed: Fact[str]
    reason: str
    next_step: str
    mended: bool = False

    @property
    def wrong(self) -> bool:
        return not isinstance(self.observed, Unknown) and self.observed != Known(self.desired)
