"""The two sockets of a virtual machine: the guest's command channel and QEMU's own protocol, one JSON object a line."""

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class GuestDeadError(Exception):
    """The guest or its QEMU does not answer; the message ends with the serial console's tail."""


class Lines:
    """JSON lines over a UNIX socket, with a deadline on each."""

    def __init__(self, path: Path, deadline: float, alive: Callable[[], bool]) -> None:
        """Connects as soon as the socket is there. Raises TimeoutError, and EOFError when ``alive`` says no."""
        self._alive = alive
        self._pending = b""
        end = time.monotonic() + deadline
        while True:
            self._socket = socket.socket(socket.AF_UNIX)
            try:
                self._socket.connect(str(path))
            except OSError as error:
                self._socket.close()
                if not alive():
                    raise EOFError(f"QEMU ended before {path.name} could be used") from error
                if time.monotonic() > end:
                    raise TimeoutError(f"{path.name} could not be connected to: {error}") from error
                time.sleep(0.1)
            else:
                return

    def send(self, message: dict[str, Any]) -> None:
        self._socket.sendall((json.dumps(message) + "\n").encode())

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next object. Raises TimeoutError, and EOFError when the other end is closed."""
        end = time.monotonic() + deadline
        while b"\n" not in self._pending:
            self._socket.settimeout(max(0.01, end - time.monotonic()))
            try:
                received = self._socket.recv(1 << 16)
            except ConnectionError as error:
                raise EOFError("the connection was reset") from error
            if not received:
                raise EOFError("the connection was closed")
            self._pending += received
        line, self._pending = self._pending.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self._socket.close()


class Channel:
    """Requests to the guest, one at a time."""

    def __init__(self, path: Path, deadline: float, alive: Callable[[], bool]) -> None:
        end = time.monotonic() + deadline
        self._lines = Lines(path, deadline, alive)
        self._id = 0
        self.boot_id = str(self._lines.receive(end - time.monotonic())["boot"])

    def ask(self, action: str, deadline: float, **request: Any) -> dict[str, Any]:
        """The answer. Raises what ``Lines`` raises, and the OSError that the guest met."""
        self._id += 1
        self._lines.send({"id": self._id, "action": action, **request})
        end = time.monotonic() + deadline
        while True:
            answer = self._lines.receive(end - time.monotonic())
            if answer["id"] == self._id:
                break
        if "errno" in answer:
            number = int(answer["errno"])
            raise OSError(number, os.strerror(number), str(request.get("path", action)))
        return answer

    def close(self) -> None:
        self._lines.close()


def ask_qemu(path: Path, execute: str, arguments: dict[str, Any], deadline: float = 30.0) -> Any:
    """One command of QEMU's own protocol. Raises ValueError with QEMU's words where it refuses."""
    lines = Lines(path, deadline, lambda: True)
    try:
        lines.receive(deadline)  # its greeting
        for request in ({"execute": "qmp_capabilities"}, {"execute": execute, "arguments": arguments}):
            lines.send(request)
            answer = lines.receive(deadline)
            while "return" not in answer and "error" not in answer:
                answer = lines.receive(deadline)
            if "error" in answer:
                raise ValueError(f"QEMU refuses {execute} {arguments}: {answer['error']['desc']}")
        return answer["return"]
    finally:
        lines.close()
