"""``agent``: the command line. Commands are imported when they are run: ``status`` must be instant."""

import argparse
import math
import os
import sys
from collections.abc import Sequence

from agent.app.paths import choose_host, paths_for

OK, ERROR, USAGE = 0, 1, 64
EPILOG = """\
exit codes: plan: 0 nothing to do, 2 changes, 3 blocked or refused; status: 0 Ready, 3 not Ready, 4 unknown or stale;
selftest: 0 all right, 3 not, 4 it could not judge; otherwise 0 done, 1 error, 64 usage"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def _factor(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value <= 0:
        raise argparse.ArgumentTypeError(f"found {text}, expected a number above 0")
    return value


def _parser() -> argparse.ArgumentParser:
    common = _Parser(add_help=False)
    common.add_argument(
        "--spec", metavar="FILE", help="the spec (default: ROOT/etc/gpu-host-agent/spec.yaml)"
    )
    common.add_argument("--root", metavar="DIR", help="keep all state under DIR")
    common.add_argument(
        "--host", default="auto", metavar="auto|real|sim[:PROFILE]",
        help="which host: auto is simulated only without any NVIDIA device and without a spec under /etc",
    )  # fmt: skip
    common.add_argument(
        "--scenario", metavar="FILE", help="simulated host: a scenario with initial state, faults and events"
    )
    common.add_argument(
        "--time-factor", type=_factor, metavar="N", help="simulated host: N simulated seconds per real second"
    )
    parser = _Parser(
        prog="agent", description="Makes a GPU host match one spec, and keeps it so.", epilog=EPILOG
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    def command(name: str, text: str) -> _Parser:
        return commands.add_parser(name, help=text, description=text, parents=[common])

    command("run", "the daemon: watch the spec and the host, and converge")
    status = command("status", "what runs, how fast, and why like this")
    status.add_argument("-o", "--output", choices=["table", "wide", "json", "yaml"], default="table")
    plan = command("plan", "what would be done now, and why")
    plan.add_argument("-o", "--output", choices=["text", "json"], default="text")
    command("apply", "converge once, with progress, and exit")
    command("approve", "let exactly this blocked plan run, once").add_argument("plan_id", metavar="PLAN-ID")
    command("retry", "try a rejected or failed thing again").add_argument("name", metavar="SERVICE|GPU")
    command("validate", "check spec files").add_argument("files", nargs="+", metavar="FILE")
    observe = command("observe", "what this host is like: known, absent and unknown")
    observe.add_argument("-o", "--output", choices=["table", "json"], default="table")
    command("explain", "what a spec field means, its value and why").add_argument("path", metavar="PATH")
    command("schema", "print the JSON Schema of the spec")
    text = "test now whether what is said of this host is so"
    tests = commands.add_parser("selftest", help=text, description=text).add_subparsers(
        dest="test", metavar="TEST", required=True, parser_class=_Parser
    )
    text = "is the data right that GPUs write into each other's memory?"
    p2p = tests.add_parser("p2p", help=text, description=text, parents=[common])
    p2p.add_argument(
        "--gpus", metavar="ADDRESS,...", help="PCI addresses (default: the spec's GPUs on nvidia)"
    )
    p2p.add_argument("--full", action="store_true", help="more sizes and patterns, and nearly all memory")
    p2p.add_argument("--seed", type=int, metavar="N", help="the seed of an earlier test, to repeat its data")
    p2p.add_argument("--force", action="store_true", help="also test GPUs that somebody uses")
    p2p.add_argument("-o", "--output", choices=["text", "json"], default="text")
    text = "do NCCL's collectives work between a service's GPUs, with its own interpreter and environment?"
    nccl = tests.add_parser("nccl", help=text, description=text, parents=[common])
    nccl.add_argument("service", metavar="SERVICE", help="a service of the spec; it must be stopped")
    nccl.add_argument(
        "--control", action="store_true", help="once more with NCCL's P2P off, also after a success"
    )
    nccl.add_argument("--force", action="store_true", help="also on GPUs that somebody uses")
    nccl.add_argument("-o", "--output", choices=["text", "json"], default="text")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.version:
        from agent import __version__

        print(__version__)
        return OK
    if args.command is None:
        parser.print_help()
        return USAGE
    code = OK
    try:
        code = _dispatch(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _forget_stdout()  # whoever read it has gone, and knows
    except OSError as error:
        _forget_stdout()
        print(f"agent: the output cannot be written: {error.strerror or error}", file=sys.stderr)
        return ERROR
    return code


def _forget_stdout() -> None:
    """What is still buffered goes nowhere, quietly."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(args: argparse.Namespace) -> int:
    kind, profile = choose_host(args.host)
    if args.host.partition(":")[0] not in {"auto", "real", "sim"}:
        print(f"agent: --host {args.host}: expected auto, real, sim or sim:PROFILE", file=sys.stderr)
        return USAGE
    paths = paths_for(args.root, args.spec, kind)
    if args.command == "status":
        from agent.app.status_command import status

        return status(paths, args.output)
    from agent.app import commands

    return commands.run(args, kind, profile, paths)


if __name__ == "__main__":
    sys.exit(main())
