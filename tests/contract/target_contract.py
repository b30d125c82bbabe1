"""What every place where services run owes its callers, written down once: about files, and about units.

A test module inherits these classes and says by its fixtures ``target`` and ``place`` where they are held up.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from agent.core.observation import Unit
from agent.core.render import quote
from agent.ports import TargetPort
from agent.sim.unitfile import environment_file

FOLDER = "/t/target-contract"
FILE = f"{FOLDER}/a 'file'"
PATIENCE = 60.0  # real seconds for a state that does come
NO_UNIT = "no-such-unit.service"
# A real process of this takes any words, and an ended sleep ends nothing.
PROGRAM = "/bin/sh -c 'while :; do sleep 1000; done'"
UNIT_FILE = f"[Service]\nExecStart={PROGRAM}\n[Install]\nWantedBy=multi-user.target\n"
WORDS = ("a b", "$HOME", "${HOME}", "$$", "100%n", 'a"b', "it's", "back\\slash\\", "ünïcode ✓", "", ";", "*")


@dataclass(frozen=True)
class Place:
    """A target, and the name of a unit in it that is as ``UNIT_FILE`` says, enabled, and does not run."""

    target: TargetPort
    unit: str

    @property
    def drop_in(self) -> str:
        return f"/etc/systemd/system/{self.unit}.d/50-contract.conf"

    async def until(self, holds: Callable[[Unit], bool]) -> Unit:
        """The unit as soon as it is so."""
        end = asyncio.get_running_loop().time() + PATIENCE
        while not holds(unit := await self.target.unit(self.unit)):
            assert asyncio.get_running_loop().time() < end, f"waited {PATIENCE:g} s and last saw {unit}"
            await asyncio.sleep(0.02)
        return unit

    async def started(self) -> Unit:
        await self.target.start_unit(self.unit)
        return await self.until(lambda unit: unit.active_state == "active" and unit.main_pid > 0)

    async def stopped(self) -> Unit:
        await self.target.stop_unit(self.unit)
        return await self.until(lambda unit: unit.active_state in {"inactive", "failed"})


class FilesContract:
    @pytest.mark.parametrize(
        "text",
        ["", "one line", "two\nlines\n", "\n\n", "'\"$(id)`\\\tünïcode ✓\r\n", "x" * 200_000],
        ids=["nothing", "one line", "two lines", "empty lines", "nasty", "long"],
    )
    async def test_a_file_reads_back_as_it_was_written(self, target: TargetPort, text: str) -> None:
        assert await target.read_file(FILE) is None
        assert not await target.exists(FILE)
        await target.write_file(FILE, "something before")
        await target.write_file(FILE, text)
        assert await target.read_file(FILE) == text
        assert await target.exists(FILE)
        assert await target.exists(FOLDER)
        await target.remove_file(FILE)
        await target.remove_file(FILE)
        assert await target.read_file(FILE) is None
        assert not await target.exists(FILE)

    @pytest.mark.parametrize("ending", ["", "\n", "\r\n", "\n\n"])
    async def test_a_secret_is_the_one_line_of_its_file(self, target: TargetPort, ending: str) -> None:
        await target.write_file(FILE, f"s3cret-value {ending}")
        await target.install_secrets(f"{FOLDER}/s.env", {"TOKEN": FILE, "OTHER": FILE})
        text = await target.read_file(f"{FOLDER}/s.env")
        assert text is not None
        assert text.count("\n") == 2
        read = {name: value.rstrip(" ") for name, value in environment_file(text).items()}
        assert read == {"TOKEN": "s3cret-value", "OTHER": "s3cret-value"}

    async def test_secrets_are_installed_all_or_none(self, target: TargetPort) -> None:
        await target.write_file(FILE, "two\nlines\n")
        await target.write_file(f"{FOLDER}/good", "good")
        for bad in (FILE, "/nowhere/token"):
            with pytest.raises(OSError):
                await target.install_secrets(f"{FOLDER}/s.env", {"GOOD": f"{FOLDER}/good", "BAD": bad})
            assert not await target.exists(f"{FOLDER}/s.env")


class UnitsContract:
    async def test_a_unit_that_does_not_exist_is_said_to_be_not_found_and_cannot_be_started(
        self, place: Place
    ) -> None:
        unit = await place.target.unit(NO_UNIT)
        assert (unit.load_state, unit.active_state, unit.main_pid) == ("not-found", "inactive", 0)
        for verb in (place.target.start_unit, place.target.stop_unit):
            with pytest.raises(OSError):
                await verb(NO_UNIT)

    async def test_what_is_not_there_needs_no_kill_and_has_no_failure(self, place: Place) -> None:
        await place.target.kill_unit(NO_UNIT)
        await place.target.reset_failed(NO_UNIT)
        await place.target.kill_unit(place.unit)
        await place.target.reset_failed(place.unit)
        assert (await place.target.unit(place.unit)).active_state == "inactive"

    async def test_a_unit_starts_and_stops_and_says_so(self, place: Place) -> None:
        before = await place.target.unit(place.unit)
        assert (before.name, before.load_state, before.active_state) == (place.unit, "loaded", "inactive")
        unit = await place.started()
        assert (unit.sub_state, unit.result, unit.needs_reload) == ("running", "success", False)
        assert unit.pids
        await place.target.start_unit(place.unit)  # once more does no harm
        assert (await place.target.unit(place.unit)).main_pid == unit.main_pid
        await place.stopped()
        stopped = await place.until(lambda unit: not unit.pids)
        assert stopped.main_pid == 0
        await place.target.stop_unit(place.unit)
        await place.target.reset_failed(place.unit)
        assert (await place.target.unit(place.unit)).active_state == "inactive"

    async def test_a_unit_that_was_killed_has_failed_until_that_is_forgotten(self, place: Place) -> None:
        await place.started()
        await place.target.kill_unit(place.unit)
        failed = await place.until(lambda unit: unit.active_state == "failed" and not unit.pids)
        assert (failed.main_pid, failed.result, failed.exit_status) == (0, "signal", 9)
        await place.target.reset_failed(place.unit)
        forgotten = await place.target.unit(place.unit)
        assert (forgotten.active_state, forgotten.sub_state, forgotten.result) == (
            "inactive",
            "dead",
            "success",
        )

    async def test_a_changed_unit_file_needs_a_reload_until_there_was_one(self, place: Place) -> None:
        assert not (await place.target.unit(place.unit)).needs_reload
        await place.started()
        for text in ("[Service]\nEnvironment=A=1\n", "[Service]\nEnvironment=A=2\n"):
            await place.target.write_file(place.drop_in, text)
            assert (await place.target.unit(place.unit)).needs_reload
            await place.target.daemon_reload()
            assert not (await place.target.unit(place.unit)).needs_reload
        await place.target.remove_file(place.drop_in)
        assert (await place.target.unit(place.unit)).needs_reload

    async def test_a_reload_changes_nothing_of_what_runs(self, place: Place) -> None:
        before = await place.started()
        process = await place.target.process(before.main_pid)
        await place.target.write_file(place.drop_in, "[Service]\nEnvironment=A=1\n")
        await place.target.daemon_reload()
        assert (await place.target.unit(place.unit)).main_pid == before.main_pid
        assert await place.target.process(before.main_pid) == process

    async def test_S12_words_and_variables_of_a_drop_in_reach_the_process_exactly(self, place: Place) -> None:
        variables = {f"V{number}": word for number, word in enumerate(WORDS)}
        words = " ".join(quote(word, executed=True) for word in WORDS)
        lines = [f"Environment={quote(f'{name}={value}')}" for name, value in variables.items()]
        # Active only once the program itself runs: before, the process has systemd's own words.
        text = "\n".join(["[Service]", "Type=exec", *lines, "ExecStart=", f"ExecStart={PROGRAM} {words}", ""])
        await place.target.write_file(place.drop_in, text)
        await place.target.daemon_reload()
        unit = await place.started()
        process = await place.target.process(unit.main_pid)
        assert process is not None
        assert process.argv == ("/bin/sh", "-c", "while :; do sleep 1000; done", *WORDS)
        assert {name: process.env.get(name) for name in variables} == variables
        await place.stopped()
        assert await place.target.process(unit.main_pid) is None

    async def test_a_drop_in_that_leaves_nothing_to_run_is_a_bad_setting_and_cannot_be_started_again(
        self, place: Place
    ) -> None:
        before = await place.started()
        await place.target.write_file(place.drop_in, "[Service]\nExecStart=\n")
        await place.target.daemon_reload()
        unit = await place.target.unit(place.unit)
        assert (unit.load_state, unit.active_state, unit.main_pid) == (
            "bad-setting", "active", before.main_pid,
        )  # fmt: skip
        await place.stopped()
        with pytest.raises(OSError):
            await place.target.start_unit(place.unit)
        await place.target.stop_unit(place.unit)  # that it does not run is what was asked for
        assert (await place.target.unit(place.unit)).load_state == "bad-setting"

    async def test_what_runs_can_be_stopped_also_without_its_unit_file(self, place: Place) -> None:
        before = await place.started()
        await place.target.remove_file(f"/etc/systemd/system/{place.unit}")
        await place.target.daemon_reload()
        unit = await place.target.unit(place.unit)
        assert (unit.load_state, unit.active_state, unit.main_pid) == ("not-found", "active", before.main_pid)
        await place.stopped()
        assert (await place.target.unit(place.unit)).main_pid == 0
        with pytest.raises(OSError):
            await place.target.start_unit(place.unit)
