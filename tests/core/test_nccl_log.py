"""Lines as NCCL of several versions writes them."""

import pytest

from agent.core.nccl_log import (
    Route,
    host_memory_failed,
    not_effective,
    routes,
    transports,
    version,
    warnings,
)

HOST = "node1:4711:4711 [0] "
P11 = "node1:88:102 [1] transport/shm.cc:590 NCCL WARN Cuda failure 217 'peer access is not supported between these two devices'"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/IPC", Route(0, 1, "P2P/IPC")),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/IPC/read", Route(0, 1, "P2P/IPC/read")),
        ("Channel 03/0 : 2[2] -> 3[3] via P2P/CUMEM", Route(2, 3, "P2P/CUMEM")),
        ("Channel 03/0 : 2[2] -> 3[3] via P2P/CUMEM/read", Route(2, 3, "P2P/CUMEM/read")),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/direct pointer", Route(0, 1, "P2P/direct pointer")),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/direct pointer/read", Route(0, 1, "P2P/direct pointer/read")),
        ("Channel 01/0 : 0[0] -> 3[3] via P2P/indirect/2[2]", Route(0, 3, "P2P/indirect/2[2]")),
        ("Channel 00 : 1[41000] -> 0[1000] via SHM/direct/direct", Route(1, 0, "SHM/direct/direct")),
        ("Channel 00 : 3[c1000] -> 0[1000] via direct shared memory", Route(3, 0, "SHM/direct")),
        ("Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA", Route(7, 8, "NET/IB/0/GDRDMA")),
        ("Channel 00/0 : 15[7] -> 0[0] [receive] via NET/Socket/1", Route(15, 0, "NET/Socket/1")),
        ("P2P is disabled between connected GPUs 1 and 0.", None),
        ("comm 0x55 rank 0 nranks 2 - Init COMPLETE", None),
        ("Connected all rings", None),
    ],
)
def test_a_route_is_read_as_nccl_writes_it(said: str, expected: Route | None) -> None:
    found = routes([f"{HOST}NCCL INFO {said}"])
    assert found == ((expected,) if expected else ())


def test_channels_of_a_route_are_counted_and_both_ends_tell_of_one() -> None:
    lines = [f"{HOST}NCCL INFO Channel {n:02}/0 : 0[0] -> 1[1] via SHM/direct/direct" for n in (0, 1, 1)]
    lines.append(f"{HOST}NCCL INFO Channel 00/0 : 1[1] -> 0[0] via P2P/IPC")
    found = routes(lines)
    assert found == (Route(0, 1, "SHM/direct/direct", 2), Route(1, 0, "P2P/IPC", 1))
    assert transports(found) == ("P2P", "SHM")


def test_a_setting_that_only_names_p2p_is_no_route() -> None:
    assert routes([f"{HOST}NCCL INFO NCCL_P2P_DISABLE set by environment to 1."]) == ()
    assert routes(["somebody writes Channel 00/0 : 0[0] -> 1[1] via P2P/IPC"]) == ()


def test_the_version_is_told_once_by_whoever_tells_it() -> None:
    assert version([f"{HOST}NCCL INFO cudaDriverVersion 13000", "NCCL version 2.27.3+cuda12.9"]) == "2.27.3"
    assert version([]) == ""


def test_warnings_come_once_each_in_their_order() -> None:
    lines = [P11, f"{HOST}NCCL INFO quiet", f"{HOST}misc/socket.cc:1 NCCL WARN socketPoll failed", P11]
    assert warnings(lines) == (
        "Cuda failure 217 'peer access is not supported between these two devices'",
        "socketPoll failed",
    )


def test_P11_the_failure_of_host_memory_is_told_from_others() -> None:
    assert host_memory_failed([P11])
    assert not host_memory_failed([P11.replace("217", "2"), P11.replace("217", "2170")])
    assert not host_memory_failed([])


def test_p2p_that_is_declared_off_and_used_all_the_same_is_named_by_ranks() -> None:
    lines = [f"{HOST}NCCL INFO Channel 00/0 : {n}[{n}] -> {n + 1}[{n + 1}] via P2P/IPC" for n in range(5)]
    text = not_effective(lines, p2p=False)
    assert "rank 0 -> 1 via P2P/IPC" in text
    assert text.endswith("and 2 more")
    assert not_effective(lines, p2p=True) == ""
    assert not_effective([line.replace("P2P/IPC", "SHM/direct/direct") for line in lines], p2p=False) == ""
