"""What is known of locked clocks. NVML sets and resets them and has no call that tells them, so what was set is noted,
and believed only as long as nothing speaks against it.
"""

from agent.core.fact import Fact, Known, Unknown
from agent.core.observation import NOT_TOLD
from agent.core.quantity import UNLOCKED, say_clocks

_STEP = 30  # MHz; a lock is rounded to a clock that the card has, and they lie 15 MHz apart or less


def in_force(
    noted: tuple[int, int] | None, persistence_mode: Fact[bool], clock: Fact[int]
) -> Fact[tuple[int, int]]:
    """``noted``: the last lock, by whoever set it since the driver took this GPU. ``clock``: MHz at this moment.

    A clock below the lock proves nothing: an idle GPU sleeps, and a hot one is slowed down.
    """
    if noted is None:
        return Unknown(
            "NVML does not tell it, and it was not set here since the driver took the GPU", NOT_TOLD
        )
    if noted == UNLOCKED:
        return Known(noted)
    if persistence_mode != Known(value=True):
        return Unknown("without persistence mode the driver forgets it", NOT_TOLD)
    if isinstance(clock, Known) and clock.value > noted[1] + _STEP:
        return Unknown(f"locked to {say_clocks(noted)} here, and the clock is {clock.value} MHz", NOT_TOLD)
    return Known(noted)
