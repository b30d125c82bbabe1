"""The real client against a real socket: health, completions, timeouts on a compressed clock."""

import asyncio
import json
import socket

import pytest

from agent.host.clock import SystemClock
from agent.host.http_stream import BadReplyError, parse_endpoint
from agent.host.inference import HttpInference
from tests.gate.fast_clock import FastClock
from tests.gate.truth_server import Habits, serving


@pytest.mark.parametrize("framing", ["length", "close"])
async def test_get_returns_status_and_body(framing):
    async with serving(Habits(framing=framing)) as server:
        assert await HttpInference(SystemClock()).get(server.url, "/health", 5.0) == (200, "fine")
    assert server.heads[0].startswith("GET /health HTTP/1.1\r\n")
    assert f"Host: {server.url.removeprefix('http://')}\r\n" in server.heads[0]


async def test_get_hands_an_error_status_to_the_caller():
    async with serving(Habits(fail_from=1, fail_status=503)) as server:
        status, body = await HttpInference(SystemClock()).get(server.url, "/health", 5.0)
    assert status == 503
    assert "out of memory" in body


async def test_a_base_path_and_a_host_name_are_kept():
    async with serving() as server:
        url = server.url.replace("127.0.0.1", "localhost") + "/api/"
        await HttpInference(SystemClock()).get(url, "/health", 5.0)
    assert server.heads[0].startswith("GET /api/health ")
    assert "Host: localhost:" in server.heads[0]


async def test_an_ipv6_literal_is_understood():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    async with serving(host="::1") as server:
        assert await HttpInference(SystemClock()).get(server.url, "/health", 5.0) == (200, "fine")
    assert "Host: [::1]:" in server.heads[0]


@pytest.mark.parametrize(
    "url",
    ["https://127.0.0.1:1", "http://", "127.0.0.1:30000", "http://h:x", "http://h:70000", "http://u:p@h:1"],
)
def test_a_url_that_is_no_plain_http_base_is_refused(url):
    with pytest.raises(OSError, match=r"URL|expected http://"):
        parse_endpoint(url)


async def test_a_path_cannot_smuggle_a_header():
    with pytest.raises(OSError, match="expected a path"):
        await HttpInference(SystemClock()).get("http://127.0.0.1:1", "/x\r\nEvil: 1", 1.0)


async def test_a_closed_port_is_an_oserror():
    async with serving() as server:
        pass
    with pytest.raises(ConnectionRefusedError):
        await HttpInference(SystemClock()).get(server.url, "/health", 5.0)


async def test_a_timeout_is_counted_on_the_given_clock():
    clock = FastClock(1000.0)
    async with serving(Habits(first=30.0)) as server:
        with pytest.raises(TimeoutError, match=r"GET .*/health: no complete answer within 60 s"):
            await HttpInference(clock).get(server.url, "/health", 60.0)


async def test_a_cancelled_request_is_cancelled_not_timed_out():
    async with serving(Habits(first=30.0)) as server:
        task = asyncio.create_task(HttpInference(SystemClock()).get(server.url, "/health", 60.0))
        while not server.heads:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_completion_has_text_tokens_and_finish_reason():
    async with serving(Habits(finish="stop", reasoning=True)) as server:
        answer = await HttpInference(SystemClock()).complete(server.url, "tiny", "What is 7 * 13?", 64, 5.0)
    assert answer.text == "Seven times thirteen.\n7 * 13 = 91."
    assert (answer.tokens, answer.finish) == (9, "stop")
    asked = server.bodies[0]
    assert (asked["model"], asked["max_tokens"], asked["temperature"]) == ("tiny", 64, 0)
    assert asked["messages"] == [{"role": "user", "content": "What is 7 * 13?"}]


async def test_a_completion_without_usage_has_no_tokens():
    async with serving(Habits(usage="none")) as server:
        assert (await HttpInference(SystemClock()).complete(server.url, "tiny", "hi", 8, 5.0)).tokens == 0


def _http(body: str, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(body)}\r\n\r\n{body}".encode()


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (_http('{"error": {"message": "no such model"}}', "404 Not Found"), "HTTP 404: no such model"),
        (_http("<h1>Bad gateway</h1>", "502 Bad Gateway"), "HTTP 502: <h1>Bad gateway</h1>"),
        (_http('{"object": "error", "message": "too long"}', "400 Bad Request"), "HTTP 400: too long"),
        (_http('{"error": "x"}'), "HTTP 200: x"),
        (_http("[" * 100_000), "HTTP 200"),
        (_http("{}"), "holds no completion"),
        (_http('{"choices": []}'), "holds no completion"),
        (_http('{"choices": [{"message": null}]}'), "holds no completion"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "in the middle of its answer"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000, "no end of headers"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n\r\n" + b"a" * 9_000_000, "larger than"),
        (
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
            "not HTTP/1.1",
        ),
    ],
)
async def test_garbage_is_an_oserror_that_says_what_came(raw, said):
    async with serving(Habits(raw=raw)) as server:
        with pytest.raises(OSError, match=said):
            await HttpInference(SystemClock()).complete(server.url, "tiny", "hi", 8, 5.0)


async def test_nothing_at_all_is_an_oserror():
    async with serving(Habits(raw=b" ")) as server:
        with pytest.raises(OSError):
            await HttpInference(SystemClock()).get(server.url, "/health", 5.0)


async def test_an_interim_answer_is_passed_over():
    async with serving(Habits(raw=b"HTTP/1.1 100 Continue\r\n\r\n" + _http("fine"))) as server:
        assert await HttpInference(SystemClock()).get(server.url, "/health", 5.0) == (200, "fine")


async def test_bytes_after_the_answer_do_not_matter():
    async with serving(Habits(raw=_http("fine") + b"garbage")) as server:
        assert await HttpInference(SystemClock()).get(server.url, "/health", 5.0) == (200, "fine")


async def test_content_that_is_null_gives_an_empty_text():
    body = json.dumps({"choices": [{"message": {"content": None}, "finish_reason": "stop"}]})
    async with serving(Habits(raw=_http(body))) as server:
        assert (await HttpInference(SystemClock()).complete(server.url, "tiny", "hi", 8, 5.0)).text == ""


def test_a_bad_reply_is_an_oserror():
    assert issubclass(BadReplyError, OSError)
