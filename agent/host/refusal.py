"""What this version does not do on a real host, said in one way."""

from typing import NoReturn

from agent.core.errors import TerminalError


def refuse(what: str) -> NoReturn:
    """Every write of a real adapter ends here."""
    raise TerminalError(
        f"acting on real hosts is not offered by this version: {what} was not done",
        reason="RealHostReadOnly",
        next_step="set policy.mode to observe and make the change by hand; the agent will see it in the next pass",
    )
