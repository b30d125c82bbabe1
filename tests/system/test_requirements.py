"""What is missing is a skip with its reason on a developer's machine, and a failure in CI."""

import pytest

from tests.system.requirements import CI, need, need_programs


def test_what_is_there_is_no_matter_of_skipping(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "1"):
        monkeypatch.setenv(CI, value)
        need("something", "never said")
        need_programs(sh="dash")


def test_what_is_missing_skips_the_test_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CI, raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs no-such-program: apt-get install nothing"):
        need_programs(no_such_program="nothing")


def test_what_is_missing_fails_the_test_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CI, "1")
    with pytest.raises(pytest.fail.Exception, match="needs a moon"):
        need(condition=False, reason="needs a moon")
