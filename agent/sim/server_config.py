"""What the simulated inference server is told: CONFIG.json, read again whenever it changes.

Durations are simulated seconds, ``time_factor`` of which pass in a real one.

fd                an inherited TCP socket, bound and not listening
parent_pid        optional; the process ends when this is not its parent, even if the parent died before it began
time_factor       above 0
load_seconds      until it listens, counted from when this value was first seen; null: never
served_model, model_path, version, argv, max_total_tokens, server_info
                  what /v1/models and /server_info say; server_info is merged over the rest
speeds            rows of [concurrency, tokens per second of all streams together], whole requests measured
factor            multiplies the speeds
ttft_seconds      to the first token when nothing else runs; each 32 requests that run add as much
chunk_seconds     between two chunks of a stream; more when there are many streams
answers           objects with match and answer: what a prompt that contains ``match`` is answered with
default_answer    for all other prompts
drain_seconds     after SIGTERM; null: until all requests have ended
sigterm           "drain" or "ignore"
faults            health: "ok", "hang" or an HTTP status; answer: one of ANSWER_FAULTS; after_requests: how many
                  completion requests are answered well first; requests: how many the fault lasts, null for ever.
                  Requests are counted anew when the faults change.
"""

import json
import math
import os
import sys
from bisect import bisect_left
from typing import Any

ANSWER_FAULTS = frozenset(
    {"ok", "empty", "exclaim", "nonsense", "no-tokens", "error500", "hang", "die-half-way", "no-usage"}
)


class Config:
    """CONFIG.json. Raises ``ValueError``, ``KeyError`` or ``TypeError`` for one that cannot be used."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.fd = int(data["fd"])
        self.time_factor = float(data["time_factor"])
        if not 0 < self.time_factor < math.inf:
            raise ValueError(f"time_factor: expected a number above 0, not {self.time_factor}")
        self.load_seconds = None if data["load_seconds"] is None else float(data["load_seconds"])
        self.served_model = str(data["served_model"])
        self.model_path = str(data.get("model_path", ""))
        self.version = str(data.get("version", ""))
        self.argv = [str(word) for word in data.get("argv", ())]
        self.max_total_tokens = int(data["max_total_tokens"])
        self.factor = float(data.get("factor", 1.0))
        self.ttft_seconds = float(data.get("ttft_seconds", 0.25))
        self.chunk_seconds = float(data.get("chunk_seconds", 1.5))
        self.answers = [(str(pair["match"]), str(pair["answer"])) for pair in data.get("answers", ())]
        self.default_answer = str(data.get("default_answer", "This is a simulated answer."))
        self.server_info = dict(data.get("server_info", {}))
        drain = data.get("drain_seconds")
        self.drain_seconds = math.inf if drain is None else float(drain)
        self.ignore_sigterm = data.get("sigterm") == "ignore"
        self.parent_pid = data.get("parent_pid")
        self.speeds = sorted((int(c), float(speed)) for c, speed in data["speeds"])
        if not self.speeds or self.speeds[0][0] < 1:
            raise ValueError("speeds: expected rows of [concurrency from 1, tokens per second]")
        self.faults = dict(data.get("faults", {}))
        self.answer_fault = str(self.faults.get("answer", "ok"))
        if self.answer_fault not in ANSWER_FAULTS:
            raise ValueError(
                f"faults.answer: {self.answer_fault!r} is none of {', '.join(sorted(ANSWER_FAULTS))}"
            )
        health = str(self.faults.get("health", "ok"))  # "ok", "hang" or an HTTP status
        self.health_hangs = health == "hang"
        self.health_status = 200 if health in ("ok", "hang") else int(health)
        self.fault_after = int(self.faults.get("after_requests") or 0)
        count = self.faults.get("requests")
        self.fault_until = math.inf if count is None else self.fault_after + int(count)

    def real(self, simulated_seconds: float) -> float:
        return simulated_seconds / self.time_factor

    def throughput(self, concurrency: int) -> float:
        """Tokens per real second of all streams together: a straight line over log(concurrency) between two rows."""
        rows = self.speeds
        place = bisect_left(rows, (concurrency, 0.0))
        if place == len(rows):
            speed = rows[-1][1]
        elif place == 0:
            speed = rows[0][1] * concurrency / rows[0][0]
        else:
            (low, slow), (high, fast) = rows[place - 1], rows[place]
            share = math.log(concurrency / low) / math.log(high / low)
            speed = slow + share * (fast - slow)
        return speed * self.factor * self.time_factor


class ConfigFile:
    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self.current = self._read()

    def changed(self) -> bool:
        """Whether ``current`` is a new one. A file that cannot be used leaves the old one in force."""
        try:
            if self._signature() == self._seen:
                return False
            self.current = self._read()
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"{self._path}: not used: {error!r}", file=sys.stderr)  # noqa: T201 - a program's stderr
            return False
        return True

    def _signature(self) -> tuple[int, int, int]:
        status = os.stat(self._path)  # noqa: PTH116 - pathlib would cost start-up time
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _read(self) -> Config:
        # Before reading: a file replaced in between is then read once more, never missed.
        self._seen = self._signature()
        with open(self._path, encoding="utf-8") as file:  # noqa: PTH123 - as above
            data = json.load(file)
        if not isinstance(data, dict):
            raise TypeError("expected an object")
        return Config(data)
