"""The contract of the ports, held up on the real edges: pytest runs inside a guest, as the agent does."""

import inspect
from collections.abc import Iterator

import pytest

from tests.contract import test_ports_contract as contract
from tests.system.vm.guest_pytest import GuestTests, run_tests, with_tests
from tests.system.vm.machine import VirtualMachine

pytestmark = pytest.mark.system
FILES = ["tests/__init__.py", *(f"tests/contract/{name}.py" for name in (
    "__init__", "hosts", "kernel_host", "target_contract", "test_ports_contract",
))]  # fmt: skip


def names_of_tests(place: object) -> set[str]:
    """The names of a module's test functions, and of its test classes' methods."""
    found = set()
    for name, member in inspect.getmembers(place):
        if inspect.isclass(member) and name.startswith("Test"):
            found |= names_of_tests(member)
        elif inspect.isfunction(member) and name.startswith("test_"):
            found.add(name)
    return found


@pytest.fixture(scope="module")
def result() -> Iterator[GuestTests]:
    with VirtualMachine(iommu="amd", gpus=2, over=with_tests(FILES)) as vm:
        yield run_tests(vm, "tests/contract/test_ports_contract.py", "AGENT_CONTRACT_HOST=guest", timeout=420)


def test_the_real_edges_keep_the_whole_contract(result: GuestTests) -> None:
    assert not result.failed, result.output
    assert not result.skipped, result.output
    passed = {name.partition("[")[0] for name in result.passed}
    assert passed == names_of_tests(contract)


def test_what_was_tried_is_the_real_kernel_and_not_the_simulation(result: GuestTests) -> None:
    assert not [name for name in result.passed if "simulated" in name]
    assert [name for name in result.passed if "real-kernel" in name]
