"""Triggers carry no data: however many come, one pass follows."""

from agent.loop.run import Triggers


async def test_many_reasons_are_one_pass_named_after_the_first() -> None:
    triggers = Triggers()
    for reason in ("file changed", "SIGHUP", "health changed"):
        triggers.fire(reason)
    assert await triggers.wait(60.0) == "file changed"
    assert await triggers.wait(0.0) == "resync"


async def test_without_a_reason_time_is_the_reason() -> None:
    assert await Triggers().wait(0.001) == "resync"


async def test_a_reason_that_comes_while_a_pass_runs_asks_for_another_one() -> None:
    triggers = Triggers()
    triggers.fire("file changed")
    assert await triggers.wait(60.0) == "file changed"
    triggers.fire("health changed")
    assert await triggers.wait(60.0) == "health changed"
