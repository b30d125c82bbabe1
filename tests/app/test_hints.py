import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from agent.app import hints
from agent.app.daemon import watched_units
from agent.app.hints import follow_hints
from agent.core.spec_load import load
from tests.rig import recipe


async def run_for(sources, seconds: float) -> tuple[list[str], list[dict[str, Any]]]:
    fired: list[str] = []
    said: list[dict[str, Any]] = []

    def log(_text: str, **fields: Any) -> None:
        said.append(fields)

    task = asyncio.create_task(follow_hints(sources, fired.append, log))
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return fired, said


async def test_a_storm_of_hints_is_few_passes_and_one_hint_is_one(monkeypatch):
    for name, seconds in (("TOGETHER", 0.01), ("STORM", 60.0), ("CALM", 120.0)):
        monkeypatch.setattr(hints, name, seconds)

    async def storm() -> AsyncGenerator[None, None]:
        while True:
            yield

    async def one() -> AsyncGenerator[None, None]:
        yield
        await asyncio.Event().wait()

    assert (await run_for({"uevent": one}, 0.3))[0] == ["uevent"]
    fired, _ = await run_for({"uevent": storm, "unit changed": storm}, 0.5)
    assert len(fired) == hints.FAST
    assert set(fired) <= {"uevent", "unit changed"}


async def test_after_a_calm_the_next_hint_is_soon_again(monkeypatch):
    for name, seconds in (("TOGETHER", 0.01), ("STORM", 60.0), ("CALM", 0.0)):
        monkeypatch.setattr(hints, name, seconds)

    async def now_and_then() -> AsyncGenerator[None, None]:
        for _ in range(hints.FAST + 3):
            yield
        await asyncio.Event().wait()

    assert len((await run_for({"uevent": now_and_then}, 1.0))[0]) == hints.FAST + 3


async def test_a_source_that_breaks_is_said_once_and_opened_again(monkeypatch):
    for name, seconds in (("TOGETHER", 0.0), ("RETRY", 0.01)):
        monkeypatch.setattr(hints, name, seconds)
    opened = 0

    async def broken() -> AsyncGenerator[None, None]:
        nonlocal opened
        opened += 1
        if opened > 2:
            yield
            await asyncio.Event().wait()
        raise ConnectionRefusedError("nobody there")

    fired, said = await run_for({"unit changed": broken}, 0.5)
    assert opened == 3
    assert fired == ["unit changed"]
    assert said == [{"hints": "unit changed", "error": "nobody there"}]


async def test_a_mistake_in_one_source_ends_neither_it_nor_the_others(monkeypatch):
    for name, seconds in (("TOGETHER", 0.0), ("RETRY", 0.01)):
        monkeypatch.setattr(hints, name, seconds)
    opened = 0

    async def mistaken() -> AsyncGenerator[None, None]:
        nonlocal opened
        opened += 1
        if opened > 1:
            yield
            await asyncio.Event().wait()
        raise KeyError("path")

    async def other() -> AsyncGenerator[None, None]:
        await asyncio.sleep(0.1)
        yield
        await asyncio.Event().wait()

    fired, said = await run_for({"unit changed": mistaken, "uevent": other}, 0.5)
    assert fired == ["unit changed", "uevent"]
    assert said == [{"hints": "unit changed", "error": "KeyError('path')"}]


def test_the_units_on_this_host_that_the_spec_names_are_watched():
    spec = load(
        recipe(
            policy={"quiesce": ["nvidia-persistenced.service"]},
            services={"qwen": {"target": "host", "unit": "sglang-qwen.service"}},
        ),
        "spec",
    ).spec
    assert watched_units(spec) == {"sglang-qwen.service", "nvidia-persistenced.service"}
    elsewhere = load(recipe(policy={"quiesce": []}), "spec").spec
    assert watched_units(elsewhere) == set()
    assert watched_units(None) == set()
