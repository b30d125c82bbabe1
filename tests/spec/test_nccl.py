import pytest

from agent.catalog.nccl import variables
from agent.core.nccl import check, strtoll
from tests.spec.base import refused

MISREAD = [
    ("NCCL_P2P_DISABLE", "true", "NCCL reads as 0, so that P2P stays ON"),
    ("NCCL_P2P_DISABLE", "yes", "NCCL reads as 0, so that P2P stays ON"),
    ("NCCL_P2P_DISABLE", "2", "so that P2P stays ON"),
    ("NCCL_SHM_DISABLE", "on", "so that SHM stays ON"),
    ("NCCL_BUFFSIZE", "4M", "NCCL reads as 4 bytes, expected the number of bytes without a unit, 4194304"),
    ("NCCL_BUFFSIZE", "16 KiB", "16384"),
    ("NCCL_MAX_CTAS", "010", "NCCL reads as 8"),
    ("NCCL_NTHREADS", "512.0", "NCCL reads as 512"),
    ("NCCL_P2P_LEVEL", "sys", "NCCL ignores, expected one of LOC, NVL"),
    ("NCCL_P2P_LEVEL", "NODE", "NCCL ignores"),
    ("NCCL_NET_GDR_LEVEL", "phb", "case matters: PHB"),
    ("NCCL_ALGO", "Rings", "NCCL refuses at its start"),
    ("NCCL_PROTO", "LL256", "NCCL refuses at its start"),
    ("NCCL_NTHREADS", "100", "expected 64 or 128 or 256 or 512"),
    ("NCCL_IB_TIMEOUT", "99", "expected 0 to 31"),
    ("NCCL_IB_GID_INDEX", "-5", "expected -1 or a whole number of at least 0"),
    ("NCCL_DEBUG", "LOUD", "expected one of VERSION, WARN"),
    ("NCCL_DEBUG_SUBSYS", "INIT,NETS", "with commas between"),
    ("NCCL_LAUNCH_MODE", "group", "case matters: GROUP"),
    ("NCCL_NETDEVS_POLICY", "MAX:x", "expected one of AUTO, ALL, MAX:N"),
    ("NCCL_RAS_ADDR", "localhost", "expected host:port"),
    ("NCCL_IB_ADDR_RANGE", "10.0.0.0/99", "expected an address range"),
    ("NCCL_CONF_FILE", "~/nccl.conf", "without ~"),
    ("NCCL_PARAM_DUMP_ALL", "true", "expected 1 or 0"),
    ("NCCL_IB_CUDA_SUPPORT", "1", "no longer reads"),
    ("NCCL_SOCKET_IFNAME", " ", "found nothing"),
    ("NCCL_P2P_DISALBE", "1", "did you mean NCCL_P2P_DISABLE?"),
    ("NCCL_ZZZ", "1", "expected one that NCCL reads"),
    ("OMP_NUM_THREADS", "1", 'other variables go into "env"'),
]

READ_AS_MEANT = [
    ("NCCL_P2P_DISABLE", "1"),
    ("NCCL_P2P_DISABLE", "0"),
    ("NCCL_BUFFSIZE", "4194304"),
    ("NCCL_BUFFSIZE", "0x400000"),
    ("NCCL_P2P_LEVEL", "PXB"),
    ("NCCL_P2P_LEVEL", "P2C"),
    ("NCCL_P2P_LEVEL", "3"),
    ("NCCL_ALGO", "Ring,tree"),
    ("NCCL_ALGO", "allreduce:^Ring;Tree"),
    ("NCCL_PROTO", "^LL128"),
    ("NCCL_DEBUG", "info"),
    ("NCCL_DEBUG_SUBSYS", "^INIT,NET"),
    ("NCCL_CTA_POLICY", "EFFICIENCY|ZERO"),
    ("NCCL_CTA_POLICY", "2"),
    ("NCCL_NETDEVS_POLICY", "MAX:4"),
    ("NCCL_SOCKET_IFNAME", "^docker0,lo"),
    ("NCCL_RAS_ADDR", "[::1]:28028"),
    ("NCCL_IB_GID_INDEX", "-1"),
    ("NCCL_MAX_NCHANNELS", "4"),
    ("NCCL_NET", "socket"),
]


@pytest.mark.parametrize(("name", "value", "words"), MISREAD)
def test_P15_values_that_nccl_would_misread_are_refused_with_what_it_would_understand(name, value, words):
    assert words in (check(name, value) or "")


@pytest.mark.parametrize(("name", "value"), READ_AS_MEANT)
def test_values_that_nccl_reads_as_meant_are_accepted(name, value):
    assert check(name, value) is None


@pytest.mark.parametrize(
    ("value", "words"),
    [("NCCL_P2P_DISABLE: true", "NCCL reads as 0, so that P2P stays ON"), ("NCCL_BUFFSIZE: 4M", "NCCL reads as 4 bytes"), ("NCCL_P2P_LEVEL: sys", "NCCL ignores")],
)  # fmt: skip
def test_P15_the_spec_is_refused_at_the_line_of_the_value(value, words):
    found = refused(("NCCL_DEBUG: INFO", value))
    assert len(found) == 1
    assert found[0].startswith("spec.yaml:25:")
    assert words in found[0]


@pytest.mark.parametrize(
    ("text", "number", "rest"),
    [("12", 12, ""), (" -3x", -3, "x"), ("0x1F", 31, ""), ("017", 15, ""), ("08", 0, "8"), ("true", 0, "true"), ("", 0, ""), ("9" * 30, 2**63 - 1, "")],
)  # fmt: skip
def test_numbers_are_read_as_c_reads_them(text, number, rest):
    assert strtoll(text) == (number, rest)


def test_the_catalogue_has_every_column_for_every_variable():
    assert len(variables()) == 122
    assert all(
        v.name.startswith("NCCL_") and v.type and v.status in {"current", "deprecated", "removed"}
        for v in variables().values()
    )


def test_every_default_of_the_catalogue_that_is_a_plain_number_is_accepted():
    plain = {
        v.name: v.default
        for v in variables().values()
        if v.default.lstrip("-").isdigit() and v.status != "removed"
    }
    unset = {"NCCL_LL128_BUFFSIZE", "NCCL_LL_BUFFSIZE"}
    assert {
        name: problem
        for name, value in plain.items()
        if name not in unset and (problem := check(name, value))
    } == {}
