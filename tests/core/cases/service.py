"""Golden cases of services: started, restarted, proved, refused, held back."""

from typing import Any

from agent.core.fact import Absent, Known, Unknown
from agent.core.inputs import Inputs
from agent.core.memory import Promoted, Rejected, TrialRecord
from agent.core.observation import Process, Unit
from agent.core.resolve import trial_key
from agent.core.revision import Revision
from tests.core import build
from tests.core.build import FIRST, LAST, NOW, SERVICE, SPLIT, UNIT, Change, service, spec, type_host
from tests.core.faults import gone
from tests.core.verdicts import converged, split

STARTS = build.with_memory(starts=(NOW - 1800, NOW - 1200, NOW - 600))


def stopped(*changes: Change, **of_service: Any) -> Inputs:
    """Split and tested, and the service not running."""
    return build.made(type_host(spec(gpus=SPLIT, services=service(**of_service)), split()), *changes)


def older(inputs: Inputs) -> Revision:
    now = build.desired(inputs)
    return now.model_copy(update={"argv": (*now.argv, "--log-level", "debug")})


def last_good(inputs: Inputs) -> Inputs:
    record = Promoted(revision=older(inputs), generation=1, at=NOW - 7200, benchmark=None)
    return build.with_memory(promoted={"qwen": record})(inputs)


def rejected(inputs: Inputs) -> Inputs:
    key = trial_key(build.desired(inputs), inputs.spec.services["qwen"].gate)
    entry = Rejected(
        revision=key, generation=1, reason="SmokeFailed", message="'What is 7 * 13?': !!!!!!!", at=NOW - 60
    )
    return build.with_memory(rejected={"qwen": entry})(inputs)


def runs_last_good(inputs: Inputs) -> Inputs:
    return build.running(revision=older(inputs))(inputs)


def unfinished(inputs: Inputs) -> Inputs:
    record = TrialRecord(service="qwen", generation=1, revision=build.desired(inputs), phase="benchmark")
    return build.with_memory(trials={"qwen": record})(inputs)


def edited_by_hand(inputs: Inputs) -> Inputs:
    now = build.desired(inputs)
    changed = Process(4242, (*now.argv, "--mem-fraction-static", "0.95"), now.env)
    return build.facts(process=Known(changed))(inputs)


TWO = spec(
    gpus={
        "inference": {"select": list(FIRST), "driver": "nvidia"},
        "second": {"select": list(LAST), "driver": "nvidia"},
    },
    services={
        **service(p2p="off"),
        "glm": {**SERVICE, "unit": "sglang-glm.service", "gpus": "second", "p2p": "off",
                "args": {"model-path": "/models/glm", "tensor-parallel-size": 4, "port": 30001}},
    },
)  # fmt: skip

CASES: dict[str, Inputs] = {
    "nothing-to-do": converged(),
    "not-running": stopped(),
    "promoted-and-died": stopped(build.promoted(), build.stopped(state="failed")),
    "runs-and-not-proved": build.made(stopped(), build.running()),
    "S10-killed-in-the-middle-of-a-trial": build.made(
        stopped(), build.running(), build.promoted(), unfinished
    ),
    "edited-by-hand": converged(None, edited_by_hand),
    "drop-in-removed": converged(None, build.facts(files=Known({}))),
    "process-unreadable": converged(None, build.facts(process=Unknown("setproctitle destroyed it"))),
    "unit-unreadable": converged(None, build.facts(unit=Unknown("it did not answer"))),
    "unit-missing": stopped(build.facts(unit=Known(Unit(UNIT, "not-found", "inactive")))),
    "P8-rejected-with-a-last-good-one": stopped(last_good, rejected),
    "rejected-while-the-last-good-one-runs": stopped(last_good, rejected, runs_last_good),
    "rejected-without-a-last-good-one": stopped(rejected),
    "rejected-and-on-hold": stopped(last_good, rejected, gate={"onFailure": "hold"}),
    "S5-budget-exhausted": stopped(build.promoted(), build.stopped(state="failed"), STARTS),
    "S5-budget-exhausted-and-a-wrong-one-runs": converged(None, edited_by_hand, STARTS),
    "a-spec-edit-is-not-remediation": stopped(STARTS, last_good, runs_last_good),
    "D2-driver-mismatch-in-the-target": converged(
        None, edited_by_hand, build.target(user_driver=Known("565.57.01"))
    ),
    "driver-missing-in-the-target": stopped(build.target(user_driver=Absent("no libcuda"))),
    "D3-target-lost-its-gpus": stopped(build.target(nvml=Unknown("Unknown Error", "NvmlUnknown"))),
    "P12-shm-too-small": converged(None, edited_by_hand, build.target(shm_bytes=Known(64 << 20))),
    "P11-host-memory-failed-with-p2p-off": stopped(
        build.with_memory(
            host_memory={"lxc:129": "NCCL's log says that it cannot share host memory by cuMem"}
        )
    ),
    "model-missing": stopped(build.facts(model_present=Known(value=False))),
    "tensor-parallel-too-large": stopped(
        args={"model-path": "/models/qwen", "tensor-parallel-size": 8, "port": 30000}
    ),
    "target-not-running": stopped(build.target(reachable=Known(value=False))),
    "target-is-another-machine": type_host(
        spec(gpus=SPLIT, services=service(target={"ssh": "root@gpu1"})), split()
    ),
    "not-renderable": stopped(env={"GREETING": "two\nlines"}),
    "last-trial-failed-for-good": stopped(
        build.with_memory(terminal={"service/trial/qwen": "0000:01:00.0 is 100 % busy"})
    ),
    "start-waits-after-a-failure": stopped(
        build.with_memory(
            retry_after={"service/trial/qwen": NOW + 12},
            failures={"service/trial/qwen": 1},
            errors={"service/trial/qwen": "sglang-qwen.service ended (exit-code, status 1)"},
        )
    ),
    "stop-waits-after-a-failure-and-nothing-else-is-done": type_host(
        None,
        build.with_memory(retry_after={"service/stop/qwen": NOW + 12}, failures={"service/stop/qwen": 1}),
    ),
    "group-has-lost-a-gpu": converged(None, gone(FIRST[3], 0)),
    "two-services-one-of-which-must-restart": build.made(
        type_host(TWO, *(build.stopped(n) for n in ("qwen", "glm"))),
        *(build.running(n) for n in ("qwen", "glm")),
        *(build.promoted(n) for n in ("qwen", "glm")),
        build.stopped("glm", "failed"),
    ),
    "two-services-hold-one-card-and-only-one-can-restart": build.made(
        type_host(
            spec(
                gpus={
                    "inference": {"select": list(FIRST), "driver": "nvidia"},
                    "second": {"select": list(LAST[:3]), "driver": "nvidia"},
                    "confidential": {"select": [LAST[3]], "driver": "vfio-pci"},
                },
                services={
                    **service(p2p="off"),
                    "glm": {
                        **SERVICE,
                        "unit": "sglang-glm.service",
                        "gpus": "second",
                        "p2p": "off",
                        "target": "host",
                        "args": {"model-path": "/models/glm", "tensor-parallel-size": 2, "port": 30001},
                    },
                },
            ),
            *(build.stopped(n) for n in ("qwen", "glm")),
        ),
        *(build.running(n) for n in ("qwen", "glm")),
        *(build.promoted(n) for n in ("qwen", "glm")),
        build.held(LAST[3], build.serving(LAST[3]), build.serving(LAST[3], "sglang-glm.service", "")),
        build.target("host", user_driver=Known("565.57.01")),
    ),
    "target-unknown": build.with_obs(stopped(), targets={}),
}
