"""What the simulated inference server does wrong when it is told to, and how it ends."""

import http.client
import signal

import pytest

from agent.core.smoke import check_answer
from agent.core.spec import SmokePrompt
from tests.sim.simulated_server import (
    PATIENCE,
    SETTINGS,
    SimulatedServer,
    gone,
    orphan,
    simulated_server,
    text_of,
    wait_for,
)

CHAT = "/v1/chat/completions"
USAGE = {"include_usage": True, "continuous_usage_stats": True}
PROMPT = SmokePrompt(ask="What is 7 * 13?", expect="91")


@pytest.fixture
def server(tmp_path):
    with simulated_server(tmp_path) as running:
        yield running


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
