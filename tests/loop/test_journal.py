"""The journal on real files: durable, whole, bounded."""

import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from agent.loop import journal as module
from agent.loop.journal import Journal, read
from agent.loop.store import StateError
from tests.forked import fork, wait


def events(path: Path) -> list[str]:
    return [record["event"] for record in read(path)]


def written(path: Path, *names: str) -> None:
    journal = Journal(path)
    for name in names:
        journal.append(1.0, name)
    journal.close()


def test_what_was_appended_outlives_a_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"

    def work() -> None:
        Journal(path).append(12.3456, "intent", action="service/stop/qwen")
        os.kill(os.getpid(), signal.SIGKILL)

    assert wait(fork(work, tmp_path / "notes"), tmp_path / "notes") == -signal.SIGKILL
    assert list(read(path)) == [{"at": 12.346, "event": "intent", "action": "service/stop/qwen"}]


def test_it_can_be_read_by_its_owner_only(tmp_path: Path) -> None:
    written(tmp_path / "journal.jsonl", "intent")
    assert (tmp_path / "journal.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("torn", [b'{"at": 3, "ev', b"\xff\xfe", b"{}"[:1], b'{"at": 3, "event": "third"}'])
def test_a_torn_last_line_is_passed_over_and_cut_off_before_the_next_record(
    tmp_path: Path, torn: bytes
) -> None:
    path = tmp_path / "journal.jsonl"
    written(path, "first", "second")
    with path.open("ab") as file:
        file.write(torn)
    journal = Journal(path)
    assert [r["event"] for r in journal.tail(10)] == ["first", "second"]
    journal.append(4.0, "fourth")
    journal.close()
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == [
        "first",
        "second",
        "fourth",
    ]


def test_a_file_that_is_nothing_but_a_torn_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"at": 1, "event": "inte')
    written(path, "first")
    assert events(path) == ["first"]


def test_lines_that_are_no_records_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'\n[1]\n"text"\nnull\n\x00\xff\n{"at": 1.0, "event": "note"}\n')
    assert events(path) == ["note"]


def test_a_journal_that_does_not_exist_has_no_records(tmp_path: Path) -> None:
    assert list(read(tmp_path / "journal.jsonl")) == []


def test_past_its_bound_it_goes_on_in_a_new_file_and_one_old_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 200)
    path, older = tmp_path / "journal.jsonl", tmp_path / "journal.jsonl.1"
    journal = Journal(path)
    for number in range(100):
        journal.append(float(number), "note", number=number)
        assert path.stat().st_size < 300
    numbers = [r["number"] for file in (older, path) for r in read(file)]
    assert numbers == list(range(numbers[0], 100))
    assert [r["number"] for r in journal.tail(12)] == list(range(88, 100))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["journal.jsonl", "journal.jsonl.1"]
    journal.close()


def test_a_journal_that_could_not_be_renewed_goes_on_when_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    path, older = tmp_path / "journal.jsonl", tmp_path / "journal.jsonl.1"
    journal = Journal(path)
    journal.append(1.0, "first", text="x" * 100)
    older.mkdir()
    for _ in range(2):
        with pytest.raises(StateError, match=r"journal\.jsonl cannot be written"):
            journal.append(2.0, "second")
    older.rmdir()
    journal.append(3.0, "third")
    journal.close()
    assert (events(older), events(path)) == (["first"], ["third"])


def test_a_journal_whose_new_file_could_not_be_opened_goes_on_when_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    path = tmp_path / "journal.jsonl"

    def work() -> None:
        journal = Journal(path)
        journal.append(1.0, "first", text="x" * 100)
        usual = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, usual[1]))
        with pytest.raises(StateError, match="Too many open files"):
            journal.append(2.0, "second")
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        journal.append(3.0, "third")

    assert wait(fork(work, tmp_path / "notes"), tmp_path / "notes") == 0
    assert (events(tmp_path / "journal.jsonl.1"), events(path)) == (["first"], ["third"])


def test_the_tail_is_there_again_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    written(path, *(f"event-{n}" for n in range(50)))
    journal = Journal(path)
    assert [r["event"] for r in journal.tail(3)] == ["event-47", "event-48", "event-49"]
    journal.close()


def test_a_full_disk_costs_the_record_that_did_not_fit_and_no_other(tmp_path: Path) -> None:
    path, seen = tmp_path / "journal.jsonl", tmp_path / "seen"

    def work() -> None:
        journal = Journal(path)
        journal.append(1.0, "first")
        limit_files_to(path.stat().st_size + 20)
        with pytest.raises(StateError, match=r"journal\.jsonl cannot be written: File too large"):
            journal.append(2.0, "second", text="x" * 100)
        limit_files_to(resource.RLIM_INFINITY)
        journal.append(3.0, "third")
        seen.write_text(",".join(r["event"] for r in journal.tail(10)))

    wait(fork(work, tmp_path / "notes"), tmp_path / "notes")
    assert events(path) == ["first", "third"]
    assert seen.read_text() == "first,third"


def limit_files_to(size: int) -> None:
    """Writes beyond that many bytes of a file are cut short, then fail: what a disk does that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_values_that_json_does_not_know_are_written_in_words(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    value: Any = Path("/models")
    journal.append(1.0, "note", path=value, text="grün")
    journal.close()
    (record,) = read(tmp_path / "journal.jsonl")
    assert record["path"] == "/models"
    assert record["text"] == "grün"
