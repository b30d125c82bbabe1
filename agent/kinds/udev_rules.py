"""The agent's udev rules: bindings that hold before the agent starts.

Sources: udev(7); Documentation/ABI/testing/sysfs-bus-pci (driver_override, drivers_probe).
"""

from agent.core.resolve import Resolved
from agent.core.unbind_unit import CGROUP, unit_name

_BIND, _END = "gpu_host_agent_bind", "gpu_host_agent_end"


def udev_rules(resolved: Resolved) -> str:
    """Rules by which these functions are on vfio-pci before the agent starts; "" when no GPU goes there.

    The first PCI device whose event is handled may load the host's driver, which then takes every card that it knows.
    So each event sets all overrides first: udev writes attributes before it runs the module loading of later rules.
    Nothing loads vfio-pci by a device's alias, and once it is loaded only a probe binds one more device to it. A
    function that a driver has already stays there: udev never unbinds (law 1).

    Of a function whose unbind has not returned nothing is written: the event's handler would wait behind it. That its
    unit's cgroup is there says so, for systemd removes it with the last process in it.

    A card whose IOMMU group holds somebody else's device gets none: the next boot would split the group.
    """
    slots = [s for s in resolved.slots if s.driver == "vfio-pci" and not s.group_shared]
    addresses = [f.address for s in slots for f in s.functions]
    if not addresses:
        return ""
    lines = [
        "# Written by gpu-host-agent from the spec: these functions belong to vfio-pci from boot on.",
        f'SUBSYSTEM!="pci", GOTO="{_END}"',
        f'ACTION!="add", GOTO="{_END}"',
    ]
    for address in addresses:
        override = f"[pci/{address}]driver_override"
        lines.append(f'{_no_unbind(address)}, TEST=="{override}", ATTR{{{override}}}="vfio-pci"')
    lines += [f'KERNEL=="{address}", {_no_unbind(address)}, GOTO="{_BIND}"' for address in addresses]
    lines += [
        f'GOTO="{_END}"',
        f'LABEL="{_BIND}"',
        'IMPORT{builtin}="kmod load vfio-pci"',
        'ATTR{[subsystem/pci]drivers_probe}="$kernel"',
        f'LABEL="{_END}"',
    ]
    return "\n".join(lines) + "\n"


def _no_unbind(address: str) -> str:
    return f'TEST!="/sys/fs/cgroup{CGROUP}/{unit_name(address)}"'
