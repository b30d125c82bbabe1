"""Golden cases of P2P: when it is tested, and what the verdict does to the service."""

from typing import Any

from agent.core.fact import Known, Unknown
from agent.core.inputs import Inputs
from agent.core.memory import Quarantine
from agent.core.observation import Holder, KernelEvent
from tests.core import build
from tests.core.build import BOOT, FIRST, NOW, SPLIT, Change, service, spec, type_host
from tests.core.faults import EXPORTER
from tests.core.verdicts import converged, split, verdict

FAULT = KernelEvent(
    "page-fault", FIRST[1], 7, NOW - 100, NOW - 50, "AMD-Vi: Event logged [IO_PAGE_FAULT ...]", 0x30
)
TEST_FAILED = build.with_memory(
    retry_after={"p2p/selftest/qwen": NOW + 12}, errors={"p2p/selftest/qwen": "no CUDA in lxc:129"}
)
UNTESTED = build.with_memory(verdicts=())


def idle(*changes: Change, policy: dict[str, Any] | None = None, **of_service: Any) -> Inputs:
    """Split, and the service not running."""
    host = spec(policy=policy or {}, gpus=SPLIT, services=service(**of_service))
    return build.made(type_host(host, split()), *changes)


CASES: dict[str, Inputs] = {
    "nothing-to-do": converged(),
    "nothing-to-do-with-P2P-on": converged(result="good"),
    "never-tested": idle(UNTESTED),
    "good": idle(verdict("good")),
    "P4-corrupt": idle(),
    "P2-hung": idle(verdict("hung")),
    "off-by-the-spec": idle(UNTESTED, p2p="off"),
    "one-gpu-has-no-peer": type_host(
        spec(
            gpus={"inference": {"select": [FIRST[0]], "driver": "nvidia"}},
            services=service(args={"model-path": "/m"}),
        ),
        build.stopped(),
    ),
    "stale-after-a-boot": idle(verdict("good"), build.platform(boot_id=Known("another boot"))),
    "P16-stale-after-acs-came-back": idle(
        verdict("good"), build.function("0000:00:01.1", acs_ctl=Known(0x1F))
    ),
    "stale-while-the-service-runs": converged(None, build.with_memory(verdicts=()), result="corrupt"),
    "controls-failed": idle(verdict("good", controls_ok=False, control_detail="host bounce failed")),
    "revoked-by-a-page-fault-in-service": converged(
        None, lambda i: build.with_obs(i, kernel_events=Known((FAULT,))), result="good"
    ),
    "required-and-good": idle(verdict("good"), p2p="required"),
    "required-and-corrupt": idle(p2p="required"),
    "required-and-never-tested": idle(UNTESTED, p2p="required"),
    "required-and-it-cannot-be-tested": idle(
        UNTESTED, build.held(FIRST[2], Holder("process", "/dev/nvidia5", 77, "jupyter")), p2p="required"
    ),
    "required-and-the-test-failed-to-run": idle(UNTESTED, TEST_FAILED, p2p="required"),
    "auto-and-the-test-failed-to-run": idle(UNTESTED, TEST_FAILED),
    "required-and-the-test-cannot-work": idle(
        UNTESTED, build.with_memory(terminal={"p2p/selftest/qwen": "no CUDA in lxc:129"}), p2p="required"
    ),
    "auto-and-it-cannot-be-tested": idle(
        UNTESTED, build.held(FIRST[2], Holder("process", "/dev/nvidia5", 77, "jupyter"))
    ),
    "a-monitor-does-not-disturb-a-test": idle(
        UNTESTED,
        build.held(FIRST[2], Holder("process", "/dev/nvidia5", 79, "dcgm-exporter", EXPORTER)),
        policy={"quiesce": [EXPORTER]},
    ),
    "a-gpu-in-quarantine-is-not-tested": idle(
        UNTESTED,
        build.with_memory(
            quarantine={
                FIRST[2]: Quarantine(
                    address=FIRST[2],
                    reason="GpuLost",
                    message="Xid 79: it has fallen off the bus",
                    boot_id=BOOT,
                    at=NOW,
                )
            }
        ),
    ),
    "good-and-the-boot-is-unreadable-while-it-runs": converged(
        None, build.platform(boot_id=Unknown("it did not answer")), result="good"
    ),
    "a-good-verdict-for-other-gpus": idle(UNTESTED, verdict("good", FIRST[:3])),
}
