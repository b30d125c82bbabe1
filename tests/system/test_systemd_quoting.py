"""S12 against systemd's own parser: what is rendered into a drop-in is what a process is started with."""

import json
import random
from collections.abc import Iterator

import pytest

from agent.core.errors import TerminalError
from agent.core.p2p_decision import P2PDecision
from agent.core.render import quote, render
from agent.core.revision import Revision
from agent.core.spec import Service
from tests.system.booted_systemd import PYTHON, BootedSystemd

pytestmark = pytest.mark.system
ARGUMENTS, VARIABLES, UNITS = 2000, 1000, 10
OFF = P2PDecision(on=False, source="spec", reason="the spec says off")
DUMP = "/usr/local/bin/dump words"  # a space and a sign in the program's own path, too
PROGRAM = f"""#!{PYTHON} -IXutf8
import json, os, sys
print(json.dumps([sys.argv, dict(os.environ)]))
"""
BASE = """[Service]
Type=oneshot
ExecStart=/bin/false
StandardOutput=truncate:/run/words/{unit}
"""
PIECES = [
    *"\\\"'$% ;{}[]()`#!&*|<>~?^=,:@+-/",
    *(
        "\\n",
        "\\x41",
        "\\",
        "\\\\",
        "$HOME",
        "${PATH}",
        "$$",
        "%n",
        "%%",
        "%i",
        "%h",
        "$(id)",
        "`id`",
        "${A:-b}",
    ),
    *(
        "\u00e9",
        "\u4e2d",
        "\U0001f600",
        "\u2028",
        "\u00a0",
        "\u202e",
        "\u0301",
        "a",
        "Z",
        "0",
        "  ",
        "''",
        '""',
    ),
]
WHOLE = [
    "",
    " ",
    ";",
    "\\",
    '"',
    "'",
    "$",
    "%",
    "$$",
    "%%",
    "-",
    "--",
    "@x",
    "!x",
    "+x",
    ":x",
    "|",
    "#",
    "a\\",
    "x" * 20000,
]


def word(chance: random.Random) -> str:
    return "".join(chance.choices(PIECES, k=chance.randint(0, 12)))


def words(count: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    return (WHOLE + [word(chance) for _ in range(count)])[:count]


def revision(number: int, arguments: list[str], variables: dict[str, str]) -> Revision:
    service = Service.model_validate(
        {
            "runtime": "sglang",
            "unit": f"words-{number}.service",
            "gpus": "all",
            "python": DUMP,
            "args": {"words": arguments},
            "env": variables,
        }
    )
    return render("words", service, (), (), OFF)


@pytest.fixture
def revisions(ring: BootedSystemd) -> Iterator[list[Revision]]:
    """Two thousand arguments and one thousand values in units of their own, written to where the agent writes them."""
    arguments, values = words(ARGUMENTS, 1), words(VARIABLES, 2)
    made = [
        revision(
            number,
            arguments[number::UNITS],
            {f"WORD_{index}": value for index, value in enumerate(values[number::UNITS])},
        )
        for number in range(UNITS)
    ]
    ring.put(DUMP, PROGRAM, 0o755)
    ring.do("mkdir", "-p", "/run/words")
    for each in made:
        ring.put(f"/etc/systemd/system/{each.unit}", BASE.format(unit=each.unit))
        for path, text in each.files.items():
            ring.put(path, text)
    ring.do("systemctl", "daemon-reload")
    yield made
    ring.do("sh", "-c", f"rm -rf /etc/systemd/system/words-* /run/words '{DUMP}'; systemctl daemon-reload")


def test_S12_2000_arguments_and_1000_values_arrive_exactly(
    ring: BootedSystemd, revisions: list[Revision]
) -> None:
    arrived = [0, 0]
    for each in revisions:
        ring.do("systemctl", "start", each.unit)
        argv, environment = json.loads(ring.read(f"/run/words/{each.unit}"))
        assert tuple(argv) == each.argv
        assert {name: environment.get(name) for name in each.env} == each.env
        arrived[0] += len(argv[argv.index("--words") + 1 : argv.index("--disable-custom-all-reduce")])
        arrived[1] += sum(name.startswith("WORD_") for name in environment)
    assert arrived == [ARGUMENTS, VARIABLES]


def test_S12_systemd_has_no_complaint_about_what_is_rendered(
    ring: BootedSystemd, revisions: list[Revision]
) -> None:
    for each in revisions:
        assert ring.run(["systemd-analyze", "verify", each.unit]) == (0, "")


def test_S12_a_newline_is_refused_because_systemd_would_run_what_follows_it(ring: BootedSystemd) -> None:
    value = "x\nExecStartPre=/bin/touch /run/injected"
    with pytest.raises(TerminalError, match=r"U\+000A"):
        quote(f"X={value}")
    unit = f"[Service]\nType=oneshot\nEnvironment=X={value}\nExecStart=/bin/true\n"
    ring.put("/etc/systemd/system/newline.service", unit)
    try:
        ring.do("systemctl", "start", "newline.service")
        assert ring.run(["test", "-e", "/run/injected"])[0] == 0, "the refusal has no reason any more"
    finally:
        ring.do("rm", "-f", "/etc/systemd/system/newline.service", "/run/injected")
        ring.do("systemctl", "daemon-reload")
