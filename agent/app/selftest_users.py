"""What every self-test asks first, whether somebody uses the GPUs, and how it ends."""

from agent.core.errors import TerminalError
from agent.core.fact import Known, say
from agent.ports import Ports

GOOD, NOT_GOOD, NOT_JUDGED = 0, 3, 4


async def refuse_used(ports: Ports, gpus: tuple[str, ...]) -> None:
    """A test disturbs whoever uses the cards, and is disturbed by them. Raises TerminalError naming the first."""
    step = "stop it and test again; --force tests all the same"
    for gpu, holders in (await ports.holders.read(gpus)).items():
        if not isinstance(holders, Known):
            raise TerminalError(f"who holds {gpu} is {say(holders)}", reason="HoldersUnknown", next_step=step)
        for holder in holders.value:
            if holder.kind not in {"persistence", "module"}:
                raise TerminalError(f"{gpu} is in use: {holder.describe()}", reason="Held", next_step=step)
