"""``agent selftest nccl SERVICE``: NCCL as that service would use it, tried without the service."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping

from agent.app.nccl_view import render_nccl
from agent.app.paths import Paths
from agent.app.progress_view import ProgressPrinter
from agent.app.readonly import inputs_now
from agent.app.selftest_users import GOOD, NOT_GOOD, NOT_JUDGED, refuse_used
from agent.app.terminal import Style, use_color, width
from agent.app.wiring import Choice, open_host, require_root
from agent.core.errors import TerminalError
from agent.core.nccl_verdict import NcclCheck, NcclRun, judge
from agent.core.render import P2P_OFF_ENV
from agent.core.resolve import ResolvedService, resolve
from agent.core.revision import Revision
from agent.ports import NcclCheckPort

LIMIT = 900.0  # seconds for one run; its steps have deadlines of their own


async def nccl(args: argparse.Namespace, choice: Choice, paths: Paths) -> int:
    """Nothing is remembered. Exit codes as the reference has them."""
    opened = open_host(choice, paths)
    try:
        port = opened.ports.nccl_check
        if port is None:
            raise TerminalError(
                "a simulated host has no interpreter and no NCCL that could be tried",
                reason="NotOnSimulatedHost",
                next_step="run it on the host itself, with --host real",
            )
        require_root(choice)
        inputs, _ = await inputs_now(choice, paths)
        service, revision = chosen(args.service, resolve(inputs).services)
        if not args.force:
            await refuse_used(opened.ports, revision.gpus)
        printer = ProgressPrinter(sys.stderr, use_color(sys.stderr))
        printer.activity(f"NCCL check of {args.service}")
        checked = await check(service, revision, port, control=args.control)
    finally:
        await opened.close()
    (printer.done if code(checked) == GOOD else printer.fail)(
        f"NCCL check of {args.service}: {checked.run.result}"
    )
    if args.output == "json":
        print(json.dumps(dataclasses.asdict(checked), indent=2))
    else:
        print(render_nccl(checked, Style(on=use_color(sys.stdout)), max(60, width())))
    return code(checked)


def chosen(name: str, services: Mapping[str, ResolvedService]) -> tuple[ResolvedService, Revision]:
    """The service and what it would be started with now. Raises TerminalError where there is none such."""
    service = services.get(name)
    if service is None:
        step = f"services of the spec: {', '.join(services) or 'none'}"
        raise TerminalError(f"the spec has no service {name!r}", reason="NoSuchService", next_step=step)
    if service.desired is None:
        why = "; ".join(refusal.message for refusal in service.refusals) or service.reason
        raise TerminalError(f"{name} cannot be rendered now: {why}", reason="NotRenderable")
    if len(service.gpus) < 2:
        step = "nothing is to be tried: NCCL has nobody to talk to"
        raise TerminalError(f"{name} has one GPU", reason="OneGpu", next_step=step)
    return service, service.desired


async def check(
    service: ResolvedService, revision: Revision, port: NcclCheckPort, *, control: bool
) -> NcclCheck:
    """As the service is started, then with P2P off where that may tell more."""
    run = await _run(port, service, revision, revision.env, p2p=revision.p2p)
    again = control or (run.result != "good" and revision.p2p)
    off = {**revision.env, **P2P_OFF_ENV}
    second = await _run(port, service, revision, off, p2p=False) if again else None
    return NcclCheck(
        service.name, revision.target, revision.gpus, revision.p2p, service.p2p.reason, run, second
    )


async def _run(
    port: NcclCheckPort, service: ResolvedService, revision: Revision, env: Mapping[str, str], *, p2p: bool
) -> NcclRun:
    world = len(revision.gpus)
    told = await port.run(revision.target, service.service.python, env, {"world": world}, LIMIT)
    return judge(told.steps, world, p2p=p2p, ended=told.ended)


def code(checked: NcclCheck) -> int:
    if checked.run.result == "not-run":
        return NOT_JUDGED
    return GOOD if checked.run.result == "good" else NOT_GOOD
