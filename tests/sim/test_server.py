"""The simulated inference server: a real child process, real sockets."""

import signal
from typing import Any

import pytest

from agent.core.smoke import degenerate
from tests.sim.simulated_server import (
    PATIENCE,
    SETTINGS,
    SimulatedServer,
    chat_body,
    simulated_server,
    text_of,
)

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
USAGE = {"include_usage": True, "continuous_usage_stats": True}


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
