"""The commands other than ``status``."""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from agent.app.paths import Paths
from agent.app.progress_view import ProgressPrinter
from agent.app.terminal import use_color
from agent.core.errors import AgentError, SpecError
from agent.core.plan import Plan, render_plan
from agent.core.spec_load import load

if TYPE_CHECKING:
    from agent.app.wiring import Choice

OK, ERROR, CHANGES, BLOCKED = 0, 1, 2, 3
MOST_PASSES = 30


def run(args: argparse.Namespace, kind: str, profile: str, paths: Paths) -> int:
    commands: dict[str, Callable[[], int]] = {
        "run": lambda: _async(_daemon, args, kind, profile, paths),
        "apply": lambda: _async(_apply, args, kind, profile, paths),
        "plan": lambda: _async(_plan, args, kind, profile, paths),
        "observe": lambda: _async(_observe, args, kind, profile, paths),
        "validate": lambda: _validate(args.files),
        "approve": lambda: _request(paths, "approve", args.plan_id, f"plan {args.plan_id} may run once"),
        "retry": lambda: _request(
            paths,
            "retry",
            args.name,
            f"{args.name} will be tried again, or forgotten where the spec does not have it",
        ),
        "explain": lambda: _explain(args.path, paths),
        "schema": _schema,
        "selftest": lambda: _async(_selftest, args, kind, profile, paths),
    }
    try:
        return commands[args.command]()
    except SpecError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return ERROR
    except AgentError as error:
        print(
            f"agent: {error}" + (f"\n  next: {error.next_step}" if error.next_step else ""), file=sys.stderr
        )
        return ERROR
    except BrokenPipeError:
        raise  # whoever read our output has gone: main ends quietly
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"agent: {where}{error.strerror or error}", file=sys.stderr)
        return ERROR


def _async(command: Callable[..., object], *args: object) -> int:
    return asyncio.run(command(*args))  # type: ignore[arg-type]


def _choice(args: argparse.Namespace, kind: str, profile: str) -> "Choice":
    from agent.app.wiring import Choice

    return Choice(kind, profile, Path(args.scenario) if args.scenario else None, args.time_factor)


async def _daemon(args: argparse.Namespace, kind: str, profile: str, paths: Paths) -> int:
    from agent.app.daemon import daemon

    return await daemon(_choice(args, kind, profile), paths)


async def _apply(args: argparse.Namespace, kind: str, profile: str, paths: Paths) -> int:
    from agent.app.only_agent import only_agent
    from agent.app.wiring import assemble, require_root

    require_root(_choice(args, kind, profile))
    printer = ProgressPrinter(sys.stdout, use_color(sys.stdout))
    with only_agent(kind, paths):
        assembly = assemble(_choice(args, kind, profile), paths)
        if assembly.ports.simulated:
            printer.step(_simulated_words(assembly.ports.simulated))
        assembly.progress = printer.activity
        try:
            for _ in range(MOST_PASSES):
                result = await assembly.reconciler.run_pass("apply")
                if problems := assembly.reconciler.specs.problems:
                    raise SpecError(problems)
                waits = not result.again and result.plan is not None and bool(result.plan.refusals)
                good = not result.blocked and not (result.executed and result.executed.failed) and not waits
                (printer.done if good else printer.fail)(result.sentence)
                if not result.again:
                    break
            return (
                OK
                if result.plan is not None and not result.plan.actions and not result.plan.refusals
                else BLOCKED
            )
        finally:
            await assembly.close()


async def _plan(args: argparse.Namespace, kind: str, profile: str, paths: Paths) -> int:
    """Plans on a copy of the memory: nothing is written, and a running daemon is not disturbed."""
    from agent.app.readonly import plan_only

    plan, blocked, approvable, simulated = await plan_only(_choice(args, kind, profile), paths)
    if args.output == "json":
        print(json.dumps({"simulated": simulated, **_plan_document(plan, blocked)}, indent=2))
    else:
        _say_simulated(simulated)
        print(render_plan(plan), end="")
        if blocked:
            print(
                f"blocked: {blocked}"
                + (f"; to let exactly this plan run: agent approve {plan.id}" if approvable else "")
            )
    if blocked or (plan.refusals and not plan.actions):
        return BLOCKED
    return CHANGES if plan.actions else OK


def _simulated_words(profile: str) -> str:
    return f"SIMULATED HOST (profile {profile}): nothing below is this machine"


def _say_simulated(profile: str) -> None:
    if profile:
        print(_simulated_words(profile))


def _plan_document(plan: Plan, blocked: str) -> dict[str, object]:
    return {
        "id": plan.id,
        "generation": plan.generation,
        "disruption": str(plan.disruption),
        "blocked": blocked,
        "actions": [
            {
                "kind": a.kind, "verb": a.verb, "target": a.target, "description": a.description, "stage": a.stage.name.lower(),
                "disruption": str(a.disruption), "touches": list(a.touches), "hits": list(a.hits), "undo": a.undo, "why": a.why,
            }
            for a in plan.actions
        ],
        "drifts": [
            {"kind": d.kind, "target": d.target, "field": d.field, "desired": d.desired, "observed": d.observed, "why": d.why}
            for d in plan.drifts
        ],
        "refusals": [
            {"kind": r.kind, "target": r.target, "reason": r.reason, "message": r.message, "nextStep": r.next_step}
            for r in plan.refusals
        ],
    }  # fmt: skip


async def _observe(args: argparse.Namespace, kind: str, profile: str, paths: Paths) -> int:
    from agent.app.observe_dict import observation_to_dict
    from agent.app.observe_view import render_observation
    from agent.app.readonly import observe_only

    obs, simulated = await observe_only(_choice(args, kind, profile), paths)
    if args.output == "json":
        print(json.dumps({"simulated": simulated, **observation_to_dict(obs)}, indent=2))
    else:
        _say_simulated(simulated)
        print(render_observation(obs, color=use_color(sys.stdout)))
    return OK


async def _selftest(args: argparse.Namespace, kind: str, profile: str, paths: Paths) -> int:
    from agent.app.selftest_command import selftest

    return await selftest(args, _choice(args, kind, profile), paths)


def _validate(files: list[str]) -> int:
    failed = False
    for name in files:
        try:
            loaded = load(Path(name).read_text(encoding="utf-8"), name)
        except SpecError as error:
            failed = True
            print("\n".join(error.problems), file=sys.stderr)
        except (OSError, UnicodeDecodeError) as error:
            failed = True
            print(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
        else:
            spec = loaded.spec.spec
            print(f"{name}: good ({len(spec.gpus)} GPU groups, {len(spec.services)} services)")
    return ERROR if failed else OK


def _request(paths: Paths, verb: str, argument: str, said: str) -> int:
    """A request is a file that only root can leave; the next pass, or a running daemon at once, takes it."""
    from agent.loop.store import leave_request

    if not argument or "/" in argument or argument.startswith("."):
        print(f"agent: {argument!r} is not a name that {verb} takes", file=sys.stderr)
        return ERROR
    if problem := _unknown_name(paths, verb, argument):
        print(f"agent: {problem}", file=sys.stderr)
        return ERROR
    leave_request(paths.state, verb, argument)
    print(said + ": the next pass takes it up")
    return OK


def _unknown_name(paths: Paths, verb: str, argument: str) -> str:
    """Why the last status knows nothing of that name; "" when it does, or when there is no status to ask."""
    try:
        status = json.loads(paths.status.read_bytes())
    except (OSError, ValueError):
        return ""
    if verb == "approve":
        plan = status.get("plan") or {}
        if not plan.get("approve"):
            return "no plan waits for an approval"
        return "" if argument == plan["id"] else f"no plan {argument} waits; plan {plan['id']} does"
    names = [s["name"] for s in status.get("services", ())] + [g["address"] for g in status.get("gpus", ())]
    names += [c["type"].partition("/")[2] for c in status.get("conditions", ()) if "/" in c["type"]]
    known = dict.fromkeys(n for n in (*names, *_remembered_names(paths)) if n)
    if argument in known:
        return ""
    return f"{argument} is not known here; known are {', '.join(known) or 'no names'}"


def _remembered_names(paths: Paths) -> list[str]:
    """What the agent remembers a failure, a trial or a promotion of: units too, and services that the spec lost."""
    try:
        memory = json.loads((paths.state / "memory.json").read_bytes())
    except (OSError, ValueError):
        return []
    keys = [*memory.get("failures", {}), *memory.get("terminal", {})]
    named = [n for part in ("promoted", "previous", "trials", "rejected") for n in memory.get(part, {})]
    return [key.rpartition("/")[2] for key in keys] + named


def _explain(path: str, paths: Paths) -> int:
    from agent.app.explain import explain

    text = explain(path, paths)
    if text is None:
        print(f"agent: {path}: no such field in a spec; try: agent explain spec", file=sys.stderr)
        return ERROR
    print(text)
    return OK


def _schema() -> int:
    from agent.core.schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return OK
