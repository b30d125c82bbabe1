"""What crosses between the P2P self-test and its children (``agent.selftest.p2p_worker``), one JSON object a line."""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from agent.core.record import Record
from agent.core.verdict import PairResult


class ControlRequest(Record):
    """Host memory to one GPU and back."""

    mode: Literal["control"] = "control"
    gpu: str
    seed: int
    full: bool


class PairRequest(Record):
    """These paths of one ordered pair. ``staged`` comes first and is a control: no direct path is tried if it fails."""

    mode: Literal["pair"] = "pair"
    source: str
    destination: str
    paths: tuple[str, ...]
    seed: int
    full: bool


class ConcurrentRequest(Record):
    mode: Literal["concurrent"] = "concurrent"
    pairs: tuple[tuple[str, str], ...]
    seed: int
    full: bool


Request = ControlRequest | PairRequest | ConcurrentRequest


class Begin(Record):
    """``source`` and ``destination`` are empty where all pairs are meant."""

    step: Literal["begin"]
    what: str
    path: str
    source: str
    destination: str


class End(Record):
    step: Literal["end"]
    what: str
    path: str
    source: str
    destination: str
    result: PairResult
    detail: str = ""
    gbps: float | None = None
    missing: Literal["", "bindings", "library", "function"] = ""  # what has to be installed


Line = TypeAdapter[Begin | End](Annotated[Begin | End, Field(discriminator="step")])
