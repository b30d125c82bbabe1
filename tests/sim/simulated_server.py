"""Starts the simulated inference server as its parent does, and talks to it over plain sockets."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parents[2] / "agent" / "sim" / "server.py"
PATIENCE = 20.0  # real seconds, after which a test gives up
SETTINGS: dict[str, Any] = {
    "time_factor": 500.0,
    "load_seconds": 0,
    "served_model": "qwen3.5-122b",
    "model_path": "/models/Qwen3.5-122B-A10B",
    "version": "0.5.12.post1",
    "argv": [
        "python",
        "-m",
        "sglang.launch_server",
        "--tp-size",
        "4",
        "--disable-custom-all-reduce",
        "--port=30000",
    ],
    "max_total_tokens": 780820,
    "speeds": [[1, 108.3], [4, 286.2], [16, 873.0]],
    "ttft_seconds": 0.25,
    "chunk_seconds": 0.5,
    "answers": [{"match": "7 * 13", "answer": "7 * 13 = 91"}],
    "default_answer": 'This is a "simulated" answer.\nNo model ran: \\ ünïcode.',
    "drain_seconds": 1000.0,
}


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    text: str

    @property
    def document(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        """The JSON of a stream, which must end as one."""
        lines = [line for line in self.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    @property
    def streamed_text(self) -> str:
        choices = [event["choices"][0] for event in self.events if event["choices"]]
        return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


class SimulatedServer:
    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.file = folder / "config.json"
        self.settings = settings
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port: int = listener.getsockname()[1]
            self.settings["fd"] = listener.fileno()
            self.change()
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(PROGRAM), str(self.file)],
                pass_fds=(listener.fileno(),),
                stderr=subprocess.PIPE,
            )

    def change(self, **settings: Any) -> None:
        self.settings |= settings
        self.write(json.dumps(self.settings))

    def write(self, text: str) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(text, encoding="utf-8")
        new.replace(self.file)

    def listens(self) -> bool:
        return accepts(self.port)

    def wait_until_listening(self) -> None:
        wait_for(lambda: self.listens() or self.process.poll() is not None)
        assert self.process.poll() is None

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def get(self, path: str, method: str = "GET") -> Reply:
        connection = self.connect()
        try:
            return answer_to(connection, method, path)
        finally:
            connection.close()

    def post(self, path: str, body: Any) -> Reply:
        connection = self.connect()
        try:
            return answer_to(connection, "POST", path, body)
        finally:
            connection.close()

    def chat(self, ask: str = "hello", **more: Any) -> Reply:
        return self.post("/v1/chat/completions", chat_body(ask, **more))

    @contextmanager
    def stream(self, tokens: int) -> Iterator[http.client.HTTPResponse]:
        """A running stream, past its headers; its client goes at the end."""
        connection = self.connect()
        body = chat_body("hello", max_tokens=tokens, ignore_eos=True, stream=True)
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        response = connection.getresponse()
        try:
            yield response
        finally:
            response.close()
            connection.close()

    def raw(self, data: bytes) -> bytes:
        """Everything that comes back for these bytes until the server closes."""
        received = b""
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE) as client:
            client.sendall(data)
            while chunk := client.recv(65536):
                received += chunk
        return received

    def running(self) -> int:
        count = self.get("/server_info").document["running_requests"]
        assert isinstance(count, int)
        return count

    def end(self) -> str:
        """Stop it if it runs; what it wrote to stderr."""
        self.process.kill()
        return self.process.communicate(timeout=PATIENCE)[1].decode()


def chat_body(ask: str, **more: Any) -> dict[str, Any]:
    return {"model": "qwen3.5-122b", "messages": [{"role": "user", "content": ask}], **more}


def text_of(document: Any) -> str:
    choice = document["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    assert isinstance(text, str)
    return text


def answer_to(connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> Reply:
    connection.request(method, path, None if body is None else json.dumps(body))
    response = connection.getresponse()
    text = response.read().decode()
    return Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, text)


def wait_for(condition: Any) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), PATIENCE).close()
    except ConnectionRefusedError:
        return False
    return True


def gone(pid: int) -> bool:
    """No such process, or one that has ended and that nobody has waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


@contextmanager
def simulated_server(folder: Path, **settings: Any) -> Iterator[SimulatedServer]:
    """A server that must not have complained when the test is over."""
    server = SimulatedServer(folder, {**SETTINGS, **settings})
    try:
        if server.settings["load_seconds"] is not None:
            server.wait_until_listening()
        yield server
    except BaseException:
        server.end()
        raise
    assert server.end() == ""


# Starts a server as the agent does, says its pid and waits to be killed.
PARENT = """
import socket, subprocess, sys, json
settings, file, program = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
json.dump({**settings, "fd": listener.fileno()}, open(file, "w"))
child = subprocess.Popen([sys.executable, "-I", "-S", program, file], pass_fds=(listener.fileno(),))
print(child.pid, listener.getsockname()[1], flush=True)
child.wait()
"""


def orphan(folder: Path) -> int:
    """The pid of a listening server whose parent has just been killed."""
    arguments = [json.dumps(SETTINGS), str(folder / "config.json"), str(PROGRAM)]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *arguments], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, port = map(int, parent.stdout.readline().split())
    try:
        wait_for(lambda: accepts(port))
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.communicate(timeout=PATIENCE)
    return pid
