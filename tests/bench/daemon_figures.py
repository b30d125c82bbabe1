"""The daemon as it idles: resident memory, processor time, and how soon it acts on a saved spec."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.rig import recipe

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def daemon_figures(idle_seconds: float) -> dict[str, Any]:
    """One daemon on the simulated host at real speed (time factor 1), converged and left alone."""
    Path("build").mkdir(exist_ok=True)
    # Not in /tmp: the watcher sees every directory on the way to the spec, and there others make noise.
    with tempfile.TemporaryDirectory(dir="build") as folder:
        root = Path(folder).resolve()
        spec = root / "etc/gpu-host-agent/spec.yaml"
        spec.parent.mkdir(parents=True)
        spec.write_text(recipe())
        command = [sys.executable, "-m", "agent.app.main"]
        where = ["--root", str(root), "--host", "sim"]
        # Converged quickly first; the host then goes on at the speed of a real one.
        subprocess.run(
            [*command, "apply", *where, "--time-factor", "200"],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=120,
        )
        daemon = subprocess.Popen([*command, "run", *where, "--time-factor", "1"], stderr=subprocess.DEVNULL)
        try:
            _until(
                lambda: (
                    (_status(root).get("last_pass") or {}).get("trigger") == "start"
                    and _status(root)["pid"] == daemon.pid
                )
            )
            time.sleep(2.0)
            begun = _cpu_seconds(daemon.pid)
            time.sleep(idle_seconds)
            used = _cpu_seconds(daemon.pid) - begun
            return {
                "resident_mb": round(_resident(daemon.pid) / 1e6, 1),
                "idle_seconds": idle_seconds,
                "idle_cpu_percent": round(100 * used / idle_seconds, 4),
                "save_to_first_action_seconds": _save_to_action(root, spec),
            }
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(timeout=60)


def _save_to_action(root: Path, spec: Path) -> float:
    """From the rename that saves the file to the first intent in the journal."""
    journal = root / "var/lib/gpu-host-agent/journal.jsonl"
    before = journal.stat().st_size
    fresh = spec.with_name("spec.new")
    fresh.write_text(recipe(gpus={"inference": {"settings": {"powerLimit": "550W"}}}))
    saved = time.time()
    fresh.replace(spec)
    _until(lambda: b'"intent"' in journal.read_bytes()[before:])
    first = next(
        e for e in map(json.loads, journal.read_bytes()[before:].splitlines()) if e["event"] == "intent"
    )
    return round(float(first["at"]) - saved, 3)


def _status(root: Path) -> dict[str, Any]:
    try:
        status: dict[str, Any] = json.loads((root / "run/gpu-host-agent/status.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return status


def _until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the daemon did not get there")
        time.sleep(0.05)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return float(int(fields[11]) + int(fields[12])) / TICKS


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
