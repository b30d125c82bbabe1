"""``agent explain PATH``: what a spec field means, and, once the agent has run, what it became and why."""

import json
import time

from agent.app.paths import Paths
from agent.core.explain import describe
from agent.core.quantity import say_duration


def explain(path: str, paths: Paths) -> str | None:
    parts = [(describe(path) or "").strip(), _effective(path.removeprefix("spec."), paths)]
    found = [part for part in parts if part]
    return "\n\n".join(found) if found else None


def _effective(path: str, paths: Paths) -> str:
    """Values that the agent decided, for paths such as services.qwen.env.NCCL_P2P_DISABLE."""
    try:
        status = json.loads(paths.status.read_bytes())
    except (OSError, ValueError):
        return ""
    lines: list[str] = []
    for service in status.get("services", ()):
        prefix = f"services.{service['name']}"
        if path != prefix and not path.startswith(prefix + "."):
            continue
        rest = path.removeprefix(prefix).lstrip(".").replace("nccl.", "env.", 1)
        for key, why in sorted(service.get("why", {}).items()):
            if rest in {"", key} or key.startswith(rest + "."):
                lines.append(f"{prefix}.{key} = {why['value']}  ({why['source']}: {why['reason']})")
    simulated = (status.get("host") or {}).get("simulated")
    if lines and simulated:
        lines.insert(0, f"SIMULATED HOST (profile {simulated}): nothing below is this machine")
    if lines:
        age = say_duration(max(0.0, time.time() - status.get("published_at", 0.0)))
        lines.append(f"(by the status of {age} ago)")
    return "\n".join(lines)
