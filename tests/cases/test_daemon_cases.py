"""The daemon: what triggers it, what it tells systemd, and that nothing ends it but a person."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent.loop.run import Triggers
from tests.cases.daemons import daemon
from tests.cases.operating import TARGET, UNIT, journal, phases, qwen, recipe, rig, service, starts, unit
from tests.rig import REPOSITORY, SCENARIOS, Rig

CANDIDATE = {"max-running-requests": 64}
LONG = {
    "benchmark": {"concurrency": [1], "outputTokens": 30_000}
}  # half a second or more at the rig's compression


def save(path: Path, text: str) -> None:
    """As editors do it: a new file, renamed over the old one."""
    new = path.with_name(".spec.new")
    new.write_text(text)
    new.replace(path)


def measuring(agent: Rig) -> bool:
    trial = agent.memory.trials.get("qwen")
    return trial is not None and trial.outcome is None and trial.phase == "benchmark"


async def test_the_daemon_is_ready_once_the_host_is_bound_and_before_the_trial_has_ended(
    tmp_path: Path,
) -> None:
    async with daemon(tmp_path) as running:
        await running.until(lambda: running.reason() == "Promoted")
        at = running.told.messages.index("READY=1")
        before = running.agent.world.writes[: running.told.writes_at[at]]
        assert sum(w.startswith("pci.probe") for w in before) == 8
        assert f"target.start_unit {TARGET} {UNIT}" not in before
        assert not [m for m in running.told.messages[:at] if "promoted" in m]


async def test_the_status_line_tells_what_is_done_and_that_it_is_simulated(tmp_path: Path) -> None:
    async with daemon(tmp_path) as running:
        await running.until(lambda: running.reason() == "Promoted")
        await running.until_pass("Converged: nothing to do.")
        lines = [m for m in running.told.messages if m.startswith("STATUS=")]
        assert all(line.startswith("STATUS=SIMULATED: ") for line in lines)
        assert any("P2P self-test: 12 of 12 ordered pairs corrupt" in line for line in lines)
        assert lines[-1] == "STATUS=SIMULATED: Converged: nothing to do."
    assert running.told.messages[-2] == "STOPPING=1"
    assert running.told.messages[-1].startswith("STATUS=SIMULATED: Stopped")
    assert running.agent.status().ready == "Unknown"


async def test_sighup_is_answered_with_reloading_a_pass_and_ready(tmp_path: Path) -> None:
    async with daemon(tmp_path) as running:
        await running.until_pass("Converged: nothing to do.")
        del running.told.messages[:]
        os.kill(os.getpid(), signal.SIGHUP)
        await running.until(lambda: "READY=1" in running.told.messages)
        assert running.told.messages[0].startswith("RELOADING=1\nMONOTONIC_USEC=")
        assert any(line.startswith("pass: SIGHUP") for line in running.log)


async def test_sighup_during_a_trial_is_answered_although_the_trial_goes_on(tmp_path: Path) -> None:
    async with daemon(tmp_path, spec=recipe(**qwen(gate=LONG))) as running:
        await running.until(lambda: measuring(running.agent))
        del running.told.messages[:]
        os.kill(os.getpid(), signal.SIGHUP)
        await running.until(lambda: "READY=1" in running.told.messages)
        assert measuring(running.agent)
        await running.until(lambda: not measuring(running.agent))
        assert "benchmark ok" in phases(running.agent)


async def test_S7_a_spec_edited_during_the_benchmark_is_what_gets_promoted(tmp_path: Path) -> None:
    async with daemon(tmp_path, spec=recipe(**qwen(gate=LONG))) as running:
        agent = running.agent
        await running.until(lambda: measuring(running.agent))
        save(agent.spec, recipe(**qwen(args=CANDIDATE)))
        await running.until(lambda: "qwen" in agent.memory.promoted)
        await running.until(lambda: running.reason() == "Promoted")
        promoted = agent.memory.promoted["qwen"]
        assert promoted.generation == 2
        assert "--max-running-requests" in promoted.revision.argv
        assert agent.memory.previous == {}
        ends = [(r["outcome"], r["reason"]) for r in journal(agent) if r["event"] == "trial"]
        assert ends == [("superseded", "Superseded"), ("promoted", "Promoted")]
        assert not agent.memory.rejected


async def test_S7_a_comment_saved_during_the_benchmark_does_not_end_the_trial(tmp_path: Path) -> None:
    text = recipe(**qwen(gate=LONG))
    async with daemon(tmp_path, spec=text) as running:
        await running.until(lambda: measuring(running.agent))
        save(running.agent.spec, "# a comment\n" + text)
        await running.until(lambda: not measuring(running.agent))
        assert "benchmark ok" in phases(running.agent)
        assert running.agent.memory.generation == 1


async def test_S11_five_saves_in_a_row_end_in_one_pass_over_the_last_one(tmp_path: Path) -> None:
    async with daemon(tmp_path) as running:
        agent = running.agent
        await running.until_pass("Converged: nothing to do.")
        del running.log[:]
        for seconds in range(31, 36):
            save(agent.spec, recipe(policy={"resync": f"{seconds}s"}))
        await running.until(lambda: agent.agent.reconciler.specs.host is not None and _resync(agent) == 35)
        await running.until_pass("Converged: nothing to do.")
        await agent.host.ports.clock.sleep(0.6 * (agent.factor or 1))
        assert len([line for line in running.log if line.startswith("pass: file changed")]) <= 2
        assert _resync(agent) == 35
        assert agent.condition("SpecAccepted").status == "True"
        accepted = (agent.agent.paths.state / "spec.accepted.yaml").read_text()
        assert accepted == agent.spec.read_text()


def _resync(agent: Rig) -> float:
    host = agent.agent.reconciler.specs.host
    assert host is not None
    return host.spec.policy.resync


async def test_S11_a_deleted_spec_leaves_the_last_good_one_in_force_until_it_is_back(tmp_path: Path) -> None:
    async with daemon(tmp_path) as running:
        agent = running.agent
        await running.until_pass("Converged: nothing to do.")
        text = agent.spec.read_text()
        agent.world.writes.clear()
        agent.spec.unlink()
        await running.until(lambda: agent.condition("SpecAccepted").status == "False")
        condition = agent.condition("SpecAccepted")
        assert "generation 1 is in force" in condition.message
        assert condition.next_step
        assert service(agent).health == "ok"
        agent.spec.write_text(text)
        await running.until(lambda: agent.condition("SpecAccepted").status == "True")
        assert agent.world.writes == []
        assert agent.memory.generation == 1


async def test_S11_a_config_map_style_symlink_swap_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "etc/gpu-host-agent"
    for name, text in (("..1", recipe()), ("..2", recipe(policy={"resync": "35s"}))):
        (folder / name).mkdir(parents=True)
        (folder / name / "spec.yaml").write_text(text)
    (folder / "..data").symlink_to("..1")
    async with daemon(tmp_path) as running:
        agent = running.agent
        await running.until_pass("Converged: nothing to do.")
        agent.spec.unlink()
        agent.spec.symlink_to("..data/spec.yaml")
        await running.until(lambda: agent.condition("SpecAccepted").status == "True")
        (folder / "..new").symlink_to("..2")
        (folder / "..new").replace(folder / "..data")
        await running.until(lambda: _resync(agent) == 35)
        await running.until(lambda: agent.status().spec.generation == 2)
        assert agent.condition("SpecAccepted").status == "True"


async def test_S11_a_broken_spec_keeps_the_last_good_one_in_force_also_for_the_next_daemon(
    tmp_path: Path,
) -> None:
    broken = recipe(**qwen(args={"tensor-parallel-size": 400}, p2p="sometimes"))
    async with daemon(tmp_path) as running:
        agent = running.agent
        await running.until_pass("Converged: nothing to do.")
        save(agent.spec, broken)
        await running.until(lambda: agent.condition("SpecAccepted").status == "False")
        assert "sometimes" in agent.condition("SpecAccepted").message
        assert str(agent.spec) in agent.condition("SpecAccepted").message
        good, writes = service(agent).revision, list(agent.world.writes)
    async with rig(tmp_path, spec=broken) as agent:
        await agent.converge()
        condition = agent.condition("SpecAccepted")
        assert (condition.status, condition.reason) == ("False", "Invalid")
        assert "generation 1 is in force" in condition.message
        assert service(agent).revision == service(agent).promoted == good
        assert agent.status().ready == "False"
        assert agent.world.writes == writes


async def test_S11_the_scenario_of_saves_deletion_and_return_ends_converged(tmp_path: Path) -> None:
    async with daemon(tmp_path, scenario=SCENARIOS / "S11.yaml") as running:
        agent = running.agent
        await running.until(lambda: agent.world.state.spec_edits == 7)
        await running.until(lambda: running.reason() == "Promoted" and _resync(agent) == 35)
        await running.until(lambda: agent.condition("SpecAccepted").status == "True")
        assert agent.memory.promoted["qwen"].revision.id == service(agent).revision


async def test_S14_a_pass_that_fails_of_a_defect_ends_neither_the_loop_nor_feeds_the_watchdog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.loop.run.FAILED_PASS_PAUSE", 0.1)
    scenario = "faults: [{on: platform.read, raise: RuntimeError, times: 2}]"
    async with daemon(tmp_path, scenario=scenario) as running:
        await running.until(lambda: running.told.count("WATCHDOG=1"))
        failed = [line for line in running.log if line.startswith("pass failed")]
        assert len(failed) == 2
        assert "RuntimeError('scripted fault at platform.read')" in failed[0]
        first = running.told.messages.index("WATCHDOG=1")
        lines = [m for m in running.told.messages[:first] if "defect of the agent" in m]
        assert len(lines) == 2
        await running.until(lambda: running.reason() == "Promoted")


async def test_S14_the_scenario_of_an_unexpected_exception_ends_converged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.loop.run.FAILED_PASS_PAUSE", 0.1)
    async with daemon(tmp_path, scenario=SCENARIOS / "S14.yaml") as running:
        await running.until(lambda: running.reason() == "Promoted")
        assert any("KeyError" in line for line in running.log)


async def test_S14_a_defect_in_an_effect_is_journalled_and_does_not_feed_the_watchdog_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.loop.run.FAILED_PASS_PAUSE", 0.1)
    scenario = "faults: [{on: pci.set_override, raise: RuntimeError, times: 3}]"
    async with daemon(tmp_path, scenario=scenario) as running:
        await running.until(lambda: sum(line.startswith("pass failed") for line in running.log) == 3)
        assert running.told.count("WATCHDOG=1") == 0
        crashed = [r for r in journal(running.agent) if r.get("result") == "crashed"]
        assert len(crashed) == 3
        await running.until(lambda: running.reason() == "Promoted")
        assert running.told.count("WATCHDOG=1") > 0


async def test_S14_a_running_host_is_not_called_ready_after_a_failed_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.loop.run.FAILED_PASS_PAUSE", 30.0)
    async with daemon(tmp_path) as running:
        await running.until_pass("Converged: nothing to do.")
        fault = {"on": "platform.read", "raise": "RuntimeError", "times": 1}
        with running.agent.world.change() as state:
            state.added_faults.append(fault)
        fed = running.told.count("WATCHDOG=1")
        running.kick()
        await running.until(lambda: any(line.startswith("pass failed") for line in running.log))
        assert running.agent.status().ready == "Unknown"
        assert running.told.count("WATCHDOG=1") == fed
        running.kick()
        await running.until(lambda: running.agent.status().ready == "True")
        assert running.told.count("WATCHDOG=1") == fed + 1


async def test_a_status_file_that_cannot_be_written_ends_neither_the_trial_nor_the_daemon(
    tmp_path: Path,
) -> None:
    async with daemon(tmp_path, spec=recipe(**qwen(gate=LONG))) as running:
        await running.until(lambda: measuring(running.agent))
        path = running.agent.agent.paths.status
        path.unlink()
        path.mkdir()
        await running.until(lambda: "qwen" in running.agent.memory.promoted)
        await running.until_pass("Converged: nothing to do.")
        assert any("status.json cannot be written" in m for m in running.told.messages)
        path.rmdir()
        running.kick()
        await running.until(lambda: running.reason() == "Promoted")


async def test_a_full_disk_is_said_with_path_and_next_step_and_the_daemon_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.loop.run.FAILED_PASS_PAUSE", 0.1)
    async with daemon(tmp_path) as running:
        agent = running.agent
        await running.until_pass("Converged: nothing to do.")
        fed, full = running.told.count("WATCHDOG=1"), FullDisk(monkeypatch)
        save(agent.spec, recipe(**qwen(args=CANDIDATE)))
        await running.until(lambda: any(line.startswith("state cannot be written") for line in running.log))
        last_pass = agent.status().last_pass
        assert last_pass is not None
        assert "journal.jsonl cannot be written: No space left on device" in last_pass.sentence
        assert "df -h" in last_pass.sentence
        assert "defect" not in "".join(running.told.messages)
        assert agent.status().ready == "Unknown"
        await running.until(lambda: running.told.count("WATCHDOG=1") > fed)
        full.over()
        await running.until(lambda: agent.memory.promoted["qwen"].generation == 2)
        assert "--max-running-requests" in agent.memory.promoted["qwen"].revision.argv


class FullDisk:
    """No file of the agent's that must last can be written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._full = True
        real = os.fsync

        def fsync(fd: int) -> None:
            if self._full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(fd)

        monkeypatch.setattr("agent.loop.journal.os.fsync", fsync)

    def over(self) -> None:
        self._full = False


@pytest.mark.parametrize("watchdog", [0.0, 45.0])
async def test_a_long_resync_lets_neither_the_watchdog_bite_nor_status_grow_stale(
    tmp_path: Path, watchdog: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    async def wait(_triggers: Triggers, seconds: float) -> str:
        asked.append(seconds)
        await asyncio.sleep(0.05)
        return "resync"

    monkeypatch.setattr(Triggers, "wait", wait)
    async with daemon(tmp_path, spec=recipe(policy={"resync": "10m"})) as running:
        running.daemon.watchdog = watchdog
        await running.until(lambda: len(asked) > 1)
        fed = running.told.count("WATCHDOG=1")
        await running.until(lambda: running.told.count("WATCHDOG=1") > fed)
        stale_after = running.agent.status().stale_after
    longest = min(stale_after, watchdog or stale_after) / 3
    assert asked[-1] == longest


async def test_B1_an_unbind_that_hangs_is_waited_for_with_signs_of_life_until_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.loop.deadline.PULSE", 0.02)
    monkeypatch.setattr("agent.loop.run.ALIVE_EVERY", 0.02)
    monkeypatch.setattr("agent.kinds.rebind.UNBIND_DEADLINE", 300.0)
    async with daemon(tmp_path, scenario=SCENARIOS / "B1.yaml") as running:
        agent, told = running.agent, running.told
        await running.until(lambda: _has_intent(agent, "0000:81:00.0"))
        fed = told.count("WATCHDOG=1")
        await running.until(lambda: told.count("WATCHDOG=1") > fed or agent.memory.quarantine)
        assert not agent.memory.quarantine, "no sign of life came before the unbind was given up"
        await running.until(lambda: agent.memory.quarantine)
        assert agent.memory.quarantine["0000:81:00.0"].reason == "RebootRequired"


def _has_intent(agent: Rig, address: str) -> bool:
    return any(r["event"] == "intent" and r["action"].endswith(f"/bind/{address}") for r in journal(agent))


def command(root: Path, *words: str, factor: float = 50.0) -> list[str]:
    host = ["--root", str(root), "--host", "sim", "--time-factor", str(factor)]
    return [sys.executable, "-m", "agent.app.main", *words, *host]


async def test_sigterm_during_a_trial_ends_the_process_and_the_next_start_finishes_the_job(
    tmp_path: Path,
) -> None:
    spec = tmp_path / "etc/gpu-host-agent/spec.yaml"
    spec.parent.mkdir(parents=True)
    spec.write_text(
        recipe(**qwen(gate={"benchmark": {"concurrency": [1], "outputTokens": 400_000, "timeout": "10h"}}))
    )
    status = tmp_path / "run/gpu-host-agent/status.json"
    with subprocess.Popen(
        command(tmp_path, "run"), cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            await _until_activity(status, process, "benchmark")
            second = subprocess.run(
                command(tmp_path, "apply"),
                cwd=REPOSITORY,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
    assert second.returncode == 1
    assert f"another agent is running: pid {process.pid}" in second.stderr
    assert str(tmp_path / "var/lib/gpu-host-agent/lock") in second.stderr
    assert "next:" in second.stderr
    assert json.loads(status.read_bytes())["ready"] == "Unknown"
    async with rig(tmp_path, spec=recipe()) as agent:
        assert agent.memory.trials["qwen"].outcome is None
        assert agent.memory.promoted == {}
        count = starts(agent)
        await agent.converge()
        assert service(agent).revision == service(agent).promoted
        assert agent.condition("ServiceReady/qwen").reason == "Promoted"
        assert starts(agent) == count  # it ran the right revision: what was missing is its proof
        assert unit(agent).active_state == "active"


async def _until_activity(status: Path, process: "subprocess.Popen[bytes]", word: str) -> None:
    async with asyncio.timeout(60):
        while not status.exists() or word not in json.loads(status.read_bytes())["activity"]:
            assert process.poll() is None, "the daemon has ended"
            await asyncio.sleep(0.02)
