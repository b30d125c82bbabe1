"""Just enough of a PTX machine to run the self-test's kernel, one thread after the other. What it does not know it refuses."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_MASK = (1 << 64) - 1
_STATEMENT = re.compile(r"(?:@(?P<guard>%\w+)\s+)?(?P<name>[a-z][\w.]*)\s*(?P<operands>[^;]*);")
_LABEL = re.compile(r"(\w+):")


@dataclass
class Machine:
    """``memory`` holds 8-byte words by address; ``stored`` counts the stores to each."""

    text: str
    memory: dict[int, int]
    stored: dict[int, int] = field(default_factory=dict)

    def run(self, blocks: int, threads: int, parameters: dict[str, int]) -> None:
        for block in range(blocks):
            for thread in range(threads):
                special = {"%ctaid.x": block, "%tid.x": thread, "%ntid.x": threads, "%nctaid.x": blocks}
                self._thread({**parameters, **special})

    def _thread(self, values: dict[str, int]) -> None:
        program = list(_statements(self.text))
        labels = {name: at for at, (label, name, _) in enumerate(program) if label == "label"}
        at = 0
        while at < len(program):
            guard, name, operands = program[at]
            at += 1
            if guard == "label" or (guard and not values[guard]):
                continue
            if name == "ret":
                return
            if name == "bra":
                at = labels[operands[0]]
            else:
                self._step(name, operands, values)

    def _step(self, name: str, operands: list[str], values: dict[str, int]) -> None:
        target, *rest = operands
        if name == "st.volatile.global.u64":
            address = values[target.strip("[]")]
            self.memory[address] = values[rest[0]]
            self.stored[address] = self.stored.get(address, 0) + 1
            return
        read = [
            values[word] if word in values else int(word, 0) for word in (one.strip("[]") for one in rest)
        ]
        values[target] = self._result(name, read) & _MASK

    def _result(self, name: str, read: list[int]) -> int:
        if name == "ld.volatile.global.u64":
            return self.memory[read[0]]
        if name in {"ld.param.u64", "cvta.to.global.u64", "mov.u32", "cvt.u64.u32"}:
            return read[0]
        if name == "setp.ge.u64":
            return int(read[0] >= read[1])
        operation = {"add.u64": int.__add__, "mul.wide.u32": int.__mul__, "shl.b64": int.__lshift__}[name]
        return int(operation(read[0], read[1]))


def _statements(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Guard (or "label"), instruction and operands."""
    body = text[text.index("{") + 1 : text.rindex("}")]
    for line in (line.split("//")[0].strip() for line in body.splitlines()):
        if label := _LABEL.fullmatch(line):
            yield "label", label[1], []
        elif line and not line.startswith(".reg"):
            found = _STATEMENT.fullmatch(line)
            assert found, f"no instruction that this machine knows: {line}"
            yield found["guard"] or "", found["name"], [one.strip() for one in found["operands"].split(",")]
