"""A host with GPUs on nvidia and a stand-in NVML that lists them: the real child and the real bindings ask it."""

from collections.abc import Sequence

from agent.core.fact import Fact, Known, Unknown
from agent.core.observation import Gpu, Nvml
from agent.host.nvml import ChildNvml
from tests.abi.nvml.stub import NvmlStub
from tests.host.trees import Tree

A, C = "0000:01:00.0", "0000:c1:00.0"


class Rig:
    def __init__(self, tree: Tree, without: Sequence[str] = ()) -> None:
        self.tree = tree
        self.stub = NvmlStub(tree.root, without)
        self._count = 0

    def add(self, address: str, minor: int) -> None:
        """The next GPU: its index is its place."""
        self.tree.function(address, 0x030200)
        self.tree.bind(address, "nvidia")
        self.stub.add(self._count, address, minor)
        self._count += 1

    def leave_nvidia(self, address: str) -> None:
        (self.tree.root / f"sys/bus/pci/drivers/nvidia/{address}").unlink()

    def nvml(self, deadline: float = 60.0) -> ChildNvml:
        return ChildNvml(self.tree.root, deadline, self.stub.env)

    async def read(self) -> Nvml:
        answer = await self.nvml().read()
        assert isinstance(answer, Known)
        return answer.value

    async def unknown(self, deadline: float = 60.0) -> Unknown:
        answer = await self.nvml(deadline).read()
        assert isinstance(answer, Unknown)
        return answer

    async def gpu(self, address: str) -> Gpu:
        return known((await self.read()).gpus[address])


def two_gpus(tree: Tree, without: Sequence[str] = ()) -> Rig:
    """Indices 0 and 1 with minors 3 and 0."""
    rig = Rig(tree, without)
    rig.add(A, 3)
    rig.add(C, 0)
    return rig


def known(fact: Fact[Gpu]) -> Gpu:
    assert isinstance(fact, Known)
    return fact.value


def unknown_gpu(fact: Fact[Gpu]) -> Unknown:
    assert isinstance(fact, Unknown)
    return fact
