"""The state directory on real files: memory whole or as before, requests in order."""

import os
import resource
import signal
from pathlib import Path

import pytest

from agent.core.memory import Memory, Quarantine
from agent.loop.store import StateError, Store, leave_request, remove_leftovers, write_atomic
from tests.forked import fork, wait


def stuck(address: str) -> Quarantine:
    return Quarantine(address=address, reason="UnbindStuck", message="it did not return", boot_id="b", at=1.0)


def test_memory_is_there_again_after_a_restart(tmp_path: Path) -> None:
    Store(tmp_path).update(generation=7, quarantine={"0000:81:00.0": stuck("0000:81:00.0")})
    again = Store(tmp_path)
    assert again.memory.generation == 7
    assert again.memory.quarantine["0000:81:00.0"].reason == "UnbindStuck"
    assert again.problem == ""


def test_killed_while_it_saves_memory_is_one_of_the_saved_ones_and_never_half(tmp_path: Path) -> None:
    def work() -> None:
        store, number = Store(tmp_path), 0
        while True:
            number += 1
            store.update(generation=number, stopped_units={f"{n}.service": "x" * 100 for n in range(100)})

    for _ in range(5):
        before = Store(tmp_path).memory.generation
        pid = fork(work, tmp_path / "notes")
        while Store(tmp_path).memory.generation == before:
            os.sched_yield()
        os.kill(pid, signal.SIGKILL)
        assert wait(pid, tmp_path / "notes") == -signal.SIGKILL
        after = Store(tmp_path)
        assert after.problem == ""
        assert len(after.memory.stopped_units) == 100
        after.update(generation=0)


def test_an_unreadable_memory_is_kept_aside_and_the_one_before_it_used(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.update(generation=1)
    store.update(generation=2)
    (tmp_path / "memory.json").write_text('{"generation": 2, "unheard_of": true}')
    again = Store(tmp_path)
    assert again.memory.generation == 1
    assert "memory.json could not be read" in again.problem
    assert "the state before its last change is used" in again.problem
    assert "unheard_of" in (tmp_path / "memory.json.unreadable").read_text()


def test_the_memory_before_it_survives_until_another_has_been_saved(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.update(generation=1)
    store.update(generation=2)
    (tmp_path / "memory.json").write_text("{")
    for _ in range(3):  # restarts that save nothing
        assert Store(tmp_path).memory.generation == 1
    Store(tmp_path).update(generation=3)
    assert Store(tmp_path).memory.generation == 3
    assert Memory.model_validate_json((tmp_path / "memory.json.old").read_bytes()).generation == 1


def test_two_unreadable_memories_are_both_kept_and_the_loss_is_said(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.update(generation=1)
    store.update(generation=2)
    (tmp_path / "memory.json").write_bytes(b"\xff")
    (tmp_path / "memory.json.old").write_text("[]")
    again = Store(tmp_path)
    assert again.memory == Memory()
    assert "begins anew" in again.problem
    assert {p.name for p in tmp_path.iterdir()} >= {"memory.json.unreadable", "memory.json.old.unreadable"}


def test_an_unchanged_memory_is_not_written_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.update(generation=1)
    before = (tmp_path / "memory.json").stat()
    store.update(generation=1)
    after = (tmp_path / "memory.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_the_state_can_be_read_by_its_owner_only(tmp_path: Path) -> None:
    Store(tmp_path / "state").update(generation=1)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "state/memory.json").stat().st_mode & 0o777 == 0o600


def test_on_a_full_disk_the_old_file_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match="too large"):
            write_atomic(path, b"x" * 100)

    wait(fork(work, tmp_path / "n"), tmp_path / "n")
    assert path.read_bytes() == b"old"


def test_a_memory_that_does_not_fit_says_which_file_and_what_to_do_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    Store(state).update(generation=1)

    def work() -> None:
        store = Store(state)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
        with pytest.raises(StateError, match=r"memory\.json cannot be written: File too large") as failed:
            store.update(generation=2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert f"df -h {state}" in failed.value.next_step
        assert store.memory.generation == 1
        assert sorted(p.name for p in state.iterdir()) == ["memory.json", "memory.json.old"]
        store.update(generation=3)

    assert wait(fork(work, tmp_path / "n"), tmp_path / "n") == 0
    assert Store(state).memory.generation == 3


def test_temporary_files_of_a_killed_agent_are_removed_and_nothing_else(tmp_path: Path) -> None:
    kept = ["memory.json", "memory.json.old", "lock", ".hidden", "journal.jsonl.1", ".note.txt"]
    for name in [*kept, ".memory.json.4711", ".memory.json.old.4711", ".spec.staged.yaml.1"]:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(kept)


def test_requests_are_taken_oldest_first_and_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for number, (verb, argument) in enumerate([("retry", "qwen"), ("approve", "aaaa"), ("approve", "0000")]):
        leave_request(tmp_path, verb, argument)
        os.utime(store.requests / f"{verb}={argument}", ns=(number, number))
    assert list(store.take_requests()) == [("retry", "qwen"), ("approve", "aaaa"), ("approve", "0000")]
    assert list(store.take_requests()) == []


def test_law_8_a_request_outlives_a_kill_while_it_is_taken(tmp_path: Path) -> None:
    leave_request(tmp_path, "approve", "abc")

    def work() -> None:
        for _ in Store(tmp_path).take_requests():
            os.kill(os.getpid(), signal.SIGKILL)

    assert wait(fork(work, tmp_path / "n"), tmp_path / "n") == -signal.SIGKILL
    assert list(Store(tmp_path).take_requests()) == [("approve", "abc")]


def test_a_request_that_asks_for_nothing_is_dropped(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (store.requests / "approve").touch()
    assert list(store.take_requests()) == []
    assert list(store.requests.iterdir()) == []


def test_a_directory_among_the_requests_stands_in_nobodys_way(tmp_path: Path) -> None:
    store = Store(tmp_path)
    (store.requests / "retry=lost+found").mkdir()
    leave_request(tmp_path, "retry", "qwen")
    assert list(store.take_requests()) == [("retry", "qwen")]


def test_requests_wait_for_a_daemon_that_starts_later(tmp_path: Path) -> None:
    leave_request(tmp_path / "state", "approve", "abc")
    assert list(Store(tmp_path / "state").take_requests()) == [("approve", "abc")]
