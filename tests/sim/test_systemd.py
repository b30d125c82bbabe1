"""Units, drop-ins and processes behave as systemd's do."""

import errno

import pytest

from agent.core.render import quote
from agent.sim.host import SimulatedHost
from agent.sim.unitfile import UnitSyntaxError, expand_argv, load_unit, split_words

UNIT = "sglang-qwen.service"
DROP_IN = f"/etc/systemd/system/{UNIT}.d/50-gpu-host-agent.conf"
NASTY = [
    'a "b"',
    "back\\slash",
    "100%",
    "%n",
    "$HOME",
    "${HOME}",
    "$$",
    "",
    "two  spaces",
    "é ü 漢",
    "'single'",
    "#x;y",
]


def drop_in(*argv: str, env: dict[str, str] | None = None, extra: str = "") -> str:
    lines = ["[Service]", *(f"Environment={quote(f'{k}={v}')}" for k, v in (env or {}).items()), extra]
    return (
        "\n".join([*lines, "ExecStart=", "ExecStart=" + " ".join(quote(w, executed=True) for w in argv)])
        + "\n"
    )


SGLANG = (
    "/opt/ml-env/bin/python3",
    "-m",
    "sglang.launch_server",
    "--model-path",
    "/models/Qwen3.5-122B-A10B",
    "--tensor-parallel-size",
    "4",
    "--port",
    "30000",
)
P2P_OFF = {"NCCL_P2P_DISABLE": "1"}


async def restart_with(host: SimulatedHost, text: str) -> None:
    target = host.ports.targets("lxc:129")
    await stop(host)
    await target.write_file(DROP_IN, text)
    await target.daemon_reload()
    await target.start_unit(UNIT)


async def stop(host: SimulatedHost) -> None:
    target = host.ports.targets("lxc:129")
    await target.stop_unit(UNIT)
    while (await target.unit(UNIT)).active_state == "deactivating":
        await host.ports.clock.sleep(1)


async def test_the_unit_is_found_hung_with_page_faults_in_the_log(make_host):
    host = make_host()
    unit = await host.ports.targets("lxc:129").unit(UNIT)
    assert (unit.active_state, len(unit.pids)) == ("active", 9)
    lines = (await host.ports.kernel_log.read("")).lines
    assert any("IO_PAGE_FAULT" in text for _, text in lines)


async def test_a_drop_in_counts_only_after_daemon_reload(make_host):
    host = make_host()
    target = host.ports.targets("lxc:129")
    await stop(host)
    await target.write_file(DROP_IN, drop_in(*SGLANG, env=P2P_OFF))
    await target.start_unit(UNIT)
    old = await target.process((await target.unit(UNIT)).main_pid)
    assert old is not None
    assert "NCCL_P2P_DISABLE" not in old.env
    await restart_with(host, drop_in(*SGLANG, env=P2P_OFF))
    new = await target.process((await target.unit(UNIT)).main_pid)
    assert new is not None
    assert new.argv == SGLANG
    assert new.env["NCCL_P2P_DISABLE"] == "1"


async def test_S12_nasty_arguments_and_values_round_trip(make_host):
    host = make_host()
    await restart_with(host, drop_in(*SGLANG, *NASTY, env={f"V{i}": text for i, text in enumerate(NASTY)}))
    target = host.ports.targets("lxc:129")
    process = await target.process((await target.unit(UNIT)).main_pid)
    assert process is not None
    assert process.argv == (*SGLANG, *NASTY)
    assert [process.env[f"V{i}"] for i in range(len(NASTY))] == NASTY


def test_unquoted_variables_are_split_and_bracketed_ones_are_not():
    env = {"A": "x y", "B": "z"}
    assert expand_argv(["$A", "${A}", "pre${B}", "$$B", "$MISSING"], env) == ["x", "y", "x y", "prez", "$B"]


def test_quoting_that_systemd_refuses_makes_the_unit_bad():
    assert load_unit("x.service", ['[Service]\nExecStart=/bin/true "open\n']).bad
    assert load_unit("x.service", ["[Service]\nExecStart=/bin/true\nExecStart=/bin/false\n"]).bad
    with pytest.raises(UnitSyntaxError):
        split_words(r"bad \q escape")


def test_continuation_lines_comments_and_resets():
    text = (
        "[Service]\nExecStart=/bin/a \\\n# between\n  b\nEnvironment=A=1\nEnvironment=\nEnvironment=B=2 C=3\n"
    )
    loaded = load_unit("x.service", [text])
    assert loaded.exec_start == ["/bin/a", "b"]
    assert loaded.environment == {"B": "2", "C": "3"}


async def test_a_service_with_p2p_off_loads_and_serves_over_shared_memory(make_host):
    host = make_host()
    await restart_with(host, drop_in(*SGLANG, env={**P2P_OFF, "NCCL_DEBUG": "INFO"}))
    await host.ports.clock.sleep(60)
    log = await host.ports.targets("lxc:129").unit_log(UNIT, 50)
    assert "The server is fired up and ready to roll!" in log
    assert any("max_total_num_tokens=780820" in line for line in log)
    assert any("via SHM/direct/direct" in line for line in log)


async def test_NCCL_P2P_DISABLE_true_leaves_p2p_on_and_the_start_hangs(make_host):
    host = make_host()
    await restart_with(host, drop_in(*SGLANG, env={"NCCL_P2P_DISABLE": "true"}))
    await host.ports.clock.sleep(60)
    assert "The server is fired up and ready to roll!" not in await host.ports.targets("lxc:129").unit_log(
        UNIT, 50
    )
    assert host.world.state.targets["lxc:129"].units[UNIT].hung


async def test_a_missing_environment_file_fails_the_start(make_host):
    host = make_host()
    await restart_with(host, drop_in(*SGLANG, extra="EnvironmentFile=/run/no-such.env"))
    unit = await host.ports.targets("lxc:129").unit(UNIT)
    assert (unit.active_state, unit.result) == ("failed", "resources")


async def test_secrets_reach_the_process_through_a_0600_file(make_host):
    host = make_host()
    target = host.ports.targets("lxc:129")
    await target.install_secrets("/run/s.env", {"HF_TOKEN": "/etc/gpu-host-agent/secrets/hf_token"})
    assert host.world.state.targets["lxc:129"].files["/run/s.env"].mode == 0o600
    await restart_with(host, drop_in(*SGLANG, env=P2P_OFF, extra="EnvironmentFile=/run/s.env"))
    process = await target.process((await target.unit(UNIT)).main_pid)
    assert process is not None
    assert process.env["HF_TOKEN"] == "simulated-token-no-secret"
    with pytest.raises(FileNotFoundError):
        await target.install_secrets("/run/t.env", {"X": "/no/such"})


async def test_more_tensor_parallel_ranks_than_visible_gpus_crash(make_host):
    host = make_host()
    uuid = host.world.state.gpus["0000:01:00.0"].uuid
    await restart_with(
        host, drop_in(*SGLANG, env={**P2P_OFF, "CUDA_VISIBLE_DEVICES": uuid}, extra="Restart=no")
    )
    await host.ports.clock.sleep(10)
    unit = await host.ports.targets("lxc:129").unit(UNIT)
    assert (unit.active_state, unit.result, unit.exit_status) == ("failed", "exit-code", 1)


async def test_visible_devices_by_uuid_decide_which_gpus_are_held(make_host):
    host = make_host()
    wanted = ["0000:81:00.0", "0000:91:00.0", "0000:e1:00.0", "0000:f1:00.0"]
    uuids = ",".join(host.world.state.gpus[a].uuid for a in wanted)
    await restart_with(host, drop_in(*SGLANG, env={**P2P_OFF, "CUDA_VISIBLE_DEVICES": uuids}))
    holders = await host.ports.holders.read(["0000:01:00.0", *wanted])
    assert holders["0000:01:00.0"].value == ()
    assert [h.command for a in wanted for h in holders[a].value] == [
        f"sglang::scheduler_TP{i}" for i in range(4)
    ]


async def test_restart_on_failure_counts_and_restart_no_does_not(make_host):
    crash = "faults: [{on: service.start, crash: {status: 1, after: 1s}}]"
    host = make_host(crash)
    await restart_with(host, drop_in(*SGLANG, env=P2P_OFF))
    await host.ports.clock.sleep(40)
    assert (await host.ports.targets("lxc:129").unit(UNIT)).restarts >= 2
    host = make_host(crash)
    await restart_with(host, drop_in(*SGLANG, env=P2P_OFF, extra="Restart=no"))
    await host.ports.clock.sleep(40)
    unit = await host.ports.targets("lxc:129").unit(UNIT)
    assert (unit.active_state, unit.restarts) == ("failed", 0)
    await host.ports.targets("lxc:129").reset_failed(UNIT)
    assert (await host.ports.targets("lxc:129").unit(UNIT)).active_state == "inactive"


async def test_a_stop_that_hangs_ends_by_timeout_or_by_kill(make_host):
    host = make_host("faults: [{on: service.stop, hang: true, after: 1}]")
    target = host.ports.targets("lxc:129")
    await restart_with(host, drop_in(*SGLANG, env=P2P_OFF, extra="TimeoutStopSec=infinity"))
    await target.stop_unit(UNIT)
    await host.ports.clock.sleep(30)
    assert (await target.unit(UNIT)).active_state == "deactivating"
    await target.kill_unit(UNIT)
    assert (await target.unit(UNIT)).pids == ()
    await restart_with(host, drop_in(*SGLANG, env=P2P_OFF, extra="TimeoutStopSec=20"))
    await target.stop_unit(UNIT)
    await host.ports.clock.sleep(25)
    unit = await target.unit(UNIT)
    assert (unit.active_state, unit.result) == ("failed", "timeout")


async def test_what_is_not_there_says_so(make_host):
    host = make_host()
    assert (await host.ports.targets("lxc:129").unit("no.service")).load_state == "not-found"
    with pytest.raises(OSError) as raised:
        await host.ports.targets("lxc:7").unit(UNIT)
    assert raised.value.errno == errno.EHOSTUNREACH
    with pytest.raises(FileNotFoundError):
        await host.ports.targets("lxc:129").start_unit("no.service")
