"""Are NCCL's collectives right between these GPUs? Run by the interpreter and in the environment of a service.

    python nccl_check.py REQUEST        REQUEST: a JSON object, see ``REQUEST``

It goes alone to where the service lives: it needs the standard library and that interpreter's torch, Python 3.9 at
least. One process per GPU; every element of every message is known beforehand, so a sum is right or wrong, and never
nearly right. What it does is told on stdout, one JSON object a line: "begin" before a step and "end" after it, so
that a step that never ends has a name. A line at least every second keeps whoever reads it sure that it lives; when
nobody reads any more, it ends with all its processes.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import functools
import json
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

Request = dict[str, Any]

REQUEST = {
    "backend": "nccl",  # gloo: on CPUs, where there is no GPU
    "world": 0,  # processes; must be the number of GPUs that CUDA shows
    "sizes": [1, 1023, 1 << 16, 1 << 20, 16 << 20],  # elements of four bytes
    "repeats": 3,
    "first": 180.0,  # seconds without a word until every process has joined: torch is large, and a disk may be slow
    "step": 30.0,  # seconds without a word from anybody, from then on
}
PERIOD = 65521  # elements; a prime, so that data that arrives displaced by a page or a power of two is seen
POISON = -559038737  # in every target before the transfer: what was never written shows
PR_SET_PDEATHSIG = 1
GRACE = 5.0  # seconds that killed processes have to go; those in the kernel's hands may need for ever
AFTERMATH = 2.0  # seconds in which the others may still tell what they saw when one process has failed
MOST_LOG = 20000  # lines


# -- one process: a rank -----------------------------------------------------------------------------------------------


class Rank:
    """One member of the group, in a process of its own. ``tell`` goes to the launcher."""

    def __init__(self, rank: int, request: Request, pipe: int) -> None:
        self.rank, self.request, self.pipe = rank, request, pipe
        self.world = request["world"]
        self.cuda = request["backend"] == "nccl"

    def tell(self, step: str, **more: Any) -> None:
        os.write(
            self.pipe,
            (json.dumps(dict(step=step, rank=self.rank, at=time.monotonic(), **more)) + "\n").encode(),
        )

    @contextlib.contextmanager
    def step(self, what: str, **more: Any) -> Iterator[dict[str, Any]]:
        """``found`` takes what is to be told at the end."""
        self.tell("begin", what=what, **more)
        found: dict[str, Any] = {}
        yield found
        if self.cuda and what not in ("import", "init", "leave"):
            self.torch.cuda.synchronize()
        self.tell("end", what=what, **more, **found)

    def run(self) -> None:
        with self.step("import"):
            import torch  # noqa: PLC0415 - in each process of its own, and told as a step: it takes seconds
            import torch.distributed  # noqa: PLC0415

            self.torch, self.dist = torch, torch.distributed
        self.device = self.torch.device("cuda", self.rank) if self.cuda else self.torch.device("cpu")
        with self.step("init") as found:
            found.update(self.join())
        self.tell("ready")
        for size in self.request["sizes"]:
            for repeat in range(self.request["repeats"]):
                self.all_reduce(size, repeat)
                self.all_gather(size, repeat)
        for source in range(self.world):
            for destination in range(self.world):
                if source != destination and self.rank in (source, destination):
                    self.send(source, destination, min(max(self.request["sizes"]), 1 << 20))
        with self.step("leave"):
            self.dist.destroy_process_group()
        self.tell("done")

    def join(self) -> dict[str, str]:
        found = {"torch": str(self.torch.__version__)}
        if self.cuda:
            shown = self.torch.cuda.device_count()
            if shown != self.world:
                raise RuntimeError(f"CUDA shows {shown} GPUs here, expected {self.world}")
            self.torch.cuda.set_device(self.device)
            found["nccl"] = ".".join(str(part) for part in self.torch.cuda.nccl.version())
        self.dist.init_process_group(
            self.request["backend"],
            init_method=(Path.cwd() / "rendezvous").as_uri(),
            rank=self.rank,
            world_size=self.world,
        )
        return found

    def all_reduce(self, size: int, repeat: int) -> None:
        blocks = [block(rank, repeat) for rank in range(self.world)]
        want = self.tensor([sum(values[i] for values in blocks) for i in range(PERIOD)], size)
        data = self.tensor(block(self.rank, repeat), size)
        with self.step("all_reduce", size=size, repeat=repeat) as found:
            self.dist.all_reduce(data)
            self.compare(found, [(data, want, None)])

    def all_gather(self, size: int, repeat: int) -> None:
        data = self.tensor(block(self.rank, repeat), size)
        into = [self.tensor([POISON], size) for _ in range(self.world)]
        with self.step("all_gather", size=size, repeat=repeat) as found:
            self.dist.all_gather(into, data)
            parts = enumerate(into)
            self.compare(found, ((got, self.tensor(block(r, repeat), size), r) for r, got in parts))

    def send(self, source: int, destination: int, size: int) -> None:
        salt = source * self.world + destination
        with self.step("send", source=source, destination=destination, size=size) as found:
            if self.rank == source:
                self.dist.send(self.tensor(block(salt, 0), size), destination)
            else:
                data = self.tensor([POISON], size)
                self.dist.recv(data, source)
                self.compare(found, [(data, self.tensor(block(salt, 0), size), None)])

    def tensor(self, values: list[int], size: int) -> Any:
        """``size`` elements, the values again and again."""
        cells = array.array("i", values) * (size // len(values) + 1)
        return self.torch.frombuffer(cells[:size], dtype=self.torch.int32).clone().to(self.device)

    def compare(self, found: dict[str, Any], pairs: Iterable[tuple[Any, Any, int | None]]) -> None:
        """Counts what is wrong, and shows the first of it; ``origin``: whose part of the answer it is."""
        found["wrong"] = 0
        for got, want, origin in pairs:
            if self.torch.equal(got, want):
                continue
            there, right = got.tolist(), want.tolist()
            wrong = [index for index, value in enumerate(there) if value != right[index]]
            if not found["wrong"]:
                found.update(first=wrong[0], got=there[wrong[0]], want=right[wrong[0]], origin=origin)
            found["wrong"] += len(wrong)


@functools.lru_cache(maxsize=64)
def block(salt: int, repeat: int) -> list[int]:
    """One period of a message. Sums over hundreds of ranks stay exact in four bytes."""
    start = salt * 40503 + repeat * 97 + 1
    return [((i + start) * 2654435761 >> 7) & 0xFFFFF for i in range(PERIOD)]


def become_rank(rank: int, request: Request, pipe: int) -> NoReturn:
    """In the forked process; it never returns."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        said = os.open(f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(said, 1)
        os.dup2(said, 2)
        member = Rank(rank, request, pipe)
        try:
            member.run()
            code = 0
        except Exception as error:  # whatever it is, it is told
            traceback.print_exc()
            member.tell("failed", detail=f"{type(error).__name__}: {str(error)[:1000]}")
    finally:
        sys.stderr.flush()
        os._exit(code)  # no exit handlers: a broken group may never come back from them


# -- the launcher ------------------------------------------------------------------------------------------------------


class Launcher:
    """Starts the ranks, passes on what they tell, and ends them when they fail or say nothing for too long."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.pids: dict[int, int] = {}  # by rank
        self.pipes = selectors.DefaultSelector()
        self.rests: dict[int, bytes] = {}  # bytes of a line that has not ended
        self.ready: set[int] = set()
        self.done: set[int] = set()
        self.failed: set[int] = set()

    def tell(self, step: str, **more: Any) -> None:
        os.write(1, (json.dumps(dict(step=step, **more)) + "\n").encode())

    def run(self) -> None:
        world = self.request["world"]
        for rank in range(world):
            self.start(rank)
        try:
            self.watch(world)
        finally:
            left = self.kill()
            if left:
                self.tell("left", pids=left)
            self.tell_log()
        self.tell("finished")

    def start(self, rank: int) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            become_rank(rank, self.request, writing)
        os.close(writing)
        self.pids[rank] = pid
        self.rests[rank] = b""
        self.pipes.register(reading, selectors.EVENT_READ, rank)

    def watch(self, world: int) -> None:
        heard = told = time.monotonic()
        ends = None  # after a failure, when the others have had their time
        while self.pipes.get_map():
            for key, _ in self.pipes.select(0.2):
                self.read(key)
                heard = time.monotonic()
            now = time.monotonic()
            if now - told >= 1:
                self.tell("alive")
                told = now
            if self.failed and ends is None:
                ends = now + AFTERMATH
            if ends is not None and now >= ends:
                return
            limit = self.request["step" if len(self.ready) == world else "first"]
            if ends is None and now - heard > limit:
                self.tell("hung", detail=f"no process said anything for {limit:g} s")
                return

    def read(self, key: selectors.SelectorKey) -> None:
        rank, data = key.data, os.read(key.fd, 1 << 16)
        if not data:
            self.pipes.unregister(key.fd)
            os.close(key.fd)
            if rank not in self.done | self.failed:
                self.failed.add(rank)
                self.tell("crashed", rank=rank, detail=self.how_ended(rank))
            return
        *lines, self.rests[rank] = (self.rests[rank] + data).split(b"\n")
        for line in lines:
            os.write(1, line + b"\n")
            step = json.loads(line)["step"]
            for name, ranks in (("ready", self.ready), ("done", self.done), ("failed", self.failed)):
                if step == name:
                    ranks.add(rank)

    def how_ended(self, rank: int) -> str:
        """Its pipe is closed, so it is gone, or going."""
        status = self.wait(rank, GRACE)
        if status is None:
            return "it closed its pipe and lives on"
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            words = f"killed by signal {number} ({signal.Signals(number).name})"
        else:
            words = f"ended with status {os.WEXITSTATUS(status)}"
        last = self.last_words(rank)
        return words + (": " + last if last else "")

    def last_words(self, rank: int) -> str:
        try:
            text = Path(f"rank-{rank}.log").read_text(errors="replace")
        except OSError:
            return ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1][:500] if lines else ""

    def wait(self, rank: int, seconds: float) -> int | None:
        """Its status; None when it does not end in time. Asked again, the same."""
        ends = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid:
                del self.pids[rank]
                return status
            if time.monotonic() >= ends:
                return None
            time.sleep(0.02)

    def kill(self) -> list[int]:
        """The pids that outlive SIGKILL: they sleep in the kernel."""
        if len(self.done) == self.request["world"]:
            for rank in list(self.pids):
                self.wait(rank, GRACE)
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
        for rank in list(self.pids):
            self.wait(rank, GRACE)
        return sorted(self.pids.values())

    def tell_log(self) -> None:
        """NCCL's own words on its version, its ways, and what went wrong: the rest is thousands of lines."""
        told = 0
        for path in sorted(Path().glob("*.log")):
            with path.open(errors="replace") as log:
                for line in log:
                    if "NCCL" in line and (" via " in line or "NCCL WARN" in line or "NCCL version" in line):
                        if told < MOST_LOG:
                            self.tell("log", line=line.strip()[:500])
                        told += 1
        if told > MOST_LOG:
            self.tell("log", line=f"{told - MOST_LOG} more lines are left out")


def main() -> None:
    os.environ["NCCL_DEBUG"] = "INFO"
    os.environ["NCCL_DEBUG_FILE"] = str(Path.cwd() / "nccl.%p.log")
    os.environ.pop("NCCL_DEBUG_SUBSYS", None)
    for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"):
        os.environ.setdefault(name, "0")  # as SGLang sets them where nobody else does
    request = dict(REQUEST, **json.loads(sys.argv[1]))
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError):  # nobody listens: the processes are ended by now
        Launcher(request).run()


if __name__ == "__main__":
    main()
