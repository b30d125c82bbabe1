"""Garbage, bad bodies and busy clients: the simulated inference server answers and goes on."""

import socket
import threading

import pytest

from tests.sim.simulated_server import (
    PATIENCE,
    answer_to,
    simulated_server,
)

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def server(tmp_path):
    with simulated_server(tmp_path) as running:
        yield running


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"GET\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n: x\r\n\r\n", 400),
        (b"GET /health HTTP/1.0\r\n\r\n", 505),
        (b"GET /health HTTP/1.1\r\nX: " + b"a" * 70_000, 431),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n" + b"a" * 4_000_000, 413),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 413),
        (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
    ],
)
def test_garbage_gets_an_error_status_and_the_server_goes_on(server, data, status):
    assert server.raw(data).startswith(b"HTTP/1.1 %d " % status)
    assert server.get("/v1/models").status == 200


@pytest.mark.parametrize(
    ("path", "content", "said"),
    [
        (CHAT, b"not json", "not JSON"),
        (CHAT, b"[" * 100_000, "not JSON"),
        (CHAT, b"\xff\xfe", "not JSON"),
        (CHAT, b"[]", "not a JSON object"),
        (CHAT, b"{}", "messages: expected"),
        (CHAT, b'{"messages": ["hello"]}', "messages: expected"),
        (PLAIN, b'{"prompt": 7}', "prompt: expected"),
        (PLAIN, b'{"prompt": "x", "max_tokens": 0}', "max_tokens: expected an integer from 1"),
        (PLAIN, b'{"prompt": "x", "max_tokens": true}', "max_tokens: expected"),
        (PLAIN, b'{"prompt": "x", "max_tokens": 10000000}', "exceed the cache's 780820 tokens"),
    ],
)
def test_a_bad_body_is_a_400_that_says_why(server, path, content, said):
    connection = server.connect()
    connection.request("POST", path, content)
    response = connection.getresponse()
    assert response.status == 400
    assert said in response.read().decode()
    assert answer_to(connection, "GET", "/v1/models").status == 200  # on the same connection
    connection.close()


def test_unknown_paths_and_methods_are_refused(server):
    assert server.get("/v2/models").status == 404
    reply = server.get("/health?x=1", method="DELETE")
    assert (reply.status, reply.headers["allow"]) == (405, "GET")


def test_requests_sent_at_once_are_answered_in_their_order(server):
    first = b"GET /health HTTP/1.1\r\n\r\n"
    second = b'POST /v1/completions HTTP/1.1\r\nContent-Length: 20\r\n\r\n{"prompt": "7 * 13"}'
    last = b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n"
    received = server.raw(first + second + last)
    places = [received.index(part) for part in (b'"status": "ok"', b"7 * 13 = 91", b'"object": "list"')]
    assert places == sorted(places)


def test_a_request_may_come_byte_by_byte_and_wait_for_100_continue(server):
    head = b"POST /v1/completions HTTP/1.1\r\nExpect: 100-continue\r\nConnection: close\r\nContent-Length: 20\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as client:
        for place in range(len(head)):
            client.sendall(head[place : place + 1])
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(b'{"prompt": "7 * 13"}')
        received = b""
        while chunk := client.recv(65536):
            received += chunk
    assert b"7 * 13 = 91" in received


def test_many_clients_at_once_are_all_served(server):
    replies: list[int] = []

    def ask() -> None:
        reply = server.chat(max_tokens=40, ignore_eos=True, stream=True)
        replies.append(len(reply.streamed_text.split()))

    threads = [threading.Thread(target=ask) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert replies == [40] * 40
