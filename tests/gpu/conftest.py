"""GPUs of this machine on the driver ``nvidia``; a test that needs more of them than there are is skipped with the reason."""

import pytest

from agent.core.fact import Known
from agent.host.real import real_host


async def on_nvidia() -> tuple[str, ...]:
    """Addresses, ascending. Reads sysfs only."""
    host = real_host()
    try:
        functions = (await host.ports.pci.read()).functions.values()
    finally:
        await host.close()
    return tuple(sorted(f.address for f in functions if f.is_gpu and f.driver == Known("nvidia")))


async def at_least(count: int) -> tuple[str, ...]:
    gpus = await on_nvidia()
    if len(gpus) < count:
        pytest.skip(f"needs {count} GPUs on the driver nvidia, this machine has {len(gpus)}")
    return gpus


@pytest.fixture
async def one_gpu() -> tuple[str, ...]:
    return await at_least(1)


@pytest.fixture
async def two_gpus() -> tuple[str, ...]:
    return await at_least(2)
