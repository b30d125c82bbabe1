"""The NCCL check with a real torch on CPUs: what it calls of torch exists, and its sums come out right over gloo.

torch is some 200 MB, so it is installed once, outside the tree, from its own lock.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from agent.core.nccl_verdict import judge
from agent.host.nccl_check import TargetNcclCheck
from tests.system.vm.cache import cached, key_of

pytestmark = pytest.mark.system

LOCK = Path(__file__).with_name("torch.lock")
INDEX = "https://download.pytorch.org/whl/cpu"  # the package index itself has torch with CUDA only
SMALL = {"backend": "gloo", "sizes": [1, 1023, 1 << 16, 1 << 20], "repeats": 2, "first": 120.0, "step": 60.0}


def install(folder: Path) -> None:
    """Raises CalledProcessError where pip cannot get it."""
    # It moves into its place afterwards; so there is a --target and no virtual environment, which has paths inside.
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--require-hashes",
        "--no-deps",
        "--only-binary=:all:",
    ]
    command = [*pip, "--target", str(folder / "packages"), "-r", str(LOCK)]
    for more in ([], ["--extra-index-url", INDEX]):
        done = subprocess.run([*command, *more], capture_output=True, text=True, check=False, timeout=600)
        if done.returncode == 0:
            return
    raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def torch() -> Path:
    """A folder for PYTHONPATH."""
    try:
        return cached("torch", key_of(sys.version, files=[LOCK]), install) / "packages"
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        words = str(getattr(error, "stderr", "") or error).strip().rpartition("\n")[2]
        # Also in CI: the package index itself has torch for CUDA only, and nothing else can be counted upon there.
        pytest.skip(f"needs torch for CPUs from the package index or {INDEX}: {words}")


@pytest.mark.parametrize("world", [2, 3])
async def test_real_torch_runs_every_collective_over_gloo_and_all_sums_are_right(
    torch: Path, world: int
) -> None:
    told = await TargetNcclCheck().run(
        "host", sys.executable, {"PYTHONPATH": str(torch)}, {**SMALL, "world": world}, 300.0
    )
    found = judge(told.steps, world, p2p=False, ended=told.ended)
    assert (found.result, found.detail, found.left) == ("good", "", ())
    assert found.torch.startswith("2.13.0")
    right = [s for s in told.steps if s.wrong == 0]
    assert len(right) == world * 4 * 2 * 2 + world * (world - 1)


async def test_nccl_without_a_gpu_is_an_error_that_says_so(torch: Path) -> None:
    told = await TargetNcclCheck().run(
        "host", sys.executable, {"PYTHONPATH": str(torch)}, {"world": 2, "first": 120.0}, 300.0
    )
    found = judge(told.steps, 2, p2p=True, ended=told.ended)
    assert (found.result, "CUDA shows 0 GPUs here, expected 2" in found.detail) == ("error", True)
