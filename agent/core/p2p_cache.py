"""What SGLang wrote down about P2P at an earlier start, and believes at the next.

Its custom all-reduce asks once which GPUs reach which, and keeps the answer in a JSON file such as ``{"0->1": true}``,
named by the value of CUDA_VISIBLE_DEVICES. Nothing in it tells when, on which boot or with which driver that was.
"""

import json

from agent.core.revision import Revision

_ROOT_HOME = "/root"
_LONGEST_NAME = 255  # bytes, of a file on Linux


def cache_files(revision: Revision) -> tuple[str, ...]:
    """Paths in the target at which this revision, or an earlier start by indices, may have left such a file."""
    home = revision.env.get("HOME") or _ROOT_HOME
    folder = revision.env.get("SGLANG_CACHE_DIR") or f"{home.rstrip('/')}/.cache/sglang"
    indices = ",".join(str(index) for index in range(len(revision.gpus)))
    devices = dict.fromkeys([revision.env.get("CUDA_VISIBLE_DEVICES", ""), indices])
    names = [f"gpu_p2p_access_cache_for_{shown}.json" for shown in devices if shown and "/" not in shown]
    fitting = [name for name in names if len(name.encode()) <= _LONGEST_NAME]
    return tuple(f"{folder.rstrip('/')}/{name}" for name in fitting) if folder.startswith("/") else ()


def contradicts(text: str, *, p2p: bool) -> bool:
    """The file says something else about two different GPUs than was decided, or cannot be read as such a file."""
    try:
        pairs = json.loads(text)
    except (ValueError, RecursionError):
        return True
    if not isinstance(pairs, dict):
        return True
    said = [reach for pair, reach in pairs.items() if len(set(pair.split("->"))) > 1]
    return any(reach is not p2p for reach in said)
