"""Law 10 for the words of others: no credential is left in them, and the rest stays readable."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.problem import secret_value
from agent.core.redact import redact, redact_all

TOKEN = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ01234567"
PLAIN = (
    "sglang.service ended (exit-code, status 1): CUDA out of memory",
    "max_total_num_tokens=812345, chunked_prefill_size=8192",
    "NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', GPU has fallen off the bus.",
    "[Errno 111] Connect call failed ('127.0.0.1', 30000)",
    "http://127.0.0.1:30000/v1/models",
)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (f"401 for token {TOKEN}", "401 for token (not shown)"),
        (f"https://x/{TOKEN}/y", "https://x/(not shown)/y"),
        (f"<{TOKEN}>", "<(not shown)>"),
        ("ServerArgs(api_key='sk verysecret', tp=4)", "ServerArgs(api_key (not shown), tp=4)"),
        ('{"password": "hunter2", "user": "me"}', '{"password (not shown), "user": "me"}'),
        ("run it with HF_TOKEN=abcdefgh now", "run it with HF_TOKEN (not shown) now"),
        ("sglang --api-key abcdefgh --tp 4", "sglang --api-key (not shown) --tp 4"),
        ("http://me:hunter2@proxy:80/", "http://(not shown)@proxy:80/"),
        ("Authorization: Bearer abc.def-ghi", "Authorization: Bearer (not shown)"),
        ("-----BEGIN PRIVATE KEY-----\nMIIB\n-----END PRIVATE KEY-----; next", "(not shown); next"),
        ("-----BEGIN RSA PRIVATE KEY-----; MIIB; cut", "(not shown)"),
        (
            "token=-----BEGIN PRIVATE KEY-----\nMIIB\n-----END PRIVATE KEY-----, next",
            "token (not shown), next",
        ),
        ("password: (not shown), next", "password (not shown), next"),
    ],
)
def test_a_credential_is_not_shown_and_what_stands_around_it_is(text: str, kept: str) -> None:
    assert redact(text) == kept


@pytest.mark.parametrize("text", PLAIN)
def test_text_without_a_credential_stays_as_it_is(text: str) -> None:
    assert redact(text) == text


def test_a_variable_that_the_spec_calls_a_secret_is_one_whatever_its_name() -> None:
    assert redact("LICENSE=abcdefgh is void", ("LICENSE",)) == "LICENSE (not shown) is void"
    assert redact("LICENSE=abcdefgh is void") == "LICENSE=abcdefgh is void"


def test_plain_data_is_redacted_through_and_through() -> None:
    data = {"at": 1.0, "text": TOKEN, "more": [{"why": f"x {TOKEN}"}, None, True]}
    assert TOKEN not in json.dumps(redact_all(data))
    assert redact_all({"at": 1.0, "n": 3}) == {"at": 1.0, "n": 3}


KEY_BLOCK = ("-----BEGIN RSA PRIVATE KEY-----", "-----END RSA PRIVATE KEY-----")
WORDS = ("token", "api-key", "HF_TOKEN", "abc", TOKEN, "(not shown)", "bearer ", "://u:p@")
SIGNS = ("=", ":", " ", '"', "'", "--", ",", "://", "@", "\n", "(")
PIECES = st.sampled_from([*KEY_BLOCK, *WORDS, *SIGNS])


@given(st.lists(PIECES, max_size=14).map("".join) | st.text(max_size=80))
def test_nothing_that_looks_like_a_credential_is_left_and_twice_is_the_same(text: str) -> None:
    once = redact(text)
    assert not secret_value(once)
    assert TOKEN not in once
    assert redact(once) == once
    named = redact(text, ("abc",))
    assert re.search(r"\babc=", named) is None
    assert not secret_value(named)
    assert redact(named, ("abc",)) == named
