"""The stand-in driver itself, through NVIDIA's own bindings, each time in a child."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.abi.cuda.build import CUDA
from tests.abi.cuda.child import ROOT, run
from tests.abi.cuda.stub import ADDRESSES, GIB, CudaStub, needs_compiler, needs_tracing

pytestmark = needs_compiler
POISONED = "5a" * 8
PATHS = ("staged", "push", "pull", "store", "load")


@pytest.fixture
def stub(tmp_path: Path) -> CudaStub:
    return two(CudaStub(tmp_path))


def two(stub: CudaStub) -> CudaStub:
    for index in range(2):
        stub.add(index, ADDRESSES[index])
    return stub


def probe(stub: CudaStub, *name: str) -> Any:
    done = run(stub, "tests.abi.cuda.probes", *name)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_function_of_the_library_is_one_that_the_bindings_have(stub: CudaStub):
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(CUDA.cached() / CUDA.name)],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    exported = [line.split()[-1] for line in listed.stdout.splitlines()]
    program = "from cuda.bindings import driver; print('\\n'.join(dir(driver)))"
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    assert "cuMemcpyPeerAsync" in exported
    assert [name for name in exported if name.removesuffix("_v2") not in done.stdout.split()] == []


def test_codes_and_flags_are_those_of_the_bindings(stub: CudaStub):
    ours, theirs = probe(stub, "codes")
    assert ours == theirs
    assert {"0", "217", "700", "719", "803"} <= ours.keys()
    own, bindings = probe(stub, "flags")
    assert own == bindings


def test_devices_are_those_of_the_state(stub: CudaStub):
    stub.set({"gpu1.uuid": "GPU-01020304-0506-0708-090a-0b0c0d0e0f10", "gpu1.memory": 3 * GIB, "peer.0.1": 0})
    assert probe(stub, "facts") == {
        "version": 13000,
        "addresses": [address.upper() for address in ADDRESSES[:2]],
        "uuids": ["0" * 32, "0102030405060708090a0b0c0d0e0f10"],
        "memory": [8 * GIB, 3 * GIB],
        "major": [12, 12],
        "reaches": [[False, False], [True, False]],
        "supported": 0,
    }


def test_device_memory_is_sparse_and_bounded(stub: CudaStub):
    before, after, more, kept = probe(stub, "memory")
    assert (before, before - after, more, kept) == (8 * GIB, 6 * GIB, "2", True)


def test_a_driver_of_cuda_12_4_gives_the_older_forms_and_works(tmp_path: Path):
    stub = two(CudaStub(tmp_path, without=("cuEventElapsedTime_v2",)))
    stub.set({"version": 12040})
    assert probe(stub, "facts")["version"] == 12040
    assert probe(stub, "elapsed") == 0
    stub.set({"version": 13000})
    assert "cuEventElapsedTime" in run(stub, "tests.abi.cuda.probes", "elapsed").stderr


def test_a_function_that_an_old_driver_lacks_is_named(tmp_path: Path):
    stub = two(CudaStub(tmp_path, without=("cuMemcpyPeerAsync",)))
    assert "cuMemcpyPeerAsync" in probe(stub, "copy_again")


def test_without_a_fault_what_is_sent_arrives_and_the_trace_tells_how(stub: CudaStub):
    whole = {"first": None, "wrong": 0, "got": "", "at": None, "guards": True, "source": True}
    assert probe(stub, "copied", *PATHS) == dict.fromkeys(PATHS, whole)
    assert [*stub.calls("copy"), *stub.calls("kernel")] == [
        "copy 0>1 by 0: 65536 staged",
        "copy 0>1 by 0: 65536 direct",
        "copy 0>1 by 1: 65536 direct",
        "kernel 0>1 by 0: 65536",
        "kernel 0>1 by 1: 65536",
    ]


WORDS = 8192
FAULTS: dict[str, dict[str, Any]] = {
    "zeros": {"first": 0, "wrong": WORDS, "got": "00" * 8},
    "ones": {"first": 0, "wrong": WORDS, "got": "ff" * 8},
    "drop": {"first": 0, "wrong": WORDS, "got": POISONED},
    "flip": {"first": 32768, "wrong": 1},
    "shift": {"first": 0, "wrong": WORDS, "at": 65536 - 64},
    "swap": {"first": 0, "wrong": WORDS, "at": 4096},
    "source": {"wrong": 0, "source": False},
    "guard": {"wrong": 0, "guards": False},
}


@pytest.mark.parametrize("kind", FAULTS)
def test_each_fault_shows_as_it_should(stub: CudaStub, kind: str):
    stub.set({"fault.0.1.copy": kind})
    found = probe(stub, "copied", "push")["push"]
    assert {key: found[key] for key in FAULTS[kind]} == FAULTS[kind]
    assert [found["source"], found["guards"]] == [kind != "source", kind != "guard"]


def test_a_fault_begins_and_repeats_where_it_is_told_to(stub: CudaStub):
    stub.set({"fault.0.1.copy": "zeros", "fault.0.1.copy.from": 4096, "fault.0.1.copy.stride": 32768})
    found = probe(stub, "copied", "push")["push"]
    assert (found["first"], found["wrong"]) == (4096, 2 * 64 // 8)


@pytest.mark.parametrize(
    ("key", "hit"),
    [
        ("0.1.copy", {"push", "pull"}),
        ("0.1.push", {"push"}),
        ("0.1.pull", {"pull"}),
        ("0.1.kernel", {"store", "load"}),
        ("0.1.store", {"store"}),
        ("0.1.load", {"load"}),
        ("0.1.staged", {"staged"}),
        ("1.0.copy", set()),
        ("0.1.concurrent", set()),
    ],
)
def test_a_fault_hits_its_own_path_only(stub: CudaStub, key: str, hit: set[str]):
    stub.set({f"fault.{key}": "zeros"})
    found = probe(stub, "copied", *PATHS)
    assert {path for path in PATHS if found[path]["wrong"]} == hit


def test_a_mirror_is_seen_by_the_memorys_owner_only(stub: CudaStub):
    assert probe(stub, "seen_through_window") == [True, True]
    stub.set({"fault.0.1.kernel": "mirror"})
    assert probe(stub, "seen_through_window") == [True, False]


def test_writes_from_the_host_and_reads_to_it_break_apart(stub: CudaStub):
    stub.set({"fault.0.host": "zeros"})
    assert probe(stub, "copied", "push")["push"]["source"] is False
    stub.set({"fault.0.host": None, "fault.1.readback": "ones"})
    found = probe(stub, "copied", "push")["push"]
    assert (found["source"], found["got"]) == (True, "ff" * 8)


def test_a_store_without_access_is_error_700_when_waited_for_and_the_context_is_lost(stub: CudaStub):
    assert probe(stub, "unreachable") == [700, 700, 0]


def test_an_error_of_work_comes_when_it_is_waited_for(stub: CudaStub):
    stub.set({"error.copy.0.1": 719})
    assert probe(stub, "query") == ["719", "719"]


@pytest.mark.parametrize("key", ["error.cuInit", "error.cuDeviceGetCount", "error.cuMemAlloc.1"])
def test_a_function_fails_with_the_code_that_the_state_tells(stub: CudaStub, key: str):
    stub.set({key: 803})
    done = run(stub, "tests.abi.cuda.probes", "copied", "push")
    assert f"{key.split('.')[1]}: 803" in done.stderr


def test_no_device_is_error_100(tmp_path: Path):
    assert probe(CudaStub(tmp_path), "init") == "100"


def test_work_on_a_stream_is_done_when_it_is_waited_for_and_not_before(stub: CudaStub):
    assert probe(stub, "waited_for") == [False, True]


def test_a_hung_copy_is_not_ready_for_a_query(stub: CudaStub):
    stub.set({"hang.copy.0.1": 0.2})
    assert probe(stub, "query") == ["600", "0"]


def test_a_fault_under_concurrency_needs_another_pair_in_flight(stub: CudaStub):
    stub.set({"fault.0.1.concurrent": "flip", "gbps.0.1": 20, "gbps.0.1.concurrent": 3})
    assert probe(stub, "together") == [True, False, True, 20, 3]


def test_a_child_can_be_killed_in_the_middle(stub: CudaStub):
    stub.set({"kill.cuMemAlloc.1": int(signal.SIGBUS)})
    assert run(stub, "tests.abi.cuda.probes", "copied", "push").returncode == -signal.SIGBUS


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def wait_until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


@needs_tracing
def test_a_stuck_child_is_in_state_D_and_outlives_SIGKILL_until_it_is_let_go(stub: CudaStub):
    stub.set({"stuck.copy.0.1": 60})
    argv = [sys.executable, "-m", "tests.abi.cuda.probes", "copied", "push"]
    with subprocess.Popen(
        argv, env={**os.environ, **stub.env}, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL
    ) as child:
        wait_until(lambda: state_of(child.pid) == "D")
        for fatal in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
            os.killpg(child.pid, fatal)
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(0.3)
        stub.set({"stuck.copy.0.1": None})
        assert child.wait(30) == -signal.SIGKILL
