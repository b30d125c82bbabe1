"""What an operator waits for before the first line."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agent.core.status import HostStatus, SpecStatus, Status

ROUNDS = 15


def start_up() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        status = Status(
            agent_version="bench", pid=os.getpid(), host=HostStatus(name="bench", simulated="esc8000a"),
            published_at=time.time(), stale_after=120.0, spec=SpecStatus(path="spec.yaml", accepted=True),
        )  # fmt: skip
        path = Path(folder) / "run/gpu-host-agent/status.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(status.model_dump()))
        command = [sys.executable, "-m", "agent.app.main", "status", "--root", folder, "--host", "sim"]
        return {
            "python_seconds": _median([sys.executable, "-c", "pass"]),
            "status_seconds": _median(command),
            "import_seconds": _median([sys.executable, "-c", "import agent.app.daemon"]),
        }


def _median(command: list[str]) -> float:
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        times.append(time.perf_counter() - begun)
    return round(statistics.median(times), 4)
