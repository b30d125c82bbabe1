"""As much of torch as the NCCL check calls, on plain arrays, with processes that really talk to each other.

It stands in for torch where only the way of the check is tried: who hangs, dies or sees wrong data, and what is said of
it. That the check calls torch rightly is shown by a real torch, in the slow rings. Faults come by environment:
``FAKE_TORCH_FAULT=WHAT:OPERATION:RANK``, see ``distributed``.
"""

import array
import os

__version__ = "0.0-fake" + os.environ.get("FAKE_TORCH_ECHO", "")
int32 = "i"


class Tensor:
    def __init__(self, cells: "array.array[int]") -> None:
        self.cells = cells

    def clone(self) -> "Tensor":
        return Tensor(array.array("i", self.cells))

    def to(self, device: tuple[str, int]) -> "Tensor":
        return self

    def tolist(self) -> list[int]:
        return self.cells.tolist()


def device(sort: str, index: int = 0) -> tuple[str, int]:
    return (sort, index)


def frombuffer(cells: "array.array[int]", dtype: str) -> Tensor:
    assert dtype == int32
    return Tensor(cells)


def equal(one: Tensor, other: Tensor) -> bool:
    return one.cells == other.cells
