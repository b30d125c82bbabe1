import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.app.status_view import exit_code, render_json, render_status, render_yaml
from agent.app.terminal import cells
from agent.core.status import Status
from tests.app import documents
from tests.app.documents import NOW, dumped
from tests.app.golden import check

SCENES: dict[str, tuple[Callable[[], Status], bool]] = {
    "ready": (documents.ready, True),
    "rolled_back": (documents.rolled_back, True),
    "unknown": (documents.unknown, True),
    "simulated": (documents.simulated, True),
    "blocked": (documents.blocked, True),
    "rejected": (documents.rejected, True),
    "stale_and_dead": (documents.stale, False),
    "stale_and_alive": (documents.stale, True),
    "fresh_and_dead": (documents.ready, False),
    "hostile": (documents.hostile, True),
}


def rendered(document: dict[str, Any], *, alive: bool = True, **options: Any) -> str:
    chosen: dict[str, Any] = {"wide": False, "color": False, "now": NOW, "width": 80, **options}
    return render_status(document, alive=alive, **chosen)


@pytest.mark.parametrize("scene", SCENES)
def test_a_narrow_status_is_exactly_this(scene):
    make, alive = SCENES[scene]
    check(f"status_{scene}.txt", rendered(dumped(make()), alive=alive))


@pytest.mark.parametrize("scene", ["ready", "blocked", "simulated"])
def test_a_wide_status_is_exactly_this(scene):
    make, alive = SCENES[scene]
    check(f"status_{scene}_wide.txt", rendered(dumped(make()), alive=alive, wide=True, width=120))


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("width", [80, 100, 250])
def test_a_narrow_status_keeps_to_its_columns_but_for_a_flag_that_cannot_be_broken(scene, width):
    make, alive = SCENES[scene]
    for line in rendered(dumped(make()), alive=alive, width=width).split("\n"):
        assert (
            cells(line) <= min(width, 100) or line.split()[0].startswith("--") or line.startswith("flags  ")
        )


@pytest.mark.parametrize("scene", [s for s in SCENES if s != "hostile"])
def test_a_narrow_status_is_one_screen(scene):
    make, alive = SCENES[scene]
    assert len(rendered(dumped(make()), alive=alive).split("\n")) <= 48


def test_a_hostile_status_is_still_a_few_screens():
    assert len(rendered(dumped(documents.hostile())).split("\n")) < 160


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("wide", [False, True])
def test_nothing_in_a_status_can_move_the_cursor(scene, wide):
    make, alive = SCENES[scene]
    for line in rendered(dumped(make()), alive=alive, wide=wide).split("\n"):
        assert line.isprintable()


def test_colour_changes_no_word():
    for make, alive in SCENES.values():
        document = dumped(make())
        painted = rendered(document, alive=alive, color=True)
        for code in ("0", "1", "2", "32", "33", "31;1", "7;33;1"):
            painted = painted.replace(f"\x1b[{code}m", "")
        assert [line.rstrip() for line in painted.split("\n")] == rendered(document, alive=alive).split("\n")


def test_a_stale_status_says_so_before_anything_else():
    page = rendered(dumped(documents.stale()), alive=False).split("\n")
    assert page[0] == "STALE: 4m5s old; the agent is not running. What follows was true then."
    assert "READY UNKNOWN (it was True)" in page[1]


def test_a_stale_status_of_a_living_agent_says_where_to_look():
    page = rendered(dumped(documents.stale()))
    assert page.startswith("STALE: 4m5s old; the agent runs and does not publish: journalctl")


def test_a_fresh_status_of_a_dead_agent_does_not_look_watched():
    page = rendered(dumped(documents.ready()), alive=False)
    assert page.startswith("NOT WATCHED: the agent is not running.")
    assert "esc8000a  READY  " not in page


def test_a_status_from_the_future_is_not_believed():
    document = dumped(documents.ready(published_at=NOW + 400))
    assert rendered(document).startswith("STALE: dated 6m40s in the future")
    assert exit_code(document, NOW) == 4


def test_a_simulated_host_is_said_to_be_one_at_the_top_in_the_name_at_the_figures_and_at_the_end():
    lines = rendered(dumped(documents.simulated())).split("\n")
    assert lines[0].startswith("*** SIMULATED (profile esc8000a)")
    assert lines[1].startswith("esc8000a (SIMULATED)")
    assert any(line.startswith("benchmark  SIMULATED FIGURES") for line in lines)
    assert any(line.startswith("proved     everything here happened on a simulated host") for line in lines)


def test_figures_that_do_not_say_whether_they_are_real_are_not_shown_as_real():
    document = dumped(documents.ready())
    del document["services"][0]["benchmark"]["key"]["simulated"]
    assert "SIMULATED FIGURES" in rendered(document)


@pytest.mark.parametrize(
    ("ready", "code"), [("True", 0), ("False", 3), ("Unknown", 4), ("Maybe", 4), (None, 4)]
)
def test_the_exit_code_tells_ready_from_not_ready_from_unknown(ready, code):
    assert exit_code({**dumped(documents.ready()), "ready": ready}, NOW) == code


def test_the_exit_code_is_unknown_for_a_status_that_is_stale_or_not_watched_or_undated():
    document = dumped(documents.ready())
    assert exit_code(document, NOW + 107) == 0
    assert exit_code(document, NOW + 109) == 4
    assert exit_code(document, NOW, alive=False) == 4
    assert exit_code({**document, "published_at": None}, NOW) == 4
    assert exit_code({**document, "stale_after": "soon"}, NOW) == 4


def test_gpus_that_differ_in_anything_get_rows_of_their_own():
    page = rendered(dumped(documents.blocked()))
    assert "inference     61:00.0 71:00.0          vfio-pci -> nvidia" in page
    assert "not ours      f1:00.0" in page


def test_gpus_outside_pci_domain_0_keep_their_whole_address():
    document = dumped(documents.ready())
    document["gpus"][0]["address"] = "0001:01:00.0"
    page = rendered(document)
    assert "0001:01:00.0" in page
    assert "0000:11:00.0" in page


def test_flags_of_what_would_run_are_not_told_as_flags_of_what_runs():
    assert "\nwould run  --model-path" in rendered(dumped(documents.blocked()))
    assert "\nflags      --model-path" in rendered(dumped(documents.ready()))


def test_a_flag_with_blanks_and_quotes_is_shown_as_a_shell_takes_it():
    argv = ("python3", "-m", "sglang.launch_server", "--chat-template", "it's {a b}", "--port", "30000")
    document = dumped(documents.ready(services=(documents.service(argv=argv),)))
    assert "--chat-template 'it'\"'\"'s {a b}' --port 30000" in rendered(document)


def test_a_benchmark_row_that_does_not_count_says_why():
    levels = (
        documents.level(64, 2327.3, 43.6, 47.2, void="the client was the bottleneck"),
        documents.level(4, 1, 1, 1, ok=7),
    )
    document = dumped(
        documents.ready(services=(documents.service(benchmark=documents.benchmark(levels=levels)),))
    )
    page = rendered(document)
    assert "C=64 does not count: the client was the bottleneck" in page
    assert "C=4 not every request was answered" in page


def test_a_service_that_was_not_measured_shows_no_figures():
    page = rendered(dumped(documents.unknown()))
    assert "benchmark  what runs has not been measured" in page
    assert "tok/s" not in page


@pytest.mark.parametrize("key", sorted(documents.dumped(documents.blocked())))
@pytest.mark.parametrize("damage", [None, "text", 7, [], {}, [[1], "a", None], {"a": [None]}, 1e999])
def test_a_status_with_a_damaged_field_is_still_shown(key, damage):
    document = {**dumped(documents.blocked()), key: damage}
    assert rendered(document)
    assert rendered(document, wide=True)
    assert exit_code(document, NOW) in {0, 3, 4}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(dumped(documents.service()))) | st.text(max_size=8), inner, max_size=6),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(dumped(documents.blocked()))), JSON), st.booleans())
def test_whatever_stands_in_a_status_file_is_shown_and_cannot_move_the_cursor(document, wide):
    for line in rendered(document, wide=wide).split("\n"):
        assert line.isprintable()


def test_json_and_yaml_are_the_document_itself():
    for make, _ in SCENES.values():
        document = dumped(make())
        as_json = render_json(document)
        assert json.loads(as_json) == document
        assert all(line.isprintable() and line.isascii() for line in as_json.split("\n"))
    document = dumped(documents.blocked())
    assert yaml.safe_load(render_yaml(document)) == document


def test_yaml_cannot_move_the_cursor_either():
    document = dumped(documents.ready(activity="\x1b[2J\x7f\x9b\u202e\r"))
    assert all(line.isprintable() for line in render_yaml(document).split("\n"))
    assert yaml.safe_load(render_yaml(document)) == document


def test_the_view_imports_nothing_slow():
    code = (
        "import sys, agent.app.status_view\n"
        "slow = {'pydantic', 'pydantic_core', 'asyncio', 'yaml', 'logging', 'subprocess', 'socket', 'structlog'}\n"
        "print(sorted(slow & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
