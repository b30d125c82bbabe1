"""Speeds beside right data: what they show is said, and never changes a verdict."""

from agent.core.p2p_speed import COLLAPSES, NOT_DIRECT, with_speeds
from agent.core.verdict import PathVerdict

A, B, C, D = (f"0000:{bus}1:00.0" for bus in "0123")


def path(source: str, destination: str, name: str, gbps: float | None, result: str = "good", detail: str = "") -> PathVerdict:  # fmt: skip
    return PathVerdict.model_validate(
        {
            "source": source, "destination": destination, "path": name, "result": result, "detail": detail, "gbps": gbps,
        }
    )  # fmt: skip


def details(*paths: PathVerdict, staged: float | None = None) -> list[str]:
    controls = [path(A, B, "staged", staged)] if staged else []
    judged = with_speeds(paths, controls)
    assert [p.model_copy(update={"detail": ""}) for p in judged] == [
        p.model_copy(update={"detail": ""}) for p in paths
    ]
    return [p.detail for p in judged]


def test_a_copy_as_fast_as_by_way_of_the_host_is_not_proved_direct():
    (said,) = details(path(A, B, "copy-push", 12.0), staged=11.0)
    assert said.startswith(NOT_DIRECT)
    assert "12 GB/s" in said
    assert "11 GB/s" in said
    assert details(path(A, B, "copy-pull", 24.0), staged=11.0) == [""]


def test_loads_and_stores_are_direct_however_slow():
    assert details(path(A, B, "load", 3.0), path(A, B, "store", 3.0), staged=11.0) == ["", ""]


def test_P4_a_pair_of_two_that_collapses_with_the_other_direction_is_said():
    alone, together = path(A, B, "copy-push", 24.0), path(A, B, "concurrent", 3.0)
    assert details(alone, together)[1].startswith(COLLAPSES)
    assert details(alone, path(A, B, "concurrent", 20.0)) == ["", ""]


def test_pairs_that_share_a_link_are_only_held_to_their_share_of_it():
    alone = [path(A, other, "copy-push", 24.0) for other in (B, C, D)]
    fair = [path(A, other, "concurrent", 8.0) for other in (B, C, D)]
    assert not any(details(*alone, *fair))
    slow = [path(A, B, "concurrent", 1.0), *fair[1:]]
    said = details(*alone, *slow)
    assert said[3].startswith(COLLAPSES)
    assert "its share of the link is 8, 24 GB/s alone" in said[3]
    assert not any(said[4:])


def test_wrong_data_keeps_its_own_words_and_an_unknown_speed_says_nothing():
    bad = path(A, B, "copy-push", 1.0, "corrupt", "zeros")
    assert details(bad, path(A, B, "copy-pull", None), path(A, B, "concurrent", 5.0), staged=11.0)[:2] == [
        "zeros",
        "",
    ]
