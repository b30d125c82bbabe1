"""Stands for ``sglang.launch_server`` in a ring: OpenAI's interface on --port, words at an even pace, and no model."""

import json
import re
import socket
import sys
import threading
import time

PACE = 0.02  # seconds from one token to the next: no client is too slow to measure that


def option(name: str) -> str:
    return sys.argv[sys.argv.index(f"--{name}") + 1]


def serve(connection: socket.socket) -> None:
    with connection, connection.makefile("rb") as lines:
        path = lines.readline().split()[1].decode()
        headers = b"".join(iter(lines.readline, b"\r\n")).decode()
        length = re.search(r"(?i)^content-length: *(\d+)", headers, re.MULTILINE)
        body = json.loads(lines.read(int(length[1]))) if length else {}
        if path != "/v1/chat/completions":
            answer(connection, {"stand-in": True, "running_requests": 0})
        elif body.get("stream"):
            stream(connection, body["max_tokens"])
        else:
            usage = {"completion_tokens": 3}
            message = {"role": "assistant", "content": "It is 91."}
            answer(connection, {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})


def answer(connection: socket.socket, document: object) -> None:
    data = json.dumps(document).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)


def stream(connection: socket.socket, tokens: int) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
    for count in range(1, tokens + 1):
        time.sleep(PACE)
        choice = {"delta": {"content": "word "}, "finish_reason": "length" if count == tokens else None}
        event = {"choices": [choice], "usage": {"completion_tokens": count}}
        connection.sendall(f"data: {json.dumps(event)}\n\n".encode())
    connection.sendall(b"data: [DONE]\n\n")


listener = socket.create_server(("127.0.0.1", int(option("port"))), backlog=64)
print(f"the stand-in serves {option('model-path')}", flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
