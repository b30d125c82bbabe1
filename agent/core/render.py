"""A service rendered: argv, environment and the drop-in, each value with where it came from.

Quoting follows systemd.syntax(7) and systemd.service(5): everything is double-quoted; in ``Exec`` lines ``$`` and
``%`` are doubled, in ``Environment=`` only ``%``. Characters that systemd itself refuses are refused here.
"""

from agent.core.errors import TerminalError
from agent.core.p2p_decision import P2PDecision
from agent.core.revision import Provenance, Revision
from agent.core.spec import ArgValue, Service, target_name

DROP_IN = "/etc/systemd/system/{unit}.d/50-gpu-host-agent.conf"
SECRETS = "/run/gpu-host-agent/secrets/{service}.env"
DEFAULT_PORT = 30000  # SGLang's own default

HEADER = "# Written by gpu-host-agent from the spec; edits here are drift and will be taken back.\n"

# One verdict, every consumer: NCCL, and SGLang's own custom all-reduce, use P2P independently of each other.
P2P_OFF_ENV = {"NCCL_P2P_DISABLE": "1"}
P2P_OFF_FLAG = "disable-custom-all-reduce"
# With P2P off NCCL goes by host memory, and shares it by cuMem, which needs the peer access that P2P off forbids.
HOST_MEMORY_ENV = {"NCCL_CUMEM_HOST_ENABLE": "0"}

RULES_ENV = {
    "CUDA_DEVICE_ORDER": ("PCI_BUS_ID", "so that indices follow bus addresses in every process"),
    "SPT_NOENV": ("1", "setproctitle would destroy /proc/PID/environ, which the effective check reads"),
}


def render(
    name: str, service: Service, gpus: tuple[str, ...], uuids: tuple[str, ...], p2p: P2PDecision
) -> Revision:
    """The revision that the spec means for this service under this P2P decision."""
    args, provenance = _arguments(service, p2p)
    env = _environment(service, uuids, p2p, provenance)
    if "$" in service.python:
        raise TerminalError(
            f"systemd cannot start {service.python!r}: it substitutes in the words after a program's path, and not in the path",
            reason="NotRenderable",
            next_step="use an interpreter whose path has no $",
        )
    argv = (service.python, "-m", "sglang.launch_server", *_argv(args))
    unit_file = DROP_IN.format(unit=service.unit)
    return Revision(
        service=name,
        target=target_name(service.target),
        unit=service.unit,
        port=port_of(service),
        gpus=gpus,
        p2p=p2p.on,
        argv=argv,
        env=env,
        files={unit_file: drop_in(name, service, argv, env)},
        secrets=dict(service.secrets),
        provenance=provenance,
    )


def port_of(service: Service) -> int:
    port = service.args.get("port")
    return port if isinstance(port, int) else DEFAULT_PORT


def served_name(service: Service) -> str:
    """The name that requests must use: SGLang serves under the model path unless told otherwise."""
    return str(service.args.get("served-model-name") or service.args.get("model-path") or "")


def _arguments(service: Service, p2p: P2PDecision) -> tuple[dict[str, ArgValue], dict[str, Provenance]]:
    args: dict[str, ArgValue] = dict(service.args)
    provenance = {
        f"args.{k}": Provenance(value=_say(v), source="spec", reason="the spec says so")
        for k, v in args.items()
    }
    if not p2p.on and not args.get(P2P_OFF_FLAG):
        args.pop(P2P_OFF_FLAG, None)  # it comes last, wherever the spec says false: see without_p2p
        args[P2P_OFF_FLAG] = True
        provenance[f"args.{P2P_OFF_FLAG}"] = Provenance(value="true", source=p2p.source, reason=p2p.reason)
    return args, provenance


def _environment(
    service: Service, uuids: tuple[str, ...], p2p: P2PDecision, provenance: dict[str, Provenance]
) -> dict[str, str]:
    env: dict[str, str] = {}

    def put(name: str, value: str, source: str, reason: str) -> None:
        env[name] = value
        provenance[f"env.{name}"] = Provenance(value=value, source=source, reason=reason)

    for name, (value, reason) in RULES_ENV.items():
        put(name, value, "rule", reason)
    put(
        "CUDA_VISIBLE_DEVICES",
        ",".join(uuids),
        "spec",
        "the GPUs of its group, by UUID: indices differ between processes",
    )
    for name, raw in (*service.env.items(), *service.nccl.items()):
        put(name, _say(raw), "spec", "the spec says so")
    for name, value in P2P_OFF_ENV.items() if not p2p.on else ():
        put(name, value, p2p.source, p2p.reason)
    for name, value in HOST_MEMORY_ENV.items() if p2p.host_memory and not p2p.on else ():
        if name not in env:  # the spec may know better: it says so in as many words
            put(name, value, "rule", p2p.host_memory)
    return dict(sorted(env.items()))


def _argv(args: dict[str, ArgValue]) -> list[str]:
    argv: list[str] = []
    for name, value in args.items():
        if value is False:
            continue  # an absent flag is SGLang's way to say false
        argv.append(f"--{name}")
        if isinstance(value, tuple):
            argv += [_say(item) for item in value]
        elif value is not True and value is not None:
            argv.append(_say(value))
    return argv


def _say(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return " ".join(_say(item) for item in value)
    return str(value)


def without_p2p(revision: Revision, reason: str = "") -> Revision:
    """The same revision as it is rendered while P2P is off; itself where that is so already."""
    if not revision.p2p:
        return revision
    flag = f"--{P2P_OFF_FLAG}"
    argv = revision.argv if flag in revision.argv else (*revision.argv, flag)
    env = dict(sorted({**revision.env, **P2P_OFF_ENV}.items()))
    off = [f"env.{name}" for name in P2P_OFF_ENV] + [f"args.{P2P_OFF_FLAG}"]
    why = {name: Provenance(value="1", source="verdict", reason=reason) for name in off}
    files = {path: _again(text, argv, env) for path, text in revision.files.items()}
    changes = {"p2p": False, "argv": argv, "env": env, "files": files}
    return revision.model_copy(update={**changes, "provenance": {**revision.provenance, **why}})


def _again(text: str, argv: tuple[str, ...], env: dict[str, str]) -> str:
    """A drop-in with another command line and environment; all else in it stays."""
    kept = [line for line in text.splitlines() if not line.startswith(("Environment=", "ExecStart="))]
    start = kept.index("[Service]") + 1
    return "\n".join([*kept[:start], *_env_lines(env), *kept[start:], *_exec_lines(argv)]) + "\n"


def _env_lines(env: dict[str, str]) -> list[str]:
    return [f"Environment={quote(f'{key}={value}')}" for key, value in env.items()]


def _exec_lines(argv: tuple[str, ...]) -> list[str]:
    return ["ExecStart=", "ExecStart=" + " ".join(quote(word, executed=True) for word in argv)]


def drop_in(name: str, service: Service, argv: tuple[str, ...], env: dict[str, str]) -> str:
    lines = [HEADER + "[Service]", *_env_lines(env)]
    if service.secrets:
        lines.append(f"EnvironmentFile={SECRETS.format(service=name)}")
    # Restart=no: a start that nothing has proved must not happen by itself; the agent starts, counts and gates.
    lines += ["Restart=no", "KillMode=mixed", "LimitMEMLOCK=infinity", "TimeoutStartSec=infinity"]
    lines.append(f"TimeoutStopSec={max(1, round(service.gate.stop_timeout))}")
    return "\n".join([*lines, *_exec_lines(argv)]) + "\n"


def unwritable(code: int) -> bool:
    """Control characters, lone surrogates and Unicode's noncharacters: systemd drops the line that holds one."""
    surrogate, nonchar = 0xD800 <= code <= 0xDFFF, 0xFDD0 <= code <= 0xFDEF or code & 0xFFFE == 0xFFFE
    return code < 0x20 or code == 0x7F or surrogate or nonchar


def quote(word: str, *, executed: bool = False) -> str:
    """One word for a unit file that systemd reads back exactly; ``executed`` for Exec lines."""
    bad = next((c for c in word if unwritable(ord(c))), None)
    if bad is not None:
        raise TerminalError(
            f"the character U+{ord(bad):04X} in {word[:40]!r} cannot be written to a unit file",
            reason="NotRenderable",
            next_step="remove that character from the spec",
        )
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return '"' + (text.replace("$", "$$") if executed else text) + '"'
