"""The self-test's kernel: it compiles for the cards there are, and copies every word once."""

import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest

from agent.selftest.kernel import BLOCKS, NAME, PTX, THREADS
from tests.abi.cuda.ptx import Machine

TEXT = PTX.rstrip(b"\0").decode()
TO, ORIGIN = 1 << 40, 3 << 40


def ptxas() -> Path | None:
    """From NVIDIA's compiler package on PyPI."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc-cu12") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == "ptxas"), None)


@pytest.mark.skipif(
    ptxas() is None, reason="the package nvidia-cuda-nvcc-cu12, which has ptxas, is not installed"
)
@pytest.mark.parametrize("card", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_ptxas_compiles_the_kernel_without_a_warning(card: str, tmp_path: Path):
    source, made = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    source.write_text(TEXT)
    done = subprocess.run(
        [str(ptxas()), f"-arch={card}", "--warning-as-error", "-o", str(made), str(source)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert made.read_bytes()[:4] == b"\x7fELF"


def test_the_text_ends_as_the_driver_expects_it_and_names_its_kernel():
    assert PTX.endswith(b"\0")
    assert PTX.count(b"\0") == 1
    assert re.search(
        rb"\.visible \.entry " + NAME + rb"\(\.param \.u64 \w+, \.param \.u64 \w+, \.param \.u64 \w+\)", PTX
    )


@pytest.mark.parametrize("words", [0, 1, 7, 8, 9, 100])
def test_every_word_is_copied_once_and_nothing_else_is_touched(words: int):
    before = {ORIGIN + 8 * i: 0xA0000 + i for i in range(words)}
    machine = Machine(TEXT, dict(before))
    names = [one.split()[-1] for one in re.findall(r"\.param \.u64 \w+", TEXT)]
    machine.run(blocks=2, threads=4, parameters=dict(zip(names, (TO, ORIGIN, words), strict=True)))
    assert machine.memory == before | {TO + 8 * i: 0xA0000 + i for i in range(words)}
    assert machine.stored == {TO + 8 * i: 1 for i in range(words)}


def test_the_last_thread_of_the_grid_that_is_launched_has_its_own_word():
    last = BLOCKS * THREADS - 1
    machine = Machine(TEXT, {ORIGIN + 8 * last: 7})
    place = {"%ctaid.x": BLOCKS - 1, "%tid.x": THREADS - 1, "%ntid.x": THREADS, "%nctaid.x": BLOCKS}
    machine._thread({"destination": TO, "source": ORIGIN, "words": last + 1, **place})
    assert machine.stored == {TO + 8 * last: 1}
