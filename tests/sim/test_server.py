"""The simulated inference server: a real child process, real sockets."""

import http.client
import itertools
import signal
import socket
import threading
from typing import Any

import pytest

from agent.core.smoke import check_answer, degenerate
from agent.core.spec import BenchmarkSpec, SmokePrompt
from agent.host.inference import HttpInference
from agent.sim.clock import SimClock
from agent.sim.server_config import Config
from agent.sim.server_engine import Engine
from tests.sim.simulated_server import (
    PATIENCE,
    SETTINGS,
    SimulatedServer,
    answer_to,
    chat_body,
    gone,
    orphan,
    simulated_server,
    wait_for,
)

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
USAGE = {"include_usage": True, "continuous_usage_stats": True}
PROMPT = SmokePrompt(ask="What is 7 * 13?", expect="91")


@pytest.fixture
def server(tmp_path):
    with simulated_server(tmp_path) as running:
        yield running


# -- loading ---------------------------------------------------------------------------------------------------------


def test_connections_are_refused_until_the_model_has_loaded(tmp_path):
    with simulated_server(tmp_path, load_seconds=None) as server:
        assert not server.listens()
        server.change(load_seconds=5.0)
        server.wait_until_listening()
        assert server.get("/v1/models").status == 200


def test_sigterm_while_loading_ends_it(tmp_path):
    with simulated_server(tmp_path, load_seconds=None) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) in (0, -signal.SIGTERM)


def test_a_config_that_cannot_be_used_is_refused_at_the_start(tmp_path):
    server = SimulatedServer(tmp_path, {**SETTINGS, "speeds": []})
    assert server.process.wait(PATIENCE) == 2
    assert "speeds: expected rows" in server.end()


# -- answers ---------------------------------------------------------------------------------------------------------


def body(path: str, ask: str = "hello", **more: Any) -> dict[str, Any]:
    return chat_body(ask, **more) if path == CHAT else {"prompt": ask, **more}


def text_of(document: Any) -> str:
    choice = document["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_an_answer_comes_from_the_table(server, path):
    document = server.post(path, body(path, "What is 7 * 13?", temperature=0)).document
    assert text_of(document) == "7 * 13 = 91"
    assert document["usage"] == {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}
    assert document["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_a_streamed_answer_is_the_same_text(server, path):
    reply = server.post(path, body(path, "Tell me.", stream=True))
    assert reply.headers["content-type"] == "text/event-stream"
    assert reply.streamed_text == SETTINGS["default_answer"]
    assert all("usage" not in event for event in reply.events)
    assert reply.events[-1]["choices"][0]["finish_reason"] == "stop"


def test_max_tokens_cuts_an_answer_off(server):
    document = server.chat("7 * 13", max_tokens=3).document
    assert text_of(document) == "7 * 13"
    assert (document["usage"]["completion_tokens"], document["choices"][0]["finish_reason"]) == (3, "length")


@pytest.mark.parametrize("path", [CHAT, PLAIN])
@pytest.mark.parametrize("tokens", [1, 2, 500, 5000])
def test_ignore_eos_gives_exactly_max_tokens(server, path, tokens):
    document = server.post(path, body(path, max_tokens=tokens, ignore_eos=True)).document
    assert document["usage"]["completion_tokens"] == tokens == len(text_of(document).split())
    assert document["choices"][0]["finish_reason"] == "length"
    assert degenerate(text_of(document)) == ""


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_running_usage_counts_the_words_sent_so_far(server, path):
    reply = server.post(path, body(path, max_tokens=3000, ignore_eos=True, stream=True, stream_options=USAGE))
    words = 0
    for event in reply.events:
        for choice in event["choices"]:
            words += len((choice["text"] if path == PLAIN else choice["delta"].get("content", "")).split())
        assert event["usage"]["completion_tokens"] == words
    assert words == 3000
    assert reply.events[-1]["choices"] == []
    assert len(reply.events) > 3  # more than one with text


def test_two_long_answers_differ(server):
    first, second = (text_of(server.chat(max_tokens=50, ignore_eos=True).document) for _ in range(2))
    assert first != second


def test_content_in_parts_is_understood(server):
    ask = [{"type": "text", "text": "What is 7 * 13?"}, {"type": "image_url"}]
    assert (
        text_of(server.post(CHAT, {"messages": [{"role": "user", "content": ask}]}).document) == "7 * 13 = 91"
    )


# -- what it says about itself ---------------------------------------------------------------------------------------


def test_server_info_has_the_flags_and_the_capacity(tmp_path):
    with simulated_server(tmp_path, server_info={"kv_cache_dtype": "auto"}) as server:
        info = server.get("/server_info").document
        assert info == server.get("/get_server_info").document
    assert (info["tp_size"], info["disable_custom_all_reduce"], info["port"]) == (4, True, 30000)
    assert (info["version"], info["max_total_num_tokens"]) == ("0.5.12.post1", 780820)
    assert (info["kv_cache_dtype"], info["running_requests"]) == ("auto", 0)


def test_every_answer_says_that_it_is_simulated(tmp_path):
    with simulated_server(tmp_path, server_info={"simulated": False}) as server:
        replies = [server.get(path) for path in ("/health", "/v1/models", "/server_info", "/nowhere")]
        completion, stream = server.chat(), server.chat(stream=True)
    for reply in replies:
        assert reply.document["simulated"] is True
    for document in (completion.document, *stream.events):
        assert document["system_fingerprint"] == "simulated"
    for reply in (*replies, completion, stream):
        assert reply.headers["server"] == "simulated"


def test_the_served_model_is_listed(server):
    assert [model["id"] for model in server.get("/v1/models").document["data"]] == ["qwen3.5-122b"]


# -- faults ----------------------------------------------------------------------------------------------------------


def judged(server: SimulatedServer) -> str:
    """What the smoke test says about it."""
    document = server.chat(PROMPT.ask, max_tokens=64).document
    tokens = document.get("usage", {}).get("completion_tokens", 0)
    return check_answer(PROMPT, text_of(document), tokens, document["choices"][0]["finish_reason"])


def test_a_sound_server_passes_the_smoke_test(server):
    assert judged(server) == ""


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("exclaim", "'!' makes 64 of 64 characters"),
        ("nonsense", "expected '91' in the answer"),
        ("empty", "empty answer"),
        ("no-tokens", "no generated tokens"),
        ("no-usage", "no generated tokens"),
    ],
)
def test_P8_S1_a_broken_server_says_200_and_fails_the_smoke_test(tmp_path, fault, said):
    with simulated_server(tmp_path, faults={"answer": fault}) as server:
        assert said in judged(server)
        assert server.get("/health").status == 200


@pytest.mark.parametrize("fault", ["exclaim", "nonsense", "empty"])
def test_P8_a_broken_server_still_counts_tokens_exactly(tmp_path, fault):
    with simulated_server(tmp_path, faults={"answer": fault}) as server:
        document = server.chat(max_tokens=300, ignore_eos=True).document
    assert document["usage"]["completion_tokens"] == 300


def test_S1_a_stream_without_tokens_ends_as_a_stream(tmp_path):
    with simulated_server(tmp_path, faults={"answer": "no-tokens"}) as server:
        reply = server.chat(max_tokens=300, ignore_eos=True, stream=True, stream_options=USAGE)
    assert reply.streamed_text == ""
    assert {event["usage"]["completion_tokens"] for event in reply.events} == {0}


def test_S1_a_stream_without_usage_has_none_anywhere(tmp_path):
    with simulated_server(tmp_path, faults={"answer": "no-usage"}) as server:
        reply = server.chat(max_tokens=30, ignore_eos=True, stream=True, stream_options=USAGE)
    assert len(reply.streamed_text.split()) == 30
    assert all("usage" not in event for event in reply.events)


def test_an_internal_error_is_a_500(tmp_path):
    with simulated_server(tmp_path, faults={"answer": "error500"}) as server:
        reply = server.chat()
        assert (reply.status, reply.document["object"]) == (500, "error")


def test_S1_a_hanging_request_is_running_until_its_client_goes(tmp_path):
    with simulated_server(tmp_path, faults={"answer": "hang"}) as server:
        connection = server.connect()
        connection.request("POST", CHAT, '{"messages": [{"content": "hello"}]}')
        wait_for(lambda: server.running() == 1)
        connection.close()
        wait_for(lambda: server.running() == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_S6_a_server_that_dies_takes_its_streams_with_it(tmp_path, stream):
    with simulated_server(tmp_path, faults={"answer": "die-half-way"}) as server:
        with pytest.raises((http.client.HTTPException, OSError)):
            server.chat(max_tokens=400, ignore_eos=True, stream=stream)
        assert server.process.wait(PATIENCE) == -signal.SIGKILL


def test_S6_half_of_a_dying_stream_is_delivered(tmp_path):
    with (
        simulated_server(tmp_path, faults={"answer": "die-half-way"}) as server,
        server.stream(400) as response,
        pytest.raises(http.client.IncompleteRead) as error,
    ):
        response.read()
    assert b"Simulated:" in error.value.partial
    assert b"[DONE]" not in error.value.partial


def test_a_fault_begins_after_some_requests_and_ends_after_some(tmp_path):
    faults = {"answer": "error500", "after_requests": 2, "requests": 3}
    with simulated_server(tmp_path, faults=faults) as server:
        assert [server.chat().status for _ in range(7)] == [200, 200, 500, 500, 500, 200, 200]


def test_a_changed_config_counts_for_the_next_request(server):
    assert server.chat().status == 200
    server.change(faults={"answer": "error500", "requests": 1}, version="0.5.13")
    assert server.chat().status == 500
    assert server.get("/server_info").document["version"] == "0.5.13"
    assert server.chat().status == 200  # counted anew since the faults changed
    server.change(faults={})
    assert server.chat().status == 200


def test_a_config_that_cannot_be_used_leaves_the_old_one_in_force(tmp_path):
    server = SimulatedServer(tmp_path, {**SETTINGS})
    server.wait_until_listening()
    for text in ('{"half": ', "[]", "{}", '{"time_factor": 0}'):
        server.write(text)
        assert server.chat("7 * 13").status == 200
    assert "config.json: not used" in server.end()


# -- health ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("health", "status"), [("ok", 200), ("503", 503), (500, 500)])
def test_health_has_the_configured_status(tmp_path, health, status):
    with simulated_server(tmp_path, faults={"health": health}) as server:
        assert server.get("/health").status == status
        assert server.chat().status == 200


def test_health_can_hang(tmp_path):
    with simulated_server(tmp_path, faults={"health": "hang"}) as server:
        connection = server.connect()
        connection.request("GET", "/health")
        wait_for(lambda: server.running() == 1)
        connection.close()


# -- ending ----------------------------------------------------------------------------------------------------------

# With ``factor=0`` a stream gets no further until a test says so.


def test_a_client_that_goes_frees_its_slot(tmp_path):
    with simulated_server(tmp_path, factor=0.0) as server:
        with server.stream(100):
            assert server.running() == 1
        wait_for(lambda: server.running() == 0)


def test_sigterm_lets_running_streams_end_and_refuses_new_requests(tmp_path):
    with simulated_server(tmp_path, factor=0.0) as server, server.stream(100) as response:
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.get("/health").status == 503)
        assert server.chat().status == 503
        assert server.running() == 1
        server.change(factor=1.0)
        text = response.read()
        assert server.process.wait(PATIENCE) == 0
    assert text.endswith(b"data: [DONE]\n\n")


def test_S8_a_drain_ends_when_its_time_is_over(tmp_path):
    with simulated_server(tmp_path, factor=0.0, drain_seconds=10.0) as server, server.stream(100) as response:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            response.read()


def test_an_idle_server_ends_at_once(server):
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 0


def test_sigterm_can_be_ignored(tmp_path):
    with simulated_server(tmp_path, sigterm="ignore") as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.get("/health").status == 200
        assert server.chat().status == 200


def test_ctrl_c_is_left_to_the_parent(server):
    server.process.send_signal(signal.SIGINT)
    assert server.get("/health").status == 200


def test_it_ends_with_its_parent(tmp_path):
    pid = orphan(tmp_path)
    wait_for(lambda: gone(pid))


def test_it_ends_if_the_parent_was_gone_before_it_began(tmp_path):
    server = SimulatedServer(tmp_path, {**SETTINGS, "parent_pid": 2**22 + 1})
    assert server.process.wait(PATIENCE) == 0
    assert server.end() == ""


# -- HTTP ------------------------------------------------------------------------------------------------------------


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


# -- speed -----------------------------------------------------------------------------------------------------------


def config(**more: Any) -> Config:
    return Config({**SETTINGS, "fd": 0, "time_factor": 1.0, **more})


def test_speed_is_interpolated_between_the_rows_and_scaled():
    rows = config(speeds=[[2, 100.0], [8, 300.0]])
    assert [round(rows.throughput(c), 6) for c in (1, 2, 4, 8, 64)] == [50.0, 100.0, 200.0, 300.0, 300.0]
    assert config(speeds=[[1, 100.0]], factor=0.5, time_factor=60.0).throughput(1) == pytest.approx(3000.0)


class ManualLoop:
    """Time that stands still until told, with every timer late by ``late``."""

    def __init__(self, late: float = 0.0) -> None:
        self.now, self.late = 100.0, late
        self.timers: dict[int, tuple[float, Any]] = {}
        self.keys = itertools.count()

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Any) -> Any:
        loop, key = self, next(self.keys)
        self.timers[key] = (when, call)

        class Handle:
            def cancel(self) -> None:
                loop.timers.pop(key, None)

        return Handle()

    def run_until(self, condition: Any) -> None:
        while not condition():
            key, (when, call) = min(self.timers.items(), key=lambda item: item[1][0])
            del self.timers[key]
            self.now = max(self.now, when + self.late)
            call()


class Work:
    """A completion that only knows its length."""

    numbers = itertools.count()

    def __init__(self, tokens: int) -> None:
        self.number, self.tokens = next(self.numbers), tokens
        self.started = self.overdue = self.ended = False
        self.end_level = self.first_due = 0.0

    def begin(self, level: float, first_due: float) -> None:
        self.end_level, self.first_due = level + self.tokens, first_due

    def show(self, _level: float) -> None:
        self.started = True

    def end(self) -> None:
        self.ended = True


def engine_on(loop: Any, **more: Any) -> Any:
    settings = config(**more)
    return Engine(loop, lambda: settings)


def test_streams_share_the_speed_as_others_come_and_go():
    loop = ManualLoop()
    engine = engine_on(loop, speeds=[[1, 100.0], [2, 120.0]], ttft_seconds=0.1)
    first, second = Work(200), Work(60)
    engine.add(first)
    loop.now += 1.0  # 100 tokens alone
    engine.add(second)
    loop.run_until(lambda: second.ended)
    assert loop.now == pytest.approx(102.0)  # 60 tokens each, at 60 a second
    loop.run_until(lambda: first.ended)
    assert loop.now == pytest.approx(102.4, abs=0.02)  # 40 left, alone again soon after


def test_lateness_of_the_process_and_of_its_client_does_not_add_up():
    loop = ManualLoop(late=0.004)
    engine = engine_on(loop, speeds=[[1, 100.0]])
    for _ in range(50):
        work = Work(100)
        engine.add(work)
        loop.run_until(lambda work=work: work.ended)
        loop.now += 0.005
    assert loop.now == pytest.approx(150.0, abs=0.02)


def test_a_slot_that_nobody_takes_is_free_again():
    loop = ManualLoop()
    engine = engine_on(loop, speeds=[[1, 100.0]])
    work = Work(100)
    engine.add(work)
    loop.run_until(lambda: work.ended)
    loop.now += 10.0
    late = Work(100)
    engine.add(late)
    loop.run_until(lambda: late.ended)
    assert loop.now == pytest.approx(112.0)


def test_an_answer_shorter_than_the_time_to_its_first_token_comes_with_it():
    loop = ManualLoop()
    engine = engine_on(loop, speeds=[[1, 100.0]], ttft_seconds=5.0)
    work = Work(1)
    engine.add(work)
    loop.run_until(lambda: work.ended)
    assert loop.now == pytest.approx(105.0)


def test_a_speed_of_nothing_stops_everything_until_it_changes():
    loop = ManualLoop()
    current = [config(speeds=[[1, 100.0]], factor=0.0)]
    typed: Any = loop
    engine = Engine(typed, lambda: current[0])
    work: Any = Work(100)
    engine.add(work)
    loop.now += 50.0
    engine.settle()
    current[0] = config(speeds=[[1, 100.0]])
    engine.resume()
    loop.run_until(lambda: work.ended)
    assert loop.now == pytest.approx(151.0)


@pytest.mark.parametrize(("concurrency", "expected"), [(1, 108.3), (16, 873.0)])
async def test_a_benchmark_measures_about_the_speed_in_the_table(tmp_path, concurrency, expected):
    with simulated_server(tmp_path, time_factor=30.0) as server:
        spec = BenchmarkSpec(output_tokens=300, requests_per_slot=2, repeats=1)
        level = await HttpInference(SimClock(30.0)).benchmark_level(
            f"http://127.0.0.1:{server.port}", "m", spec, concurrency, lambda _done, _total: None
        )
    assert level.errors == ()
    assert (level.ok, level.tokens) == (2 * concurrency, 600 * concurrency)
    assert level.throughput == pytest.approx(expected, rel=0.4)
    assert level.ttft.p50 < level.e2e.p50
