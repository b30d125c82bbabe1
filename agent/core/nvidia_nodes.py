"""Device nodes of NVIDIA's driver that nobody has made, and the words for whoever makes them.

Source: nvidia-modprobe(1). Its minor 255 is /dev/nvidiactl; with -u, 0 is the first node of nvidia_uvm.
"""

import re

from agent.core.observation import NvidiaNodes

_GPU = re.compile(r"/dev/nvidia(\d+)")


def arguments(missing: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Of each run of nvidia-modprobe that these nodes need."""
    minors = ["255"] * ("/dev/nvidiactl" in missing)
    minors += [found[1] for node in missing if (found := _GPU.fullmatch(node))]
    runs = [tuple(word for minor in minors for word in ("-c", minor))] if minors else []
    return [*runs, ("-u", "-c", "0")] if any("-uvm" in node for node in missing) else runs


def by_hand(nodes: NvidiaNodes) -> str:
    """What an operator does about missing nodes."""
    commands = "; ".join(" ".join(("nvidia-modprobe", *words)) for words in arguments(nodes.missing))
    first = "" if nodes.maker else "install nvidia-modprobe, or the udev rules of the driver's package; then "
    return f"{' '.join(nodes.missing)} missing: {first}as root: {commands}"
