"""The NCCL check where a service lives: our script, with the service's interpreter, in the service's environment."""

import errno
import json
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePosixPath

from pydantic import ValidationError

from agent.core.nccl_verdict import NcclStep
from agent.host.command import ExpiredError, run_command
from agent.host.entering import entering
from agent.host.target_names import prefix_for
from agent.ports import NcclSteps

_OUTPUT_LIMIT = 16 << 20
_BEGIN = 20.0  # seconds beside the check's own: to get there, and to end what is left
# It is private: the environment may hold what is nobody's business. The script's directory is the first on Python's
# path, so it has to be alone there. A session of its own outlives an agent that is killed: the launcher finds within a
# second that nobody reads any more, ends its processes, and then the directory is removed. Of the agent's own
# environment the check gets what a unit of systemd has from the start, and no more.
_SHELL = """\
umask 077
cd / && dir=$(mktemp -d "${{TMPDIR:-/tmp}}/gpu-host-agent-nccl.XXXXXXXX") && cd "$dir" || exit 125
cat >nccl_check.py <<'{mark}'
{program}
{mark}
cat >environment <<'{mark}'
{environment}
{mark}
cat >run <<'{mark}'
trap 'rm -rf "$1"' EXIT
env -i PATH="$PATH" HOME="${{HOME:-/root}}" LANG=C.UTF-8 \\
  sh -c '. ./environment; exec timeout -k 5 {limit} "$@"' sh {python} nccl_check.py {request}
{mark}
exec setsid -w sh ./run "$dir" </dev/null
"""


def _prefix(name: str) -> tuple[str, ...]:
    return () if name == "host" else prefix_for(name)


@dataclass(frozen=True, slots=True)
class TargetNcclCheck:
    """``NcclCheckPort``. ``prefix`` gives the argv in front of ``sh -s`` for a target; none for this host."""

    prefix: Callable[[str], Sequence[str]] = _prefix

    async def run(
        self,
        target: str,
        python: str,
        env: Mapping[str, str],
        request: Mapping[str, object],
        limit: float,
    ) -> NcclSteps:
        there = entering(_patient(self.prefix(target), limit + _BEGIN))
        text = script(python, env, request, limit)
        ended = ""
        try:
            done = await run_command(
                there.argv, limit + _BEGIN, stdin=text.encode(), limit=_OUTPUT_LIMIT, error_limit=1 << 20
            )
        except ExpiredError as error:
            await there.give_up()
            output, ended = error.stdout, f"it did not end within {limit + _BEGIN:g} s"
        except BaseException:
            await there.give_up()
            raise
        else:
            output = done.stdout
            if done.status == 124:
                ended = f"it did not end within {limit:g} s"
            elif done.status != 0 and not output.strip():
                words = done.stderr.strip().rpartition("\n")[2][:300] or f"status {done.status}"
                raise OSError(errno.EIO, f"{target}: {python}: {words}")
        return NcclSteps(tuple(_steps(output)), ended)


def _patient(prefix: Sequence[str], seconds: float) -> tuple[str, ...]:
    """Where PID 1 ends what it started for us, it does so later: this takes longer than any question."""
    setting = "--property=RuntimeMaxSec="
    return tuple(f"{setting}{seconds + 10:.0f}" if word.startswith(setting) else word for word in prefix)


def script(python: str, env: Mapping[str, str], request: Mapping[str, object], limit: float) -> str:
    """For ``sh -s``. Values of the environment are in a private file and on no command line."""
    if not PurePosixPath(python).is_absolute():
        raise OSError(errno.EINVAL, f"{python!r}: expected the interpreter's path from the root")
    program = resources.files("agent.selftest").joinpath("nccl_check.py").read_text(encoding="utf-8")
    lines = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    return _SHELL.format(
        mark=f"end-{secrets.token_hex(16)}",
        program=program,
        environment="\n".join(lines),
        limit=f"{limit:.0f}",
        python=shlex.quote(python),
        request=shlex.quote(json.dumps(dict(request))),
    )


def _steps(output: str) -> list[NcclStep]:
    """Every whole line. Raises OSError (EPROTO) where one is nothing that our script says."""
    found = []
    lines = output.split("\n")
    for line in lines[:-1]:  # the last is empty, or was cut short
        try:
            found.append(NcclStep.model_validate_json(line))
        except ValidationError as error:
            raise OSError(
                errno.EPROTO, f"the NCCL check said what is not understood: {line[:200]!r}"
            ) from error
    return found
