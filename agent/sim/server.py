"""A simulated inference server: OpenAI's HTTP interface at a given speed, with faults, and no model.

Runs as ``python -I -S server.py CONFIG.json`` in a process of its own, by file path: it imports nothing but the
standard library. The parent binds the socket and leaves it without ``listen()``, so connections are refused until
the simulated model has loaded. Every answer says that it is simulated: the ``Server`` header, ``simulated`` or
``system_fingerprint`` in the body.

CONFIG.json is described in ``server_config``. It may be replaced at any time; requests after that see the new
content. SIGTERM drains: new requests get 503, running ones may end, then the process does. It also ends with its
parent.
"""

import asyncio
import math
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

# Started by file path and isolated (-I -S): the siblings are found by where this file is, after the standard
# library. They import nothing else, so that the start takes milliseconds.
sys.path.append(os.path.abspath(__file__).removesuffix("/agent/sim/server.py"))  # noqa: PTH100 - pathlib is slow to import

from agent.sim.server_completion import Asked, BadRequestError, Completion, compose
from agent.sim.server_config import ConfigFile
from agent.sim.server_engine import Engine
from agent.sim.server_http import Connection, Request, error_document

POLL_SECONDS = 0.05  # real seconds between two looks at the config, the parent and the drain
HEALTH_SECONDS = 1.0  # /health generates a token


class Server:
    def __init__(self, file: ConfigFile, parent: int) -> None:
        self._file = file
        self._parent = parent
        self._loop = asyncio.get_running_loop()
        self._engine = Engine(self._loop, lambda: file.current)
        self._left = self._loop.create_future()
        self._listener: asyncio.Server | None = None
        self._load_seen = self._loop.time()
        self._drain_until = math.inf
        self._hung: set[Connection] = set()
        self._asked = 0  # completion requests since these faults are set
        self._number = 0
        self.connections: set[Connection] = set()
        self.draining = False

    async def run(self) -> None:
        """Until drained after SIGTERM, or until the parent is gone."""
        self._loop.add_signal_handler(signal.SIGTERM, self._terminate)
        sock = socket.socket(fileno=self._file.current.fd)
        # Not PR_SET_PDEATHSIG: that kills when the parent's *thread* ends which started this process.
        while not self._left.done() and os.getppid() == self._parent:
            self._refresh()
            pause = POLL_SECONDS
            if self._listener is None and self._file.current.load_seconds is not None:
                loaded = self._load_seen + self._file.current.real(self._file.current.load_seconds)
                if loaded <= self._loop.time():
                    self._listener = await self._loop.create_server(
                        lambda: Connection(self), sock=sock, backlog=1024
                    )
                else:
                    pause = min(pause, loaded - self._loop.time())
            self.look_for_end()
            await asyncio.wait((self._left,), timeout=pause)

    def _terminate(self) -> None:
        self._refresh()
        config = self._file.current
        if config.ignore_sigterm or self.draining:
            return
        self.draining = True
        self._drain_until = self._loop.time() + config.real(config.drain_seconds)
        self.look_for_end()

    def look_for_end(self) -> None:
        """When draining: leave if nothing runs any more and everything is sent, or the time is over."""
        if not self.draining or self._left.done():
            return
        busy = self._engine.running or self._hung
        unsent = any(c.transport.get_write_buffer_size() for c in self.connections)
        if self._listener is None or not (busy or unsent) or self._loop.time() >= self._drain_until:
            self._left.set_result(None)

    def _refresh(self) -> None:
        before = self._file.current
        self._engine.settle()
        if not self._file.changed():
            return
        now = self._file.current
        if now.faults != before.faults:
            self._asked = 0
        if now.load_seconds != before.load_seconds:
            self._load_seen = self._loop.time()
        self._engine.resume()

    def handle(self, client: Connection, request: Request) -> None:
        self._refresh()
        routes: dict[str, tuple[str, Callable[[Connection, Request], None]]] = {
            "/health": ("GET", self._health),
            "/v1/models": ("GET", self._models),
            "/server_info": ("GET", self._info),
            "/get_server_info": ("GET", self._info),
            "/v1/chat/completions": ("POST", self._complete),
            "/v1/completions": ("POST", self._complete),
        }
        if request.path not in routes:
            client.reply(
                404, error_document(404, f"{request.path}: not found; there are {', '.join(routes)}")
            )
            return
        method, handler = routes[request.path]
        if request.method == method:
            handler(client, request)
        else:
            message = f"{request.path}: expected {method}, not {request.method}"
            client.reply(405, error_document(405, message), f"Allow: {method}\r\n")

    def _faulty(self) -> bool:
        config = self._file.current
        return config.fault_after <= self._asked < config.fault_until

    def _hang(self, client: Connection) -> None:
        self._hung.add(client)

        def lost() -> None:
            self._hung.discard(client)
            self.look_for_end()

        client.on_lost = lost

    def _health(self, client: Connection, request: Request) -> None:  # noqa: ARG002 - a route
        config = self._file.current
        if self._faulty() and config.health_hangs:
            self._hang(client)
            return
        status = config.health_status if self._faulty() else 200
        timer = self._loop.call_later(config.real(HEALTH_SECONDS), self._say_health, client, status)
        client.on_lost = timer.cancel

    def _say_health(self, client: Connection, status: int) -> None:
        if self.draining:
            status = 503
        if status == 200:
            client.reply(200, {"status": "ok", "simulated": True})
        else:
            client.reply(status, error_document(status, "draining" if self.draining else "not healthy"))

    def _models(self, client: Connection, request: Request) -> None:  # noqa: ARG002 - a route
        config = self._file.current
        model = {"id": config.served_model, "object": "model", "created": 0, "owned_by": "simulated"}
        client.reply(
            200, {"object": "list", "data": [{**model, "root": config.model_path}], "simulated": True}
        )

    def _info(self, client: Connection, request: Request) -> None:  # noqa: ARG002 - a route
        config = self._file.current
        document = {
            **server_args(config.argv),
            "model_path": config.model_path,
            "served_model_name": config.served_model,
            "version": config.version,
            "max_total_num_tokens": config.max_total_tokens,
            "running_requests": len(self._engine.running) + len(self._hung),
            **config.server_info,
            "simulated": True,
        }
        client.reply(200, document)

    def _complete(self, client: Connection, request: Request) -> None:
        config = self._file.current
        if self.draining:
            client.reply(503, error_document(503, "draining: no new requests"))
            return
        try:
            asked = Asked(request.body, config.max_total_tokens, chat="/chat/" in request.path)
        except BadRequestError as error:
            client.reply(400, error_document(400, str(error)))
            return
        fault = config.answer_fault if self._faulty() else "ok"
        self._asked += 1
        self._number += 1
        if fault == "error500":
            client.reply(500, error_document(500, "simulated fault: internal error"))
        elif fault == "hang":
            self._hang(client)
        else:
            answer = compose(config, asked, fault, self._number)
            work = Completion(self._number, asked, answer, config.served_model, client)
            client.on_lost = lambda: self._gone(work)
            self._engine.add(work)

    def _gone(self, work: Completion) -> None:
        self._engine.remove(work)
        self.look_for_end()


def server_args(argv: list[str]) -> dict[str, Any]:
    """Flags as the server would report them: ``--tp-size 4`` is ``"tp_size": 4``."""
    flags: dict[str, Any] = {}
    name = ""
    for word in argv:
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            name = name.replace("-", "_")
            flags[name] = _typed(value) if given else True
        elif name:
            # Several values after one flag become a list.
            before = flags[name]
            flags[name] = _typed(word) if before is True else [*_listed(before), _typed(word)]
    return flags


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _typed(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


async def serve(file: ConfigFile, parent: int) -> None:
    await Server(file, parent).run()


def main(arguments: list[str]) -> int:
    parent = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, with which this process ends
    if len(arguments) != 1:
        print("usage: python -I -S server.py CONFIG.json", file=sys.stderr)  # noqa: T201 - a program's stderr
        return 2
    try:
        file = ConfigFile(arguments[0])
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{arguments[0]}: {error!r}", file=sys.stderr)  # noqa: T201 - a program's stderr
        return 2
    asyncio.run(serve(file, file.current.parent_pid or parent))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
