"""Which files an engine's memory of P2P is in, and when it contradicts the decision."""

from collections.abc import Mapping

import pytest

from agent.core.p2p_cache import cache_files, contradicts
from agent.core.revision import Revision

UUIDS = ("GPU-aa", "GPU-bb")
NAME = "/root/.cache/sglang/gpu_p2p_access_cache_for_{}.json"


def revision(env: Mapping[str, str], count: int = 2) -> Revision:
    gpus = tuple(f"0000:{n:02x}:00.0" for n in range(count))
    return Revision(
        service="qwen", target="host", unit="q.service", port=1, gpus=gpus, p2p=True, argv=("x",),
        env=dict(env), files={},
    )  # fmt: skip


def test_both_the_rendered_name_and_that_of_a_start_by_indices_are_looked_for():
    files = cache_files(revision({"CUDA_VISIBLE_DEVICES": ",".join(UUIDS)}))
    assert files == (NAME.format("GPU-aa,GPU-bb"), NAME.format("0,1"))


def test_the_folder_follows_the_environment_that_the_service_gets():
    assert cache_files(revision({"HOME": "/srv/llm/"})) == (
        "/srv/llm/.cache/sglang/gpu_p2p_access_cache_for_0,1.json",
    )
    assert cache_files(revision({"SGLANG_CACHE_DIR": "/c"})) == ("/c/gpu_p2p_access_cache_for_0,1.json",)


def test_nothing_outside_an_absolute_folder_is_ever_named():
    assert cache_files(revision({"SGLANG_CACHE_DIR": "cache"})) == ()
    shown = {"CUDA_VISIBLE_DEVICES": "../../etc/x"}
    assert cache_files(revision(shown)) == (NAME.format("0,1"),)


def test_a_name_that_no_file_can_have_is_not_asked_for():
    long = ",".join(f"GPU-{n:036d}" for n in range(8))
    assert cache_files(revision({"CUDA_VISIBLE_DEVICES": long}, 8)) == (NAME.format("0,1,2,3,4,5,6,7"),)


@pytest.mark.parametrize(
    ("text", "with_on", "with_off"),
    [
        ('{"0->0": true, "0->1": true, "1->0": true}', False, True),
        ('{"0->0": true, "0->1": false, "1->0": false}', True, False),
        ('{"0->1": true, "1->0": false}', True, True),
        ('{"0->1": 1}', True, True),
        ('{"0->0": true}', False, False),
        ("{", True, True),
        ("[]", True, True),
        ("", True, True),
    ],
)
def test_a_file_contradicts_unless_it_says_of_each_two_gpus_what_was_decided(
    text: str, with_on: bool, with_off: bool
):
    assert (contradicts(text, p2p=True), contradicts(text, p2p=False)) == (with_on, with_off)
