"""What this version does not do on a real host, said in one way."""

from typing import NoReturn

from agent.core.errors import TerminalError


def refuse(what: str) -> NoReturn:
    raise TerminalError(
        f"{what} is not offered by this version on real hosts, and was not done",
        reason="NotOffered",
        next_step="do it by hand; the agent will see it in the next pass",
    )
