"""Questions about a service as it was started: its flags, its environment, whether NCCL will use P2P."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.sim.profile import When


@dataclass(frozen=True, slots=True)
class Started:
    """A service's process at its start."""

    argv: Sequence[str]
    env: Mapping[str, str]
    p2p: bool = False

    def flag(self, *names: str) -> str | None:
        """The value of the last of these flags; "" for a bare flag, None when there is none."""
        found = None
        for position, word in enumerate(self.argv):
            name, equals, value = word.partition("=")
            if name.removeprefix("--") in names and word.startswith("--"):
                following = self.argv[position + 1 : position + 2]
                found = (
                    value if equals else "".join(following) if following and following[0][:2] != "--" else ""
                )
        return found

    def number(self, default: int, *names: str) -> int:
        text = self.flag(*names) or ""
        return int(text) if text.isdigit() else default

    @property
    def is_sglang(self) -> bool:
        return "sglang.launch_server" in self.argv

    @property
    def tensor_parallel(self) -> int:
        return self.number(1, "tensor-parallel-size", "tp-size", "tp")

    @property
    def port(self) -> int:
        return self.number(30000, "port")


def holds(when: When, started: Started) -> bool:
    """Every part of the condition is true of this start."""
    if when.p2p is not None and started.p2p != when.p2p:
        return False
    for value, wanted in (
        (started.flag(when.flag.removeprefix("--")) if when.flag else None, when.flag),
        (started.env.get(when.env) if when.env else None, when.env),
    ):
        if wanted is None:
            continue
        if when.equals is not None and value != when.equals:
            return False
        if when.equals is None and (value is not None) != (when.exists is not False):
            return False
    return True


def nccl_value(name: str, env: Mapping[str, str], files: Mapping[str, str]) -> str | None:
    """NCCL's own precedence: the environment, then NCCL_CONF_FILE instead of ~/.nccl.conf, then /etc/nccl.conf."""
    if name in env:
        return env[name]
    for path in (env.get("NCCL_CONF_FILE", "/root/.nccl.conf"), "/etc/nccl.conf"):
        for line in files.get(path, "").splitlines():
            key, equals, value = line.strip().partition("=")
            if equals and key == name:
                return value
    return None
