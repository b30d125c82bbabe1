import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.app.terminal import Style, cells, clip, encodable, escape, use_color, width, wrap


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("plain", "plain"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\r\nb\tc", "a\\r\\nb\\tc"),
        ("\x9b1A", "\\x9b1A"),
        ("\u202e\u2028\ud800", "\\u202e\\u2028\\ud800"),
        ("\U000e0001", "\\U000e0001"),
        ("字é", "字é"),
    ],
)
def test_what_does_not_print_is_shown_as_its_code(text, safe):
    assert escape(text) == safe


@given(st.text())
def test_escaped_text_always_prints(text):
    assert escape(text).isprintable()


def test_colour_is_for_terminals_that_want_it(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert use_color(Terminal())
    assert not use_color(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not use_color(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not use_color(Terminal())
    monkeypatch.setenv("NO_COLOR", "")  # empty counts as unset
    assert use_color(Terminal())


def test_no_style_leaves_a_trace_where_colour_is_off():
    style = Style(on=False)
    for paint in (style.good, style.bad, style.unsure, style.strong, style.faint, style.banner):
        assert paint("word") == "word"
    assert Style(on=True).good("") == ""


def test_the_width_without_a_terminal_is_80():
    assert width(io.StringIO()) == 80


def test_wide_characters_take_two_columns_and_combining_marks_none():
    assert cells("abc") == 3
    assert cells("字") == 2
    assert cells("e\u0301") == 1


def test_cut_text_says_that_it_was_cut():
    assert clip("abcdef", 6) == "abcdef"
    assert clip("abcdefg", 6) == "abc..."
    assert clip("字字字字", 7) == "字字..."


def test_lines_break_at_blanks_and_within_a_word_only_where_they_must():
    assert wrap("one two three", 7) == ["one two", "three"]
    assert wrap("a" * 10, 4) == ["aaaa", "aaaa", "aa"]
    assert wrap("ab " + "c" * 6, 4) == ["ab", "cccc", "cc"]
    assert wrap("", 10) == [""]


def test_more_lines_than_allowed_end_in_dots():
    assert wrap("one two three four", 5, limit=2) == ["one", "tw..."]
    assert wrap("one two", 5, limit=2) == ["one", "two"]


@given(st.text(alphabet="ab 字\u0301", max_size=80), st.integers(5, 30), st.integers(0, 4))
def test_no_line_is_longer_than_its_columns(text, columns, limit):
    lines = wrap(text, columns, limit)
    assert all(cells(line) <= columns for line in lines)
    assert len(lines) <= limit or not limit


def test_what_a_stream_cannot_encode_is_written_as_codes():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert encodable("✓ é", stream) == "\\u2713 \\xe9"
