"""What a finished self-test means, whoever asked for it."""

from agent.core.fact import Known
from agent.core.observation import Observation, TargetFacts
from agent.core.verdict import PathVerdict
from agent.loop.prove import judge_test
from agent.ports import P2PTestResult

GPUS = ("0000:01:00.0", "0000:11:00.0")
QUIET = Observation(kernel_events=Known(()))


def path(name: str, gbps: float | None = None) -> PathVerdict:
    return PathVerdict(source=GPUS[0], destination=GPUS[1], path=name, result="good", gbps=gbps)


def test_a_copy_no_faster_than_by_way_of_the_host_stays_good_and_says_so():
    result = P2PTestResult(
        (path("copy-push", 10.0), path("store", 20.0)),
        controls_ok=True,
        controls=(path("staged", 10.0),),
        seed=3,
    )
    verdict = judge_test(GPUS, result, QUIET, QUIET, 1.0)
    assert (verdict.result, verdict.seed, verdict.controls) == ("good", 3, result.controls)
    assert [p.detail.partition(";")[0] for p in verdict.paths] == ["no faster than staging", ""]


def test_cards_without_peer_access_are_not_blamed_on_the_iommu():
    unsupported = path("copy-push").model_copy(update={"result": "unsupported"})
    result = P2PTestResult((unsupported, path("copy-pull")), controls_ok=True)
    assert "no peer access" in judge_test(GPUS, result, QUIET, QUIET, 1.0).explanation
    corrupt = path("store").model_copy(update={"result": "corrupt"})
    result = P2PTestResult((unsupported, corrupt), controls_ok=True)
    assert "no peer access" not in judge_test(GPUS, result, QUIET, QUIET, 1.0).explanation


def lacking(what: str, **drivers: str) -> str:
    targets = {
        name: TargetFacts(reachable=Known(True), user_driver=Known(version))
        for name, version in drivers.items()
    }
    before = Observation(kernel_events=Known(()), targets=targets)
    result = P2PTestResult((), controls_ok=False, control_detail="libcuda.so.1 is not usable", lacks=what)
    verdict = judge_test(GPUS, result, before, before, 1.0)
    assert (verdict.result, verdict.controls_ok) == ("not-run", False)
    return verdict.control_detail


def test_where_only_a_target_has_the_library_that_is_said():
    said = lacking("libcuda", **{"lxc:129": "590.48.01"})
    assert said == (
        "libcuda.so.1 is not usable; it is in lxc:129 (driver 590.48.01) only, and the test runs on the host"
    )


def test_a_library_that_is_nowhere_and_bindings_that_lack_need_no_such_word():
    assert lacking("libcuda", host="590.48.01") == "libcuda.so.1 is not usable"
    assert lacking("cuda-bindings", **{"lxc:129": "590.48.01"}) == "libcuda.so.1 is not usable"
