"""Where a running server was told to listen, by the command line that anybody in its target may have given it."""

import pytest

from agent.core.placing import as_run
from agent.core.quantity import whole_number
from agent.core.render import DEFAULT_PORT, port_of
from tests.core.build import type_host

SERVICE = next(iter(type_host().spec.services.values()))


@pytest.mark.parametrize(
    ("text", "port"),
    [
        ("31000", 31000),
        ("65535", 65535),
        ("65536", DEFAULT_PORT),
        ("0", DEFAULT_PORT),
        ("-1", DEFAULT_PORT),
        ("1" * 5000, DEFAULT_PORT),  # int() raises ValueError
        ("\u0663\u0661\u0660\u0660\u0660", DEFAULT_PORT),  # int() takes these digits
        ("\u00b2", DEFAULT_PORT),
        ("", DEFAULT_PORT),
    ],
)
def test_a_port_that_is_none_is_the_servers_own_default(text: str, port: int) -> None:
    argv = ("python", "-m", "sglang.launch_server", "--model-path", "/m", f"--port={text}")
    assert port_of(as_run(SERVICE, argv)) == port


def test_a_whole_number_fits_a_64_bit_field() -> None:
    assert whole_number("9" * 18) == 10**18 - 1
    assert [whole_number(text) for text in ("9" * 19, "", " 1", "1 ", "+1", "1_0", "\u0661", "0x1")] == [
        None
    ] * 8
