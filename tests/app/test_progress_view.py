import io
from dataclasses import dataclass

import pytest

from agent.app.progress_view import ProgressPrinter

A, B = "0000:01:00.0", "0000:11:00.0"


class Utf8(io.StringIO):
    encoding = "utf-8"


class Terminal(Utf8):
    def isatty(self) -> bool:
        return True


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    return Clock()


def screen(written: str) -> list[str]:
    """What a terminal shows of it: a carriage return goes back to the first column of the line."""
    lines = []
    for line in written.split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


def trial(printer: ProgressPrinter, clock: Clock) -> None:
    """What a trial says, as the loop says it."""
    printer.activity("qwen: ready")
    clock.now += 41
    printer.activity("qwen: benchmark")
    for done in range(1, 13):
        clock.now += 1
        printer.activity(f"qwen: benchmark C=1 {done}/12")
    printer.activity("qwen: benchmark C=1 108.3 tok/s")
    for done in range(1, 97):
        clock.now += 0.5
        printer.activity(f"qwen: benchmark C=16 {done}/96")
    printer.activity("")
    printer.done("qwen: revision 3f2a9c0d1e2b promoted.")


def test_elsewhere_than_on_a_terminal_each_phase_is_one_line_whatever_ticks(clock):
    stream = Utf8()
    trial(ProgressPrinter(stream, False, clock), clock)
    assert stream.getvalue().split("\n") == [
        "· qwen: ready",
        "· qwen: benchmark",
        "· qwen: benchmark C=1",
        "· qwen: benchmark C=1 108.3 tok/s",
        "· qwen: benchmark C=16",
        "✓ qwen: revision 3f2a9c0d1e2b promoted.  1m41s",
        "",
    ]


def test_on_a_terminal_a_finished_phase_stays_with_its_time(clock):
    stream = Terminal()
    trial(ProgressPrinter(stream, False, clock), clock)
    assert screen(stream.getvalue()) == [
        "· qwen: ready  41s",
        "· qwen: benchmark C=1 108.3 tok/s  12s",
        "· qwen: benchmark C=16  47s",
        "✓ qwen: revision 3f2a9c0d1e2b promoted.  1m41s",
        "",
    ]


def test_on_a_terminal_a_count_is_a_bar(clock):
    stream = Terminal()
    printer = ProgressPrinter(stream, False, clock)
    printer.activity("qwen: benchmark C=16 24/96")
    assert screen(stream.getvalue()) == ["· qwen: benchmark C=16 █████░░░░░░░░░░░░░░░ 24/96  0s"]
    clock.now += 3
    printer.activity("qwen: benchmark C=16 96/96")
    assert screen(stream.getvalue()) == ["· qwen: benchmark C=16 ████████████████████ 96/96  3s"]


def test_a_count_out_of_range_breaks_nothing(clock):
    stream = Terminal()
    printer = ProgressPrinter(stream, False, clock)
    printer.activity("x 7/0")
    printer.activity("y 200/100")
    assert screen(stream.getvalue())[1] == "· y ████████████████████ 200/100  0s"


def test_a_sign_of_life_moves_the_time_on(clock):
    stream = Terminal()
    printer = ProgressPrinter(stream, False, clock)
    printer.activity("")
    assert stream.getvalue() == ""
    printer.activity("qwen: ready")
    clock.now += 75
    printer.activity("")
    assert screen(stream.getvalue()) == ["· qwen: ready  1m15s"]


def test_the_pairs_of_a_self_test_are_one_phase(clock):
    log, terminal = Utf8(), Terminal()
    for stream in (log, terminal):
        printer = ProgressPrinter(stream, False, clock)
        for path in ("store", "load"):
            clock.now += 1
            printer.activity(f"P2P self-test: {A} -> {B} {path} corrupt")
        printer.fail("P2P self-test: 1 of 2 ordered pairs corrupt")
    assert log.getvalue().split("\n")[:2] == [
        "· P2P self-test",
        "✗ P2P self-test: 1 of 2 ordered pairs corrupt  2s",
    ]
    assert screen(terminal.getvalue())[0] == f"· P2P self-test: {A} -> {B} load corrupt  1s"


def test_an_action_on_two_functions_is_not_taken_for_a_pair(clock):
    stream = Utf8()
    text = f"bind {A} nvidia -> vfio-pci"
    ProgressPrinter(stream, False, clock).activity(text)
    assert stream.getvalue() == f"· {text}\n"


def test_the_same_phase_is_not_redrawn_for_every_tick(clock):
    stream = Terminal()
    printer = ProgressPrinter(stream, False, clock)
    for done in range(1000):
        clock.now += 0.001
        printer.activity(f"qwen: benchmark C=1 {done}/1000")
    assert stream.getvalue().count("\r") <= 25


def test_a_live_line_stays_within_the_terminal_and_leaves_no_rest(clock):
    stream = Terminal()
    printer = ProgressPrinter(stream, False, clock)
    printer.activity("字" * 200)
    assert max(len(part.encode("utf-16-le")) for part in stream.getvalue().split("\r")) <= 160
    printer.step("short")
    assert screen(stream.getvalue())[-2:] == ["· short", ""]


def test_a_stream_that_is_not_utf8_gets_plain_marks(clock):
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding="ascii", newline="\n")
    printer = ProgressPrinter(stream, False, clock)
    printer.step("step é")
    printer.done("done")
    printer.fail("failed")
    assert buffer.getvalue().decode() == "- step \\xe9\nok done  0s\nFAILED failed  0s\n"


def test_nothing_said_by_others_can_move_the_cursor(clock):
    stream = Utf8()
    printer = ProgressPrinter(stream, False, clock)
    for say in (printer.step, printer.activity, printer.done, printer.fail):
        say("\x1b[2J\r\nREADY\x9b")
    assert all(line.isprintable() for line in stream.getvalue().split("\n"))
    assert len(stream.getvalue().split("\n")) == 5


def test_colour_is_used_where_it_was_asked_for_only(clock):
    plain, painted = Terminal(), Terminal()
    trial(ProgressPrinter(plain, False, clock), clock)
    trial(ProgressPrinter(painted, True, clock), clock)
    assert "\x1b" not in plain.getvalue()
    assert "\x1b[32m✓\x1b[0m" in painted.getvalue()
