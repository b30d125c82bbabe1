"""S12: what is written to the drop-in is what systemd reads back, word for word."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.errors import TerminalError
from agent.core.p2p_decision import P2PDecision
from agent.core.render import DROP_IN, quote, render, without_p2p
from agent.core.revision import Revision
from agent.core.spec import Service
from agent.sim.merge import merge
from tests.core.build import FIRST, SERVICE, UNIT, uuid_of

OFF = P2PDecision(on=False, source="verdict", reason="12 of 12 ordered pairs corrupt")
ON = P2PDecision(on=True, source="verdict", reason="all 12 ordered pairs good", current=True)
NONCHARACTERS = [
    *range(0xFDD0, 0xFDF0),
    *(plane << 16 | low for plane in range(17) for low in (0xFFFE, 0xFFFF)),
]
BAD = [*range(0x20), 0x7F, 0xD800, 0xDFFF, 0xFDD0, 0xFDEF, 0xFFFE, 0x1FFFF, 0x10FFFF]

writable = st.text(
    st.characters(
        exclude_categories=["Cs"], exclude_characters=[chr(c) for c in (*range(0x20), 0x7F, *NONCHARACTERS)]
    )
    | st.sampled_from("\\\"'$% ;{}`#!&*\u00e9\u2028\U0001f600")
)


class Unquote:
    """systemd.syntax(7) and systemd.service(5), read again: words, escapes, specifiers, variables."""

    ESCAPES = {"\\": "\\", '"': '"', "'": "'", "s": " ", "n": "\n", "t": "\t"}

    def __init__(self, text: str, *, executed: bool) -> None:
        self.words: list[str] = []
        self.executed = executed
        rest = iter(text)
        for char in rest:
            if char not in " \t":
                self.words.append(self._word(itertools.chain([char], rest)))

    def _word(self, rest: "itertools.chain[str]") -> str:
        word, quoted = "", ""
        for char in rest:
            if quoted == "" and char in " \t":
                break
            if char in "\"'" and quoted in ("", char):
                quoted = "" if quoted else char
            elif char == "\\":
                word += self.ESCAPES[next(rest)]  # an escape that systemd does not know is an error here
            else:
                word += char
        assert quoted == "", "the quotation does not end"
        return self._expanded(word)

    def _expanded(self, word: str) -> str:
        for sign in "%$" if self.executed else "%":
            halves = word.split(sign * 2)
            assert all(sign not in half for half in halves), (
                f"{sign} would be taken for a specifier or variable"
            )
            word = sign.join(halves)
        return word


def read_back(revision: Revision) -> tuple[tuple[str, ...], dict[str, str]]:
    """argv and environment as systemd would have them from the drop-in."""
    (text,) = revision.files.values()
    lines = text.split("\n")  # systemd's lines end there only
    env: dict[str, str] = {}
    argv: list[str] = []
    for line in lines:
        key, _, value = line.partition("=")
        if key == "Environment":
            (pair,) = Unquote(value, executed=False).words
            env |= dict([pair.split("=", 1)])
        elif key == "ExecStart":
            argv = Unquote(value, executed=True).words if value else []
    return tuple(argv), env


def revision_of(p2p: P2PDecision = OFF, **changes: object) -> Revision:
    service = Service.model_validate({**SERVICE, **changes})
    return render("qwen", service, FIRST, tuple(map(uuid_of, FIRST)), p2p)


@given(
    st.dictionaries(
        st.from_regex(r"\A[a-z][a-z-]{0,8}\Z"), writable | st.lists(writable, min_size=1, max_size=3)
    ),
    st.dictionaries(st.from_regex(r"\A[A-Z_][A-Z0-9_]{0,8}\Z"), writable),
)
def test_S12_arguments_and_environment_come_back_exactly(
    args: dict[str, object], env: dict[str, str]
) -> None:
    revision = revision_of(args=args, env=env)
    argv, found = read_back(revision)
    assert argv == revision.argv
    assert found == revision.env
    for value in args.values():
        assert set(value if isinstance(value, list) else [value]) <= set(argv)


@pytest.mark.parametrize("code", BAD)
def test_S12_characters_that_systemd_refuses_are_refused_by_name(code: int) -> None:
    for made in (lambda: quote(f"a{chr(code)}b"), lambda: revision_of(env={"X": f"a{chr(code)}b"})):
        with pytest.raises(TerminalError, match=f"U\\+{code:04X}") as raised:
            made()
        assert raised.value.reason == "NotRenderable"
        assert raised.value.next_step


@pytest.mark.parametrize(
    "word", ["", " ", ";", "\\", '"', "''", "$HOME", "${X}", "%h", "100%", "a b", "-", "#x", "a\\", "\u00e9"]
)
def test_S12_the_nasty_words_one_by_one(word: str) -> None:
    assert Unquote(quote(word, executed=True), executed=True).words == [word]
    assert Unquote(quote(word), executed=False).words == [word]


def test_a_dollar_in_the_interpreters_path_is_refused_because_systemd_does_not_substitute_there() -> None:
    with pytest.raises(TerminalError, match="systemd cannot start"):
        revision_of(python="/opt/$x/python3")


def test_P1_one_verdict_switches_every_consumer_of_p2p_off() -> None:
    off, on = revision_of(OFF), revision_of(ON)
    assert off.env["NCCL_P2P_DISABLE"] == "1"
    assert "--disable-custom-all-reduce" in off.argv
    assert "NCCL_P2P_DISABLE" not in on.env
    assert "--disable-custom-all-reduce" not in on.argv
    assert off.id != on.id


@pytest.mark.parametrize(
    "changes",
    [{"args": {}}, {"args": {"disable-custom-all-reduce": False}}, {"nccl": {"NCCL_P2P_DISABLE": "0"}}],
)
def test_P1_the_spec_cannot_switch_one_of_them_on_against_the_verdict(changes: dict[str, object]) -> None:
    revision = revision_of(OFF, **changes)
    assert revision.env["NCCL_P2P_DISABLE"] == "1"
    assert "--disable-custom-all-reduce" in revision.argv


def test_every_argument_and_variable_says_where_it_comes_from() -> None:
    revision = revision_of(OFF, env={"HF_HOME": "/models"})
    assert {k for k in revision.provenance if k.startswith("env.")} == {
        f"env.{name}" for name in revision.env
    }
    flags = {word.removeprefix("--") for word in revision.argv if word.startswith("--")}
    assert {k.removeprefix("args.") for k in revision.provenance if k.startswith("args.")} == flags
    assert revision.provenance["env.NCCL_P2P_DISABLE"].reason == OFF.reason


def test_flags_are_bare_when_true_and_left_out_when_false() -> None:
    argv = revision_of(
        ON, args={"enable-metrics": True, "skip-tokenizer-init": False, "lora-paths": ["a", "b"]}
    ).argv
    assert argv[-4:] == ("--enable-metrics", "--lora-paths", "a", "b")


def test_the_drop_in_resets_the_command_first_and_leaves_restarting_to_the_agent() -> None:
    revision = revision_of(ON)
    lines = revision.files[DROP_IN.format(unit=UNIT)].splitlines()
    assert lines[lines.index("ExecStart=") + 1].startswith('ExecStart="/opt/ml-env/bin/python3"')
    assert "Restart=no" in lines


def test_S13_a_secret_is_a_path_in_the_revision_and_nothing_in_the_unit_file() -> None:
    revision = revision_of(ON, secrets={"HF_TOKEN": "/etc/gpu-host-agent/secrets/hf_token"})
    (text,) = revision.files.values()
    assert "HF_TOKEN" not in text
    assert "hf_token" not in text
    assert "EnvironmentFile=/run/gpu-host-agent/secrets/qwen.env" in text.splitlines()
    assert revision.secrets == {"HF_TOKEN": "/etc/gpu-host-agent/secrets/hf_token"}
    assert "HF_TOKEN" not in revision.env


@pytest.mark.parametrize(
    "changes",
    [{}, {"args": {"disable-custom-all-reduce": False}}, {"nccl": {"NCCL_P2P_DISABLE": "0"}}, {"secrets": {"HF_TOKEN": "/etc/hf"}}],
)  # fmt: skip
def test_law_4_a_revision_without_p2p_is_what_the_spec_would_have_rendered_with_p2p_off(
    changes: dict[str, object],
) -> None:
    service = Service.model_validate(merge(SERVICE, changes))
    uuids = tuple(uuid_of(gpu) for gpu in FIRST)
    on, off = (render("qwen", service, FIRST, uuids, decision) for decision in (ON, OFF))
    assert without_p2p(on).id == off.id
    assert without_p2p(off) is off
