"""Runs a program of these tests against the stand-in, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

from tests.abi.cuda.stub import CudaStub

ROOT = Path(__file__).parents[3]


def run(
    stub: CudaStub, module: str, *arguments: str, seconds: float = 60.0
) -> "subprocess.CompletedProcess[str]":
    """Raises TimeoutExpired, after which the child is gone."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **stub.env}, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
