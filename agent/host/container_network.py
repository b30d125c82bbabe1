"""Where a container's ports are, as this host sees it: what a container says of its network may be a lie.

A server that is asked at the host's own address, because a container named it, would answer for the container's.
"""

import ipaddress
import re
from collections.abc import Iterable
from pathlib import Path

from agent.core.fact import Known, value_or
from agent.host.reading import read_link_name, read_text
from agent.host.systemctl_show import cgroup_pids

_ADDRESSES = 64  # that a container may name; of more, the rest is not looked at
_THIS_NETWORK = ipaddress.ip_network("0.0.0.0/8")


def shares_network(name: str, root: Path = Path("/")) -> bool:
    """Whether the first process of ``lxc:ID`` is in the network namespace that this process is in.

    False where that process is not found, or cannot be looked at.
    """
    mine = read_link_name(root / "proc/self/ns/net")
    try:
        leader = _leader(name.removeprefix("lxc:"), root)
    except OSError:
        return False
    return isinstance(mine, Known) and leader != 0 and read_link_name(root / f"proc/{leader}/ns/net") == mine


def _leader(container: str, root: Path) -> int:
    """The process that is 1 in the container's own pid namespace, which is one level below this host's; 0: none."""
    # Proxmox's name of the cgroup, and that of LXC since 4.0.
    for group in (f"/lxc/{container}", f"/lxc.payload.{container}"):
        for pid in cgroup_pids(root, group):
            status = value_or(read_text(root / f"proc/{pid}/status"), "")
            if re.search(rf"^NSpid:\t{pid}\t1$", status, re.MULTILINE):
                return pid
    return 0


def container_address(words: Iterable[str], root: Path = Path("/")) -> str:
    """The first address that can be another machine's, IPv4 before IPv6, as a URL has it; "" where there is none."""
    own = _own_addresses(root)
    found = [
        address for word in [*words][:_ADDRESSES] if (address := _address(word)) and str(address) not in own
    ]
    best = min(found, key=lambda address: address.version, default=None)
    return "" if best is None else f"[{best}]" if best.version == 6 else str(best)


def _address(word: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(word)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and (address.scope_id or address.ipv4_mapped):
        return None  # ::ffff:127.0.0.1 is loopback in another spelling
    if address in _THIS_NETWORK or address.is_reserved:
        return None
    local = address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast
    return None if local else address


def _own_addresses(root: Path) -> frozenset[str]:
    """Of every interface of this host."""
    found: set[str] = set()
    node = ""
    for words in map(str.split, value_or(read_text(root / "proc/net/fib_trie"), "").splitlines()):
        if words[0] == "|--":
            node = words[1]
        elif words[1:] == ["host", "LOCAL"]:
            found.add(node)
    six = (line.split()[0] for line in value_or(read_text(root / "proc/net/if_inet6"), "").splitlines())
    return frozenset(found | {str(ipaddress.IPv6Address(bytes.fromhex(digits))) for digits in six})
