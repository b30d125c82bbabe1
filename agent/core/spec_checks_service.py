"""What one model cannot see: services against GPU groups, each other, and what a service can run with."""

import re
import warnings
from collections.abc import Iterator, Mapping

from agent.core import nccl
from agent.core.problem import Path, Problem, secret_setting, show
from agent.core.spec import ByNuma, Service, SmokePrompt, Spec, target_name

SGLANG_PORT = 30000  # SGLang's own default

_TENSOR = ("tensor-parallel-size", "tp-size", "tp")
_PIPELINE = ("pipeline-parallel-size", "pp-size")
_FLAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")
_DECIDED = {"CUDA_VISIBLE_DEVICES": '"gpus"', "NVIDIA_VISIBLE_DEVICES": '"gpus"'}
_IN_SECRETS = (
    'expected it under "secrets" as the name of a variable and the path of a file that holds its value'
)


def check_services(spec: Spec) -> list[Problem]:
    return [
        *_check_shared(spec),
        *(
            problem
            for name, service in spec.services.items()
            for problem in _check_service(("spec", "services", name), service, spec)
        ),
    ]


def _check_service(here: Path, service: Service, spec: Spec) -> Iterator[Problem]:
    yield from _check_group(here, service, spec)
    yield from _check_args(here, service)
    yield from _check_parallel(here, service, spec)
    yield from _check_env(here, service)
    yield from _check_nccl(here, service)
    yield from _check_gate((*here, "gate"), service)
    if service.target == "host" and service.unit in spec.policy.quiesce:
        text = f"found {service.unit}, which policy.quiesce lists too, expected another unit: a service is never stopped by the way"
        yield Problem((*here, "unit"), text, uses=(("spec", "policy", "quiesce"),))


def _check_shared(spec: Spec) -> Iterator[Problem]:
    """Two services on one GPU group, one unit or one port."""
    first: dict[tuple[str, str], str] = {}
    for name, service in spec.services.items():
        here: Path = ("spec", "services", name)
        target = target_name(service.target)
        port = service.args.get("port", SGLANG_PORT)
        claims = (
            ("gpus", service.gpus, f"GPU group {service.gpus}"),
            ("unit", f"{target}/{service.unit}", f"unit {service.unit} in {target}"),
            ("port", f"{target}/{port}", f"port {port} in {target}"),
        )
        for key, claim, words in claims:
            other = first.setdefault((key, claim), name)
            if other == name:
                continue
            path: Path = (*here, "args", "port") if key == "port" else (*here, key)
            theirs: Path = ("spec", "services", other, *path[3:])
            uses = (
                (theirs, (*here, "target"), ("spec", "services", other, "target"))
                if key != "gpus"
                else (theirs,)
            )
            yield Problem(
                path, f"found {words}, expected one that service {other} does not have already", uses=uses
            )


def _check_group(here: Path, service: Service, spec: Spec) -> Iterator[Problem]:
    path: Path = (*here, "gpus")
    group = spec.gpus.get(service.gpus)
    theirs: Path = ("spec", "gpus", service.gpus)
    if group is None:
        names = ", ".join(sorted(spec.gpus)) or "none is declared"
        yield Problem(
            path, f"found {show(service.gpus)}, expected the name of a GPU group: {names}", uses=(theirs,)
        )
    elif group.driver != "nvidia":
        text = f"found {show(service.gpus)}, a group on {group.driver}, expected a group on nvidia"
        yield Problem(path, text, uses=((*theirs, "driver"),))


def _check_args(here: Path, service: Service) -> Iterator[Problem]:
    args: Path = (*here, "args")
    for name, value in service.args.items():
        path = (*args, name)
        if secret_setting(name, value) or any(secret_setting(name, item) for item in _items(value)):
            yield Problem(path, f"found a secret given as a value, {_IN_SECRETS}")
            continue
        if not _FLAG.fullmatch(name):
            plain = name.strip("-").replace("_", "-")
            text = f'found a name that is not written as SGLang writes its flags, expected letters, digits and -, without leading dashes: "{plain}"'
            yield Problem(path, text, at_key=True)
        if any(isinstance(item, str) and not _one_line(item) for item in _items(value)):
            yield Problem(
                path, f"found {show(value, path)} with a control character in it, expected one line of text"
            )
    port = service.args.get("port", SGLANG_PORT)
    if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
        yield Problem((*args, "port"), f"found {show(port)}, expected a port: a whole number from 1 to 65535")
    models = [service.args[name] for name in ("model-path", "model") if name in service.args]
    if not models:
        text = "found nothing, expected the path or name of a model: SGLang cannot start without one"
        yield Problem((*args, "model-path"), text, uses=((*args, "model"),))
    for name in ("model-path", "model"):
        if name in service.args and not (isinstance(service.args[name], str) and service.args[name]):
            yield Problem(
                (*args, name), f"found {show(service.args[name])}, expected the path or name of a model"
            )


def _items(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def _one_line(text: str) -> bool:
    return not any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 or c in "\u2028\u2029" for c in text)


def _check_parallel(here: Path, service: Service, spec: Spec) -> Iterator[Problem]:
    """Tensor times pipeline parallel against the GPUs of the group, on one node."""
    args: Path = (*here, "args")
    group = spec.gpus.get(service.gpus)
    given = [name for name in _TENSOR if service.args.get(name) is not None]
    for name in given[1:]:
        yield Problem(
            (*args, name),
            f"found a second name of {given[0]}, expected one of them",
            uses=((*args, given[0]),),
        )
    tensor, tensor_at = _size(service, _TENSOR)
    pipeline, pipeline_at = _size(service, _PIPELINE)
    for name, size in ((tensor_at, tensor), (pipeline_at, pipeline)):
        if size is None:
            yield Problem((*args, name), f"found {show(service.args[name])}, expected a whole number from 1")
    nodes = service.args.get("nnodes", 1)
    if group is None or tensor is None or pipeline is None or nodes not in {1, "1"}:
        return
    available = group.select.count if isinstance(group.select, ByNuma) else len(group.select)
    if tensor * pipeline > available:
        path = (*args, tensor_at if tensor > 1 else pipeline_at)
        asked = f"{tensor}" if pipeline == 1 else f"{tensor} x {pipeline} (pipeline)"
        text = f"found {asked}, expected at most {available}: so many GPUs does group {service.gpus} select"
        yield Problem(path, text, uses=(("spec", "gpus", service.gpus, "select"),))


def _size(service: Service, names: tuple[str, ...]) -> tuple[int | None, str]:
    """A parallel size and the name it was given under; None where it is not a whole number from 1."""
    name = next((name for name in names if service.args.get(name) is not None), names[0])
    value = service.args.get(name)
    if value is None:
        return 1, name
    text = "" if isinstance(value, bool) else str(value)
    return (int(text) if re.fullmatch(r"[1-9][0-9]{0,5}", text) else None), name


def _check_env(here: Path, service: Service) -> Iterator[Problem]:
    for name, value in service.env.items():
        path: Path = (*here, "env", name)
        if secret_setting(name, value):
            yield Problem(path, f"found a secret given as a value, {_IN_SECRETS}")
            continue
        if name.startswith("NCCL_"):
            text = 'found an NCCL variable, expected it under "nccl", where it is checked and merged with the P2P verdict'
            yield Problem(path, text, at_key=True)
        if name in _DECIDED:
            text = f"found {name}, expected it left out: {_DECIDED[name]} decides which GPUs the service has"
            yield Problem(path, text, at_key=True)
        if name in service.secrets:
            text = 'found a variable that "secrets" has too, expected it in one of them'
            yield Problem(path, text, at_key=True, uses=((*here, "secrets"),))
        if isinstance(value, str) and not _one_line(value):
            yield Problem(
                path, f"found {show(value, path)} with a control character in it, expected one line of text"
            )


def _check_nccl(here: Path, service: Service) -> Iterator[Problem]:
    values: Mapping[str, str] = {name: str(value) for name, value in service.nccl.items()}
    for name, value in values.items():
        path: Path = (*here, "nccl", name)
        if secret_setting(name, value):
            yield Problem(path, f"found a secret given as a value, {_IN_SECRETS}")
        elif not _one_line(value):
            yield Problem(
                path, f"found {show(value, path)} with a control character in it, expected one line of text"
            )
        elif problem := nccl.check(name, value) or _against_verdict(name, value, service):
            yield Problem(path, problem, uses=((*here, "p2p"),))


def _against_verdict(name: str, value: str, service: Service) -> str | None:
    """Law 4: the P2P verdict decides; the spec says what it wants with ``p2p``."""
    off = (name == "NCCL_P2P_DISABLE" and nccl.strtoll(value)[0] == 1) or (
        name == "NCCL_P2P_LEVEL" and value in {"LOC", "0"}
    )
    if name == "NCCL_P2P_DISABLE" and not off:
        return f'found {show(value)}, expected it left out: the P2P verdict decides it; to insist on P2P use "p2p: required"'
    if off and service.p2p == "required":
        return f'found {show(value)} with p2p: required, expected it left out, or "p2p: off"'
    return None


def _check_gate(here: Path, service: Service) -> Iterator[Problem]:
    gate = service.gate
    levels = gate.benchmark.concurrency
    concurrency: Path = (*here, "benchmark", "concurrency")
    for number, level in enumerate(levels):
        if level in levels[:number]:
            yield Problem((*concurrency, number), f"found {level} again, expected each level once")
    for level in gate.require:
        if level not in levels:
            listed = ", ".join(str(known) for known in levels)
            text = f"found a floor for a concurrency that is not measured, expected one of benchmark.concurrency: {listed}"
            yield Problem((*here, "require", str(level)), text, at_key=True, uses=(concurrency,))
    if not gate.smoke:
        text = (
            "found no prompt, expected at least one with a known answer: without any, nothing would be proved"
        )
        yield Problem((*here, "smoke"), text)
    for number, prompt in enumerate(gate.smoke):
        yield from _check_prompt((*here, "smoke", number), prompt)


def _check_prompt(path: Path, prompt: SmokePrompt) -> Iterator[Problem]:
    given = [value for value in (prompt.expect, prompt.expect_regex) if value is not None]
    if len(given) != 1:
        found = "both expect and expectRegex" if given else "a prompt without an expected answer"
        yield Problem(path, f"found {found}, expected one of expect and expectRegex")
    if prompt.expect_regex is not None and (problem := _bad_regex(prompt.expect_regex)):
        text = f"found {show(prompt.expect_regex)}, expected a regular expression of Python's re: {problem}"
        yield Problem((*path, "expectRegex"), text)


def _bad_regex(pattern: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about future syntax; the pattern works today
        try:
            re.compile(pattern)
        except (re.error, OverflowError) as error:
            return str(error)
        except RecursionError:
            return "too deeply nested"
    return ""
