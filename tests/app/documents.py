"""Status documents for the views, made by the models that the agent publishes with, then dumped as it dumps them."""

import json
from typing import Any

from agent.core.bench import FORMULA, BenchmarkKey, BenchmarkResult, LevelResult, Quantiles
from agent.core.condition import Condition
from agent.core.report import PROOF_REAL, PROOF_SIMULATED
from agent.core.revision import Provenance
from agent.core.status import (
    GpuStatus,
    HostStatus,
    P2PStatus,
    PassStatus,
    PlanStatus,
    ServiceStatus,
    SpecStatus,
    Status,
    TrialStatus,
)

NOW = 1_770_000_000.0
INFERENCE = ("0000:01:00.0", "0000:11:00.0", "0000:61:00.0", "0000:71:00.0")
CONFIDENTIAL = ("0000:81:00.0", "0000:91:00.0", "0000:e1:00.0", "0000:f1:00.0")
EXPLANATION = "the IOMMU translates these GPUs' DMA (group type DMA-FQ)"
P2P_REASON = f"the P2P self-test found 12 of 12 ordered pairs corrupt ({EXPLANATION})"
RULE = Provenance(
    value="1",
    source="rule",
    reason="setproctitle would destroy /proc/PID/environ, which the effective check reads",
)
ARGS = {
    "model-path": "/models/Qwen3.5-122B-A10B", "served-model-name": "qwen3.5-122b", "tensor-parallel-size": "4",
    "attention-backend": "triton", "kv-cache-dtype": "bf16", "reasoning-parser": "qwen3",
    "tool-call-parser": "qwen3_coder", "host": "0.0.0.0", "port": "30000",
}  # fmt: skip
FIGURES = (
    (1, 108.3, 109.8, 36.9), (4, 286.2, 81.6, 24.8), (16, 873.0, 60.6, 33.3), (32, 1359.3, 59.4, 37.5),
    (64, 2327.3, 43.6, 47.2), (128, 2802.4, 41.0, 91.4),
)  # fmt: skip


def level(concurrency: int, throughput: float, each: float, wall: float, **changes: Any) -> LevelResult:
    tokens = 2000 * concurrency
    made = LevelResult(
        concurrency=concurrency, requests=2 * concurrency, ok=2 * concurrency, tokens=tokens, expected_tokens=tokens,
        wall=wall, throughput=throughput, per_request=each,
        ttft=Quantiles(p50=0.12 + concurrency / 100, p95=0.19 + concurrency / 60, p99=0.2 + concurrency / 50),
        itl=Quantiles(p50=1 / each, p95=1.4 / each, p99=2 / each),
        e2e=Quantiles(p50=1000 / each, p95=1100 / each, p99=1200 / each), spread=0.012,
    )  # fmt: skip
    return made.model_copy(update=changes)


def benchmark(*, simulated: bool = False, **changes: Any) -> BenchmarkResult:
    key = BenchmarkKey(
        formula=FORMULA, model="/models/Qwen3.5-122B-A10B", runtime="sglang 0.5.14", driver="590.48.01",
        gpus=INFERENCE, p2p=False, workload="in 128, out 1000, 2 per slot", simulated=simulated,
    )  # fmt: skip
    levels = tuple(level(*row) for row in FIGURES)
    return BenchmarkResult(levels=levels, key=key, started_at=NOW - 8000, seconds=311.0).model_copy(
        update=changes
    )


def service(*, simulated: bool = False, **changes: Any) -> ServiceStatus:
    argv: tuple[str, ...] = ("/opt/ml-env/bin/python3", "-m", "sglang.launch_server")
    argv += tuple(word for name, value in ARGS.items() for word in (f"--{name}", value))
    said = {
        f"args.{n}": Provenance(value=v, source="spec", reason="the spec says so") for n, v in ARGS.items()
    }
    verdict = Provenance(value="1", source="verdict", reason=P2P_REASON)
    made = ServiceStatus(
        name="qwen", unit="sglang-qwen.service", target="lxc:129", state="active", health="ok",
        revision="3f2a9c0d1e2b", promoted="3f2a9c0d1e2b", gpus=INFERENCE, p2p="off", p2p_reason=P2P_REASON,
        argv=(*argv, "--disable-custom-all-reduce"),
        env={"NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "SPT_NOENV": "1"},
        why={
            **said,
            "args.disable-custom-all-reduce": verdict.model_copy(update={"value": "true"}),
            "env.NCCL_IB_DISABLE": Provenance(value="1", source="spec", reason="the spec says so"),
            "env.NCCL_P2P_DISABLE": verdict,
            "env.SPT_NOENV": RULE,
        },
        benchmark=benchmark(simulated=simulated), measured_at=NOW - 7500,
        trial=TrialStatus(
            outcome="promoted", phase="judge", revision="3f2a9c0d1e2b", attempt=1, reason="Promoted",
            message="every floor held; no baseline to compare with", started_at=NOW - 8200, finished_at=NOW - 7500,
        ),
    )  # fmt: skip
    return made.model_copy(update=changes)


def gpus(**changes: Any) -> tuple[GpuStatus, ...]:
    ours = [
        GpuStatus(
            address=a, group="inference", driver="nvidia", desired_driver="nvidia", numa_node=0, iommu="DMA-FQ",
            power_limit=600, name="NVIDIA RTX PRO 6000 Blackwell Server Edition",
            uuid=f"GPU-5a1c0a52-6f5b-4a3b-9d4e-0c1f2a3b4c{a[5:7]}",
        )
        for a in INFERENCE
    ]  # fmt: skip
    guests = [
        GpuStatus(address=a, group="confidential", driver="vfio-pci", desired_driver="vfio-pci", numa_node=1, iommu="DMA-FQ")
        for a in CONFIDENTIAL
    ]  # fmt: skip
    return tuple(g.model_copy(update=changes.get(g.address, {})) for g in (*ours, *guests))


def conditions(*changed: Condition) -> tuple[Condition, ...]:
    told = {
        "DriversBound": "4 on nvidia, 4 on vfio-pci", "DriverVersionsAgree": "590.48.01 here and in lxc:129",
        "GpuSettingsApplied": "8 settings as specified", "GpusHealthy": "no fault is known",
        "PlatformReady": "6 properties as specified", "ServiceReady/qwen": "3f2a9c0d1e2b runs and is promoted",
        "SpecAccepted": "generation 3 is in force",
    }  # fmt: skip
    found = {
        kind: Condition(
            type=kind, status="True", reason="AsSpecified", message=message, last_transition=NOW - 86400,
            observed_generation=3,
        )
        for kind, message in told.items()
    }  # fmt: skip
    found["P2PVerified/qwen"] = Condition(
        type="P2PVerified/qwen", status="False", reason="Corrupt", message=P2P_REASON,
        last_transition=NOW - 90000, observed_generation=3,
    )  # fmt: skip
    found |= {c.type: c for c in changed}
    return tuple(found[kind] for kind in sorted(found))


def verdict(**changes: Any) -> P2PStatus:
    made = P2PStatus(
        gpus=INFERENCE, verdict="corrupt", summary="12 of 12 ordered pairs corrupt", explanation=EXPLANATION,
        bad_pairs=tuple((a, b) for a in INFERENCE for b in INFERENCE if a != b), tested_at=NOW - 90000, current=True,
    )  # fmt: skip
    return made.model_copy(update=changes)


def ready(**changes: Any) -> Status:
    made = Status(
        agent_version="0.1.0", pid=4242,
        host=HostStatus(name="esc8000a", kernel="6.17.2-1-pve", driver="590.48.01", iommu="DMA-FQ", sev_snp="on"),
        published_at=NOW - 12, stale_after=120, ready="True",
        spec=SpecStatus(path="/etc/gpu-host-agent/spec.yaml", accepted=True, generation=3),
        last_pass=PassStatus(id="1f2e3d4c", trigger="resync", sentence="Converged: nothing to do.", started_at=NOW - 12, seconds=0.0213),
        conditions=conditions(), gpus=gpus(), p2p=(verdict(),), services=(service(),),
        budget="0 of 3 unasked starts used in the last 1h",
        journal=(
            {"at": NOW - 8200, "event": "phase", "service": "qwen", "phase": "start", "revision": "3f2a9c0d1e2b"},
            {"at": NOW - 7500, "event": "trial", "service": "qwen", "outcome": "promoted", "reason": "Promoted", "message": ""},
        ),
        proof=PROOF_REAL,
    )  # fmt: skip
    return made.model_copy(update=changes)


def stale(**changes: Any) -> Status:
    return ready(published_at=NOW - 245, **changes)


def rolled_back() -> Status:
    step = "change the spec, or run: agent retry qwen"
    message = "3f2a9c0d1e2b runs; 77aa88bb99cc was rolled back: 1,911.4 tok/s at C=64, and the spec requires >= 2000 tok/s"
    trial = TrialStatus(
        outcome="rolled-back", phase="judge", revision="77aa88bb99cc", attempt=2, reason="BelowGate",
        message="1,911.4 tok/s at C=64, and the spec requires >= 2000 tok/s", started_at=NOW - 2000,
        finished_at=NOW - 300, restored="3f2a9c0d1e2b",
    )  # fmt: skip
    return ready(
        ready="False",
        last_pass=PassStatus(
            id="1f2e3d4c", trigger="progress", started_at=NOW - 12, seconds=0.0213,
            sentence="qwen: revision 77aa88bb99cc rolled back to 3f2a9c0d1e2b: 1,911.4 tok/s at C=64, and the spec requires >= 2000 tok/s.",
        ),
        conditions=conditions(
            Condition(type="ServiceReady/qwen", status="False", reason="RolledBack", message=message, next_step=step, last_transition=NOW - 300)
        ),
        services=(service(trial=trial),),
        budget="1 of 3 unasked starts used in the last 1h",
    )  # fmt: skip


def unknown() -> Status:
    """The PCI tree could not be read, and a service is on its first trial."""
    silent = "it did not answer within 10 s"
    trial = TrialStatus(
        outcome="running", phase="ready", revision="3f2a9c0d1e2b", attempt=1, started_at=NOW - 95
    )
    return ready(
        ready="Unknown",
        activity="qwen: ready",
        host=HostStatus(name="esc8000a", kernel="6.17.2-1-pve", driver=f"unknown ({silent})", iommu=f"unknown ({silent})", sev_snp="on"),
        gpus=(),
        p2p=(verdict(verdict="not run", summary="these GPUs have not been tested together, and untested is treated as off", explanation="", bad_pairs=(), tested_at=None, current=False),),
        conditions=conditions(
            Condition(type="DriversBound", status="Unknown", reason="PciUnknown", message=f"the PCI tree cannot be read: {silent}", last_transition=NOW - 61),
            Condition(type="GpusHealthy", status="Unknown", reason="NotObserved", message="NVML does not show any GPU", last_transition=NOW - 61),
        ),
        services=(
            service(
                promoted="", benchmark=None, measured_at=None, trial=trial, state="activating",
                health="none (connection refused: it is still loading, or hung)",
                p2p_reason="these GPUs have not been tested together, and untested is treated as off",
            ),
        ),
    )  # fmt: skip


def simulated() -> Status:
    return ready(
        host=HostStatus(
            name="esc8000a", simulated="esc8000a", kernel="6.17.2-1-pve", driver="590.48.01", iommu="DMA-FQ", sev_snp="on"
        ),
        services=(service(simulated=True),),
        activity="qwen: benchmark C=16 12/96",
        proof=PROOF_SIMULATED,
    )  # fmt: skip


def blocked() -> Status:
    """Two GPUs must change drivers and the policy does not allow it; a third is off the bus, a fourth nobody's."""
    message = "plan 8d1c22aa07 needs rebind, and policy.allow does not have it"
    moving = {"driver": "vfio-pci"}
    lost = {"note": "GpuLost: NVRM: Xid 79, GPU has fallen off the bus", "power_limit": None, "iommu": "DMA"}
    seen = gpus(
        **{
            "0000:61:00.0": moving,
            "0000:71:00.0": moving,
            "0000:11:00.0": lost,
            "0000:f1:00.0": {"group": "", "desired_driver": "", "driver": "none", "numa_node": None},
        }
    )
    return ready(
        ready="False",
        last_pass=PassStatus(id="aa", trigger="file changed", sentence=f"Blocked: {message}.", started_at=NOW - 12, seconds=0.1),
        plan=PlanStatus(
            id="8d1c22aa07", text="plan 8d1c22aa07 generation 3: 2 actions, disruption rebind\n   1. [rebind] bind 0000:61:00.0\n   2. [rebind] bind 0000:71:00.0\n",
            actions=2, disruption="rebind", blocked=message, approve="agent approve 8d1c22aa07",
        ),
        conditions=conditions(
            Condition(type="Converged", status="False", reason="Blocked", message=message, next_step="agent approve 8d1c22aa07", last_transition=NOW - 40),
            Condition(type="DriversBound", status="False", reason="Converging", message="0000:61:00.0 not yet on nvidia, 0000:71:00.0 not yet on nvidia", last_transition=NOW - 40),
            Condition(type="GpusHealthy", status="False", reason="GpuFault", message="0000:11:00.0: Xid 79", next_step="reboot the host, or reseat the card", last_transition=NOW - 9000),
        ),
        gpus=seen,
        services=(service(state="inactive", health="not running", revision="", benchmark=None, measured_at=None, trial=None),),
    )  # fmt: skip


def rejected() -> Status:
    """No spec was ever accepted."""
    problems = tuple(
        f"/etc/gpu-host-agent/spec.yaml:{n}:5: spec.gpus.inference.driver: nouveau: expected one of nvidia, vfio-pci" for n in range(12, 17)
    )  # fmt: skip
    return Status(
        agent_version="0.1.0", pid=4242, host=HostStatus(name=""), published_at=NOW - 1, stale_after=120, ready="False",
        spec=SpecStatus(path="/etc/gpu-host-agent/spec.yaml", accepted=False, problems=problems),
        last_pass=PassStatus(id="aa", trigger="start", sentence="No spec is in force: " + problems[0], started_at=NOW - 1, seconds=0.0),
        conditions=(
            Condition(type="SpecAccepted", status="False", reason="Invalid", message="; ".join(problems[:3]), next_step="correct the spec file and save it", last_transition=NOW - 1),
        ),
        proof=PROOF_REAL,
    )  # fmt: skip


EVIL = "\x1b[2J\x1b[31mREADY\r\nREADY \x07\x9b1A\u202eYDAER\u2028 \u5b57\u5b57\u5b57 e\u0301 \ud800"


def hostile() -> Status:
    """Every text from outside is huge or tries to move the cursor."""
    long = EVIL + "x" * 5000 + " " + "word " * 5000
    base = blocked()
    return base.model_copy(
        update={
            "activity": long,
            "ready": "False",
            "host": HostStatus(name=EVIL, simulated=EVIL, kernel=long, driver=EVIL, iommu=EVIL, sev_snp=EVIL),
            "spec": SpecStatus(path=long, accepted=False, problems=(long,) * 9, generation=10**9),
            "conditions": tuple(
                Condition(type=f"{EVIL}{n}", status="False", reason=long, message=long, next_step=long) for n in range(50)
            ),
            "gpus": tuple(g.model_copy(update={"note": long, "iommu": long, "driver": long}) for g in base.gpus[:2]),
            "p2p": (verdict(summary=long, explanation=long),),
            "services": (
                service(
                    name=EVIL, unit=long, state=EVIL, health=long, p2p_reason=long, argv=(EVIL, "-m", EVIL, "--x", EVIL, "--y=" + "z" * 900),
                    why={EVIL: Provenance(value=long, source=EVIL, reason=long), "env.A": Provenance(value="1", source="rule", reason=long)},
                    benchmark=benchmark(levels=(level(8192, 1e18, 1e-9, 1e9, void=long, errors=(long, EVIL)),), note=EVIL, complete=False),
                    trial=TrialStatus(outcome=EVIL, phase=EVIL, revision=EVIL, attempt=9, reason=long, message=long),
                ),
            ),
            "plan": PlanStatus(id=EVIL, text=long, actions=10**6, disruption=EVIL, blocked=long, approve=long),
            "budget": long,
            "journal": ({"at": "never", "event": EVIL, EVIL: EVIL, "nested": {"a": [EVIL]}},),
            "proof": long,
        }
    )  # fmt: skip


def dumped(status: Status | ServiceStatus) -> dict[str, Any]:
    """As the file holds it. Lone surrogates cannot be in a file, so they stay out of the dump."""
    document = json.loads(json.dumps(status.model_dump(mode="json", warnings=False)))
    assert isinstance(document, dict)
    return document
