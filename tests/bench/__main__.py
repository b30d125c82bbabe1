"""``make bench``."""

import argparse
import asyncio
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.daemon_figures import daemon_figures
from tests.bench.passes import linearity, noop_pass
from tests.bench.start_up import start_up

AIMS = {
    "noop_pass_8.ratio_to_raw_reads": ("at most", 3.0),
    "linearity.per_gpu_ratio_1000_to_8": ("at most", 1.3),
    "start_up.status_seconds": ("at most", 0.100),
    "daemon.resident_mb": ("at most", 60.0),
    "daemon.idle_cpu_percent": ("at most", 0.1),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="The agent's own figures, on a simulated host.")
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"))
    parser.add_argument("--idle-seconds", type=float, default=60.0)
    args = parser.parse_args()
    figures: dict[str, Any] = {
        "machine": {"python": platform.python_version(), "cpus": os.cpu_count(), "load": os.getloadavg()[0]},
        "host": "simulated",
    }
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "noop_pass_8": lambda: asyncio.run(noop_pass()),
        "linearity": lambda: asyncio.run(linearity()),
        "start_up": start_up,
        "daemon": lambda: daemon_figures(args.idle_seconds),
    }
    for name, measure in measures.items():
        figures[name] = measure()
        print(f"{name}:")
        for key, value in figures[name].items():
            print(f"  {key:<34} {value}{_aim(name, key, value)}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"written to {args.out}")
    return 0


def _aim(group: str, key: str, value: float) -> str:
    aim = AIMS.get(f"{group}.{key}")
    if aim is None:
        return ""
    return f"   (aim: {aim[0]} {aim[1]:g}: {'met' if value <= aim[1] else 'MISSED'})"


if __name__ == "__main__":
    sys.exit(main())
