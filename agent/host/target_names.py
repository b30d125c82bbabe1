"""From a target's name to the command that gets there, and to the address at which its ports are."""

import errno
import re
import shutil
from pathlib import Path

from agent.host.entering import STARTER

# user@host as ssh and a URL both take it; nothing that begins with "-" is an option's look-alike.
_SSH = re.compile(
    r"[A-Za-z0-9_][A-Za-z0-9_.-]*@(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*)"
)
_LXC = re.compile(r"[1-9][0-9]{0,9}")
_SSH_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=5"),
    *("-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=2"),
)
# Entering a container takes capabilities that the agent's own sandbox lacks, so PID 1 starts what does it. It is
# ended there, too, when the agent has given it up; and its start and end are not worth two lines of the journal.
BY_PID_1 = (
    STARTER,
    "--quiet",
    "--pipe",
    "--wait",
    "--collect",
    "--service-type=exec",
    "--property=LogLevelMax=warning",
    "--property=RuntimeMaxSec=70",  # beyond the longest deadline, which a reload has
    "--property=TimeoutStopSec=5",
    "--",
)


def prefix_for(name: str, systemd: Path = Path("/run/systemd/system")) -> tuple[str, ...]:
    """The argv before ``sh -s`` for ``lxc:ID`` or ``ssh:user@host``. ``systemd``: there where it is PID 1.

    Raises OSError (EINVAL) for a name that is neither.
    """
    sort, _, rest = name.partition(":")
    if sort == "lxc" and _LXC.fullmatch(rest):
        enter = ("pct", "exec", rest) if shutil.which("pct") else ("lxc-attach", "-n", rest)
        return (*(BY_PID_1 if systemd.is_dir() else ()), *enter, "--")
    if sort == "ssh" and _SSH.fullmatch(rest):
        return ("ssh", *_SSH_OPTIONS, "--", rest)
    raise OSError(errno.EINVAL, f"{name!r}: expected lxc:ID or ssh:user@host")


def host_of(name: str) -> str:
    """The host of ``ssh:user@host`` as a URL has it; "" where the name has none."""
    match = _SSH.fullmatch(name.removeprefix("ssh:")) if name.startswith("ssh:") else None
    return "" if match is None else _in_url(match["host"])


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
