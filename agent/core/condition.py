"""Conditions: what is true of the host, in the form operators and tools know."""

from typing import Literal

from agent.core.record import Record

Truth = Literal["True", "False", "Unknown"]


class Condition(Record):
    """``type`` names the claim; ``status`` its truth; ``reason`` one CamelCase word; ``message`` one sentence."""

    type: str
    status: Truth
    reason: str
    message: str = ""
    next_step: str = ""
    last_transition: float = 0.0  # wall clock, seconds
    observed_generation: int = 0


def merge(old: tuple[Condition, ...], new: tuple[Condition, ...], now: float) -> tuple[Condition, ...]:
    """New conditions with the time of their last change of status carried over; sorted by type."""
    before = {c.type: c for c in old}
    merged = []
    for condition in sorted(new, key=lambda c: c.type):
        previous = before.get(condition.type)
        same = previous is not None and previous.status == condition.status
        merged.append(
            condition.model_copy(
                update={"last_transition": previous.last_transition if same and previous else now}
            )
        )
    return tuple(merged)
