import fcntl
import json
import os

import pytest

from agent.app import status_file
from agent.app.status_view import StatusError, is_alive, read_status
from agent.core.status import STATUS_VERSION, Status
from agent.host.lockfile import InstanceLock
from tests.app import documents


def test_the_version_that_the_reader_knows_is_the_one_that_is_written():
    assert status_file.KNOWN_VERSION == STATUS_VERSION


def test_a_published_status_is_read_back_as_it_is(tmp_path):
    path = tmp_path / "status.json"
    path.write_text(documents.ready().model_dump_json())
    assert Status.model_validate(read_status(path)) == documents.ready()


def test_a_missing_status_says_that_the_agent_has_not_run(tmp_path):
    with pytest.raises(
        StatusError, match=r"status\.json: there is no status: the agent has not run here.*agent run"
    ):
        read_status(tmp_path / "status.json")


def test_a_status_that_cannot_be_read_says_why(tmp_path):
    with pytest.raises(StatusError, match=r"cannot be read: Is a directory"):
        read_status(tmp_path)


@pytest.mark.parametrize("text", ["", "{", '{"version": 1', "\x00\x01", "[" * 100_000])
def test_a_status_that_is_not_json_says_so_and_what_to_do(tmp_path, text):
    path = tmp_path / "status.json"
    path.write_text(text)
    with pytest.raises(StatusError, match=r"this is not JSON .*systemctl status"):
        read_status(path)


@pytest.mark.parametrize("text", ["[]", "1", "null", '"version"', "{}"])
def test_json_that_is_no_status_is_refused(tmp_path, text):
    path = tmp_path / "status.json"
    path.write_text(text)
    with pytest.raises(
        StatusError, match=r'not a status of the agent: expected a JSON object with "version"'
    ):
        read_status(path)


@pytest.mark.parametrize("version", [2, "1", None, "\x1b[2J"])
def test_a_status_of_another_version_is_not_guessed_at(tmp_path, version):
    path = tmp_path / "status.json"
    path.write_text(json.dumps({"version": version}))
    with pytest.raises(
        StatusError, match=r"reads version 1: the daemon and this command are of different"
    ) as caught:
        read_status(path)
    assert str(caught.value).isprintable()


def test_a_name_of_a_file_cannot_move_the_cursor(tmp_path):
    with pytest.raises(StatusError) as caught:
        read_status(tmp_path / "\x1b[2J")
    assert str(caught.value).isprintable()


def test_a_daemon_that_holds_its_lock_is_alive_until_it_lets_go(tmp_path):
    lock = InstanceLock(tmp_path / "lock")
    assert not is_alive(tmp_path / "lock")
    with lock:
        assert is_alive(tmp_path / "lock")
    assert not is_alive(tmp_path / "lock")


def test_looking_keeps_no_daemon_from_starting_and_two_readers_do_not_see_each_other(tmp_path):
    path = tmp_path / "lock"
    path.touch()
    reader = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(reader, fcntl.LOCK_SH)
        assert not is_alive(path)
    finally:
        os.close(reader)
    assert not is_alive(path)
    with InstanceLock(path):
        assert is_alive(path)


def test_where_the_lock_may_not_be_opened_the_pid_decides(tmp_path, monkeypatch):
    def refused(*_args: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", refused)
    assert is_alive(tmp_path / "lock", pid=os.getpid())
    assert not is_alive(tmp_path / "lock", pid=2**22 + 1)  # above the kernel's largest pid
    assert not is_alive(tmp_path / "lock")
