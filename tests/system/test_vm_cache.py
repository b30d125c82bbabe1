"""What the kernel ring keeps between runs."""

import os
import time
from pathlib import Path

import pytest

from tests.system.vm.cache import cached, folder, key_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def fill(made: Path) -> None:
    (made / "content").write_text("x")


def test_what_is_there_is_not_built_again():
    first = cached("thing", "1", fill)
    assert cached("thing", "1", lambda _made: pytest.fail("built again")) == first
    assert (first / "content").read_text() == "x"


def test_a_build_that_fails_leaves_nothing_that_would_be_used():
    def fail(made: Path) -> None:
        fill(made)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        cached("thing", "1", fail)
    assert [path.name for path in folder().iterdir()] == ["thing.lock"]
    assert (cached("thing", "1", fill) / "content").exists()


def test_the_scratch_folder_of_a_killed_build_and_what_nobody_uses_are_removed_by_the_next_build():
    old = cached("thing", "old", fill)
    long_ago = time.time() - 60 * 24 * 3600
    os.utime(old, (long_ago, long_ago))
    (folder() / ".thing-killed").mkdir()
    other = cached("other", "1", fill)
    new = cached("thing", "new", fill)
    assert {path for path in folder().iterdir() if path.is_dir()} == {new, other}


def test_a_key_changes_with_the_content_and_the_mode_of_a_file(tmp_path):
    file = tmp_path / "script"
    file.write_text("one")
    keys = {key_of("a", files=[file])}
    file.write_text("two")
    keys.add(key_of("a", files=[file]))
    file.chmod(0o755)
    keys.add(key_of("a", files=[file]))
    assert len(keys) == 3
