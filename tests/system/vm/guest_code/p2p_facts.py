"""What a P2P verdict is bound to, of this host as it is: p2p_facts.py GPU GPU. Writes JSON.

good_verdict: the record of a self-test that found nothing wrong just now. There is no real test in a guest without
real GPUs: what is real are the facts that the verdict is bound to.
"""

import asyncio
import json
import sys
import time

from agent.app.paths import paths_for
from agent.app.readonly import observe_only
from agent.app.wiring import Choice
from agent.core.p2p_decision import explain
from agent.core.verdict import P2PVerdict, PathVerdict, fingerprint

gpus = tuple(sys.argv[1:])
choice = Choice("real", "", None, 1.0)
observation, _ = asyncio.run(observe_only(choice, paths_for(None, None, "real")))
paths = tuple(
    PathVerdict(source=a, destination=b, path="copy-push", result="good")
    for a in gpus
    for b in gpus
    if a != b
)
verdict = P2PVerdict(
    gpus=gpus, fingerprint=fingerprint(observation, gpus), result="good", paths=paths, controls_ok=True,
    tested_at=time.time(),
)  # fmt: skip
facts = {
    "bridges": {gpu: seen.bridges for gpu in gpus if (seen := observation.function(gpu)) is not None},
    "explained": explain(observation, gpus),
    "good_verdict": verdict.model_dump(mode="json"),
}
print(json.dumps(facts))
