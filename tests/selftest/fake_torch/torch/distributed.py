"""Collectives over sockets: every rank sends to the lowest, which answers; pairs talk directly.

Faults: ``hang`` (it sleeps in the operation), ``deaf`` (it sleeps and only SIGKILL ends it), ``die`` (SIGKILL to
itself), ``raise`` (an exception), ``exit`` (status 7 without a word but on stderr), ``wrong`` (its last element is off
by one), ``swap`` (its halves change places), ``drop`` (nothing is written).
"""

import array
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

_me: dict[str, Any] = {}


def init_process_group(backend: str, init_method: str, rank: int, world_size: int) -> None:
    assert backend == "gloo"
    # A socket's name may have 107 bytes: not that of every folder.
    path = os.path.relpath(init_method.removeprefix("file://"))
    _me.update(rank=rank, world=world_size, path=path, links={})
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{_me['path']}.{rank}")
    server.listen(world_size)
    for other in range(rank):
        _me["links"][other] = link = _connect(f"{_me['path']}.{other}")
        link.sendall(rank.to_bytes(4, "big"))
    for _ in range(rank + 1, world_size):
        link = server.accept()[0]
        _me["links"][int.from_bytes(_exactly(link, 4), "big")] = link
    server.close()
    _write_log(os.environ)
    _fault("init", None)


def all_reduce(tensor: Tensor) -> None:
    if _me["rank"] == 0:
        sums = tensor.cells
        for other in range(1, _me["world"]):
            for index, value in enumerate(_receive(other, len(sums))):
                sums[index] += value
        for other in range(1, _me["world"]):
            _me["links"][other].sendall(sums.tobytes())
    else:
        _me["links"][0].sendall(tensor.cells.tobytes())
        tensor.cells[:] = _receive(0, len(tensor.cells))
    _fault("all_reduce", tensor)


def all_gather(into: list[Tensor], tensor: Tensor) -> None:
    for source in range(_me["world"]):
        for destination in range(_me["world"]):
            if source == destination == _me["rank"]:
                into[source].cells[:] = tensor.cells
            elif source == _me["rank"]:
                _me["links"][destination].sendall(tensor.cells.tobytes())
            elif destination == _me["rank"]:
                into[source].cells[:] = _receive(source, len(tensor.cells))
    _fault("all_gather", into[0])


def send(tensor: Tensor, destination: int) -> None:
    _fault("send", tensor)
    _me["links"][destination].sendall(tensor.cells.tobytes())


def recv(tensor: Tensor, source: int) -> None:
    got = _receive(source, len(tensor.cells))
    poison = Tensor(tensor.cells[:])
    tensor.cells[:] = got
    _fault("recv", tensor, poison)


def destroy_process_group() -> None:
    _fault("destroy", None)


def _write_log(env: Mapping[str, str]) -> None:
    """As NCCL does, with its own settings as it was given them."""
    path = env["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid()))
    names = ("NCCL_DEBUG", "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE")
    with Path(path).open("w") as log:
        print(env.get("FAKE_TORCH_LOG", ""), file=log)
        print("NCCL WARN", *(f"{name}={env.get(name)}" for name in names), file=log)
        print("NCCL INFO of no interest", file=log)


def _connect(path: str) -> socket.socket:
    while True:
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(path)
        except OSError:  # the other has not come so far
            link.close()
            time.sleep(0.01)
        else:
            return link


def _exactly(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise RuntimeError("Connection closed by peer")
        data += part
    return data


def _receive(source: int, length: int) -> "array.array[int]":
    return array.array("i", _exactly(_me["links"][source], 4 * length))


def _fault(operation: str, tensor: Tensor | None, before: Tensor | None = None) -> None:
    what, where, rank = os.environ.get("FAKE_TORCH_FAULT", "none:none:0").split(":")
    if where != operation or int(rank) != _me["rank"]:
        return
    cells: Any = tensor.cells if tensor is not None else []
    if what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if what in {"hang", "deaf"}:
        time.sleep(3600)
    elif what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "exit":
        print("terminate called after throwing an instance of c10::Error", file=sys.stderr, flush=True)
        os._exit(7)
    elif what == "raise":
        raise RuntimeError("unhandled cuda error")
    elif what == "wrong":
        cells[-1] += 1
    elif what == "drop":
        cells[:] = before.cells if before is not None else cells
    elif what == "swap":
        half = len(cells) // 2
        cells[:] = cells[half:] + cells[:half]
