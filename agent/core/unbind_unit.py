"""Where systemd keeps the unbinds that the agent has begun: the names of their units, of their slice and of its cgroup."""

SLICE = "gpu-host-agent-unbind.slice"
# A dash in a slice's name is a level in the tree (systemd.slice(5)).
CGROUP = "/gpu.slice/gpu-host.slice/gpu-host-agent.slice/gpu-host-agent-unbind.slice"


def unit_name(address: str) -> str:
    return f"gpu-host-agent-unbind-{address}.service"
