"""``agent selftest``: what the agent proves before it relies on it, on demand and shown."""

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Awaitable, Callable, Mapping

from agent.app.only_agent import only_agent
from agent.app.paths import Paths
from agent.app.progress_view import ProgressPrinter
from agent.app.readonly import remembered, spec_or_none
from agent.app.selftest_nccl import nccl
from agent.app.selftest_users import GOOD, NOT_GOOD, NOT_JUDGED, refuse_used
from agent.app.selftest_view import render_p2p
from agent.app.terminal import Style, use_color
from agent.app.wiring import Choice, open_host
from agent.core.errors import TerminalError
from agent.core.fact import Known, say
from agent.core.inputs import Inputs
from agent.core.observation import Observation
from agent.core.selection import select
from agent.core.verdict import P2PVerdict, circumstances
from agent.loop.health import HealthProbe
from agent.loop.observe import Observer
from agent.loop.prove import put_to_the_test
from agent.loop.store import saved_kernel_log
from agent.ports import Ports

_ADDRESS = re.compile(r"(?:([0-9a-f]{4}):)?([0-9a-f]{2}:[01][0-9a-f]\.[0-7])")


async def selftest(args: argparse.Namespace, choice: Choice, paths: Paths) -> int:
    tests: Mapping[str, Callable[[argparse.Namespace, Choice, Paths], Awaitable[int]]] = {
        "p2p": p2p,
        "nccl": nccl,
    }
    return await tests[args.test](args, choice, paths)


async def p2p(args: argparse.Namespace, choice: Choice, paths: Paths) -> int:
    """Nothing is remembered: the agent tests for itself when it is to decide. Exit codes as the reference has them."""
    with contextlib.ExitStack() as held:
        if choice.kind == "sim":  # a simulated host is a file, and one process at a time writes it
            held.enter_context(only_agent(choice.kind, paths))
        opened = open_host(choice, paths)
        health = HealthProbe(opened.ports)
        try:
            verdict, before = await _test(args, opened.ports, health, paths)
        finally:
            await health.close()
            await opened.close()
    bound_to = circumstances(before, verdict.gpus)
    if args.output == "json":
        document = {"simulated": opened.ports.simulated, "full": args.full, "circumstances": bound_to}
        print(json.dumps({**verdict.model_dump(mode="json"), **document}, indent=2))
    else:
        style = Style(on=use_color(sys.stdout))
        print(render_p2p(verdict, before, style, profile=opened.ports.simulated, full=args.full))
    return _code(verdict)


async def _test(
    args: argparse.Namespace, ports: Ports, health: HealthProbe, paths: Paths
) -> tuple[P2PVerdict, Observation]:
    host, memory = spec_or_none(paths), remembered(paths)
    observer = Observer(ports, health, kernel_log=saved_kernel_log(paths.state))

    async def look() -> Observation:
        return await observer.observe(host, memory)

    obs = await look()
    inputs = Inputs(host, memory.generation, obs, memory, ports.clock.now(), bool(ports.simulated))
    gpus = chosen(args.gpus, obs, named=_named(inputs))
    if not args.force:
        await refuse_used(ports, gpus)
    printer = ProgressPrinter(sys.stderr, use_color(sys.stderr))
    verdict, before = await put_to_the_test(
        ports, look, gpus, printer.activity, full=args.full, seed=args.seed
    )
    (printer.done if _code(verdict) == GOOD else printer.fail)(f"P2P self-test: {verdict.summary()}")
    return verdict, before


def _named(inputs: Inputs) -> tuple[str, ...] | None:
    """GPUs that the spec gives to nvidia; None without a spec that names any."""
    groups = inputs.spec.gpus
    members = [
        a for name, found in select(inputs).groups.items() if groups[name].driver == "nvidia" for a in found
    ]
    return tuple(members) if groups else None


def chosen(asked: str | None, obs: Observation, named: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """GPUs to test, ascending: those asked for, or those on nvidia that ``named`` has (all on nvidia without it).

    Raises TerminalError where one is no GPU on nvidia, or there is none at all.
    """
    pci = obs.pci
    if not isinstance(pci, Known):
        raise TerminalError(f"the PCI tree cannot be read: {say(pci)}", reason="PciUnknown")
    on_nvidia = [f.address for f in pci.value.functions.values() if f.is_gpu and f.driver == Known("nvidia")]
    if asked is None:
        found = sorted(a for a in on_nvidia if named is None or a in named)
        if not found:
            step = "bind them, or name others with --gpus"
            raise TerminalError("no GPU to test is on nvidia", reason="GpusMissing", next_step=step)
        return tuple(found)
    found = sorted({_address(text) for text in asked.split(",") if text.strip()})
    for address in found:
        function = pci.value.functions.get(address)
        if address not in on_nvidia:
            driver = "not there" if function is None else f"driver {say(function.driver)}"
            step = f"GPUs on nvidia here: {', '.join(sorted(on_nvidia)) or 'none'}"
            raise TerminalError(
                f"--gpus: {address} is no GPU on nvidia ({driver})", reason="GpusMissing", next_step=step
            )
    return tuple(found)


def _address(text: str) -> str:
    match = _ADDRESS.fullmatch(text.strip().lower())
    if match is None:
        raise TerminalError(
            f"--gpus: found {text.strip()!r}, expected a PCI address such as 0000:01:00.0",
            reason="GpusMissing",
        )
    return f"{match[1] or '0000'}:{match[2]}"


def _code(verdict: P2PVerdict) -> int:
    if not verdict.controls_ok or verdict.result == "not-run":
        return NOT_JUDGED
    return GOOD if verdict.result == "good" else NOT_GOOD
