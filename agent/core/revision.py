"""Revisions: everything rendered for one service, named by its hash."""

import hashlib
import json
from collections.abc import Mapping

from agent.core.record import Record


class Provenance(Record):
    """Where one value came from: ``source`` is spec, verdict, rule or default; ``reason`` is one sentence."""

    value: str
    source: str
    reason: str


class Revision(Record):
    """What a service runs: the command, its environment, the files in the target, the GPUs it needs.

    ``id`` covers exactly what decides behaviour; provenance is carried beside it for explanation.
    """

    service: str
    target: str
    unit: str
    port: int
    gpus: tuple[str, ...]
    p2p: bool
    argv: tuple[str, ...]
    env: dict[str, str]
    files: dict[str, str]  # path in the target -> text
    secrets: dict[str, str] = {}  # variable -> path of its file in the target; never a value
    provenance: dict[str, Provenance] = {}

    @property
    def served_name(self) -> str:
        """The name that requests must use: SGLang serves under the model path unless told otherwise."""
        return option(self.argv, "served-model-name") or option(self.argv, "model-path")

    @property
    def id(self) -> str:
        body = self.model_dump(exclude={"provenance"})
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:12]


def option(argv: tuple[str, ...], name: str) -> str:
    """The value of ``--name`` in a command line; "" where it has none."""
    flag = f"--{name}"
    for index, word in enumerate(argv):
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
        if word == flag and index + 1 < len(argv):
            return argv[index + 1]
    return ""


def comparable(env: Mapping[str, str], revision: Revision) -> dict[str, str]:
    """Of a process's environment, the part that the revision decides."""
    return {name: env[name] for name in revision.env if name in env}
