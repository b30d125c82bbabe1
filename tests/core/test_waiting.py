"""What a failed action holds back, and what is said about a host whose plan is not empty."""

from agent.core.fact import Absent, Known, Unknown
from agent.core.inputs import Inputs
from agent.core.observation import Process, Silence
from agent.core.plan import Drift, Plan, Refusal
from agent.core.resolve import SILENCE, resolve
from agent.kind import conditions_all, plan_all
from agent.kinds import ALL
from tests.core import build
from tests.core.build import FIRST, NOW, made, with_memory
from tests.core.verdicts import converged


def planned(inputs: Inputs) -> set[str]:
    return {f"{a.kind}/{a.verb}" for a in plan_all(ALL, inputs).actions}


def unserved(*changes: build.Change) -> Inputs:
    """The goal but for a dead service."""
    return made(converged(), build.stopped(), build.idle(*FIRST), *changes)


def waits(*keys: str) -> build.Change:
    return with_memory(retry_after=dict.fromkeys(keys, NOW + 40))


def test_a_trial_that_waits_holds_its_preflight_and_no_setting() -> None:
    limit = build.gpu_with(FIRST[0], power_limit=Known(500))
    groups = {"inference": {**build.SPLIT["inference"], "settings": {"powerLimit": "600W"}}}
    host = build.spec(gpus={**build.SPLIT, **groups}, services=build.service())
    inputs = made(converged(host), build.stopped(), build.idle(*FIRST), limit, waits("service/trial/qwen"))
    assert planned(inputs) == {"gpu-settings/power-limit"}


def test_a_setting_that_waits_holds_nothing_but_itself() -> None:
    limit = build.gpu_with(FIRST[0], power_limit=Known(500))
    groups = {"inference": {**build.SPLIT["inference"], "settings": {"powerLimit": "600W"}}}
    host = build.spec(gpus={**build.SPLIT, **groups}, services=build.service())
    key = f"gpu-settings/power-limit/{FIRST[0]}"
    inputs = made(converged(host), build.stopped(), build.idle(*FIRST), limit, waits(key))
    assert planned(inputs) == {"service/preflight", "service/trial"}


def test_a_stop_that_waits_holds_the_self_test_which_needs_idle_gpus() -> None:
    other = build.facts(process=Known(Process(1, ("other",), {})))
    inputs = made(converged(), with_memory(verdicts=()), other)
    assert "p2p/selftest" in planned(inputs)
    assert planned(made(inputs, waits("service/stop/qwen"))) == set()


def silent(silence: Silence | None, *, refused: bool = False, asked: bool = False) -> str:
    """What a promoted service that runs needs after such a silence."""
    inputs = converged()
    health = Absent("connection refused") if refused else Unknown("no token", "NoTokens")

    inputs = made(inputs, build.facts(health=health, silence=silence))
    inputs = made(inputs, with_memory(asked=("qwen",))) if asked else inputs
    return resolve(inputs).services["qwen"].need


def test_a_silent_service_is_started_anew_only_after_several_probes_and_enough_time() -> None:
    assert silent(None) == "nothing"
    assert silent(Silence(2, 10 * SILENCE, answered=True)) == "nothing"
    assert silent(Silence(30, SILENCE - 1, answered=True)) == "nothing"
    assert silent(Silence(3, SILENCE, answered=True)) == "trial"
    assert silent(Silence(3, SILENCE, answered=False)) == "trial"


def test_a_service_that_may_still_be_loading_has_the_time_that_a_start_has() -> None:
    allowed = converged().spec.services["qwen"].gate.start_timeout
    assert allowed > SILENCE
    assert silent(Silence(9, allowed - 1, answered=False), refused=True) == "nothing"
    assert silent(Silence(9, allowed, answered=False), refused=True) == "trial"
    assert silent(Silence(9, SILENCE, answered=True), refused=True) == "trial"


def test_a_busy_server_whose_probes_only_time_out_is_left_alone_for_as_long_as_a_start_may_take() -> None:
    allowed = converged().spec.services["qwen"].gate.start_timeout
    assert silent(Silence(9, allowed - 1, answered=True, timed_out=9)) == "nothing"
    assert silent(Silence(9, allowed - 1, answered=True, timed_out=7)) == "nothing"
    assert silent(Silence(9, SILENCE, answered=True, timed_out=6)) == "trial"
    assert silent(Silence(30, allowed, answered=True, timed_out=30)) == "trial"


def test_an_operator_who_asks_need_not_wait_and_what_answers_is_left_alone() -> None:
    assert silent(Silence(1, 0.0, answered=False), asked=True) == "trial"
    assert silent(None, asked=True) == "nothing"


def said(plan: Plan, inputs: Inputs) -> list[tuple[str, str, str]]:
    found = conditions_all(ALL, inputs, resolve(inputs), plan)
    return [(c.type, c.status, c.reason) for c in found if c.type == "Converged"]


def test_what_no_kind_says_is_amiss_is_said_of_the_whole_host() -> None:
    inputs = converged()
    assert said(Plan(1), inputs) == []
    drift = Drift("platform", "host", "a file", "as rendered", "different")
    assert said(Plan(1, drifts=(drift,)), inputs) == [("Converged", "False", "Converging")]
    unread = Refusal("platform", "host", "RulesUnknown", "it cannot be read")
    failed = Refusal("platform", "host", "Backoff", "it cannot be written")
    assert said(Plan(1, drifts=(drift,), refusals=(unread,)), inputs) == [
        ("Converged", "Unknown", "RulesUnknown")
    ]
    assert said(Plan(1, refusals=(unread, failed)), inputs) == [("Converged", "False", "Backoff")]
