"""``make demo``: the main job, watched. A real daemon on the simulated host converges, then undoes a bad edit.

Everything is checked, nothing is only shown: it exits 0 only if all of it happened.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from agent.app.progress_view import ProgressPrinter
from agent.app.terminal import use_color

RECIPE = Path(__file__).parents[2] / "specs/esc8000a-qwen3.5-122b.yaml"
DEADLINE = 120.0  # real seconds for each half
TIME_FACTOR = 30.0
EDIT = (
    "        attention-backend: triton\n",
    "        attention-backend: triton\n        disable-cuda-graph: true\n",
)
Document = dict[str, Any]


class DemoError(Exception):
    """Something that the demo promises did not happen."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("build/demo"))
    demo = Demo(parser.parse_args().directory)
    try:
        demo.run()
    except DemoError as error:
        demo.printer.fail(f"the demo failed: {error}")
        print(f"\nThe daemon's log is {demo.log}", file=sys.stderr)
        return 1
    finally:
        demo.end()
    return 0


class Demo:
    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.root = self.directory / "host"
        self.spec = self.root / "etc/gpu-host-agent/spec.yaml"
        self.state = self.root / "var/lib/gpu-host-agent"
        self.status_file = self.root / "run/gpu-host-agent/status.json"
        self.log = self.directory / "agent.log"
        self.printer = ProgressPrinter(sys.stdout, use_color(sys.stdout))
        self.daemon: subprocess.Popen[bytes] | None = None
        self._journal_at = 0

    def run(self) -> None:
        self._prepare()
        self._chapter("A host as the incident left it")
        self._as_found()
        self._chapter("The agent starts, and makes it match the spec")
        self._start()
        promoted = self._follow("promotion", self._promoted)
        self._check_promoted(promoted)
        self._keep(promoted, "status.json")
        self._show_status()
        self._chapter("Somebody edits the spec: disable-cuda-graph: true (it halves the speed)")
        self._edit()
        rolled_back = self._follow("rollback", self._rolled_back)
        self._check_rolled_back(rolled_back, promoted)
        self._keep(rolled_back, "status-rollback.json")
        self._show_status()
        self._chapter("The agent is told to stop, and does")
        self._stop()
        self.printer.done(f"the demo held; its files are in {_short(self.directory)}")

    def _prepare(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        self.spec.parent.mkdir(parents=True)
        shutil.copyfile(RECIPE, self.spec)
        self.spec.chmod(0o644)
        print(
            "This is a SIMULATED host: decisions, journal and HTTP are real; devices, DMA, tokens and times are not."
        )
        print(f"Time runs {TIME_FACTOR:g} times faster than on a real host.")

    def _chapter(self, title: str) -> None:
        print(f"\n=== {title}\n", flush=True)

    def _agent(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "agent.app.main", *arguments, "--root", str(self.root), "--host", "sim"]

    def _as_found(self) -> None:
        done = subprocess.run(
            self._agent("observe", "-o", "json"), capture_output=True, text=True, check=False, timeout=60
        )
        if done.returncode:
            raise DemoError(f"agent observe failed: {done.stderr.strip()}")
        facts = json.loads(done.stdout)
        functions = facts["pci"]["known"]["functions"].values()
        gpus = [f for f in functions if f["vendor_id"] == 0x10DE and f["class_code"] >> 8 == 0x0302]
        on_nvidia = sum(f["driver"].get("known") == "nvidia" for f in gpus)
        types = {g["type"].get("known") for g in facts["pci"]["known"]["groups"].values()}
        faults = sum(e["count"] for e in facts["kernel_events"]["known"] if e["sort"] == "page-fault")
        health = facts["services"]["qwen"]["health"]
        if on_nvidia != 8 or "DMA" not in types or not faults or "known" in health:
            raise DemoError("the simulated host does not start as it was found")
        self.printer.step(
            f"{on_nvidia} GPUs on nvidia; IOMMU groups {', '.join(sorted(str(t) for t in types))}"
        )
        self.printer.step(f"{faults} IOMMU page faults in the kernel log")
        self.printer.step(f"sglang-qwen.service runs and does not answer: {next(iter(health.values()))}")

    def _start(self) -> None:
        with self.log.open("wb") as log:
            self.daemon = subprocess.Popen(
                [*self._agent("run"), "--time-factor", str(TIME_FACTOR)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def _follow(self, what: str, reached: Callable[[Document], bool]) -> Document:
        """Show the journal and the activity as they come, until the status says what is waited for."""
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            if self.daemon is None or self.daemon.poll() is not None:
                raise DemoError("the daemon ended by itself")
            self._show_journal()
            status = self._status()
            if "benchmark" in status.get("activity", ""):
                self.printer.activity(status["activity"])
            if status and reached(status):
                self._show_journal()
                self.printer.done(status["last_pass"]["sentence"])
                return status
            time.sleep(0.1)
        raise DemoError(f"no {what} within {DEADLINE:g} s; last: {self._status().get('last_pass')}")

    def _status(self) -> Document:
        try:
            status: Document = json.loads(self.status_file.read_bytes())
        except (OSError, ValueError):
            return {}
        return status

    def _show_journal(self) -> None:
        for entry in self._new_entries():
            match entry["event"]:
                case "intent":
                    self.printer.step(entry["text"])
                case "outcome" if entry.get("note"):
                    self.printer.done(entry["note"])
                case "outcome" if entry.get("error"):
                    self.printer.fail(entry["error"])
                case "phase-end":
                    (self.printer.step if entry["result"] == "ok" else self.printer.fail)(
                        f"  {entry['phase']}: {entry['result']}"
                        + (f" ({entry['detail']})" if entry["detail"] else "")
                    )

    def _new_entries(self) -> Iterator[Document]:
        journal = self.state / "journal.jsonl"
        if not journal.exists():
            return
        with journal.open("rb") as file:
            file.seek(self._journal_at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._journal_at += len(line)
                yield json.loads(line)

    def _promoted(self, status: Document) -> bool:
        trial = (_service(status) or {}).get("trial") or {}
        if trial.get("outcome") in {"held", "failed", "rolled-back", "refused"}:
            raise DemoError(f"the first trial ended {trial['outcome']}: {trial['message']}")
        return status["ready"] == "True" and trial.get("outcome") == "promoted" and not status.get("activity")

    def _rolled_back(self, status: Document) -> bool:
        trial = (_service(status) or {}).get("trial") or {}
        if status["spec"]["generation"] < 2:
            return False
        if trial.get("outcome") in {"held", "failed", "refused"}:
            raise DemoError(f"the second trial ended {trial['outcome']}: {trial['message']}")
        return (
            trial.get("outcome") == "rolled-back"
            and not status.get("activity")
            and status["ready"] == "False"
        )

    def _check_promoted(self, status: Document) -> None:
        service = _service(status) or {}
        split = {g["address"]: g["driver"] for g in status["gpus"]}
        faults = next(c for c in status["conditions"] if c["type"] == "P2PVerified/qwen")["message"]
        self._check(
            "four GPUs on nvidia, four on vfio-pci",
            sorted(split.values()) == ["nvidia"] * 4 + ["vfio-pci"] * 4,
        )
        self._check("12 corrupt pairs found", len(status["p2p"][0]["bad_pairs"]) == 12)
        self._check("the page faults were seen", "page faults" in faults)
        self._check(
            "NCCL's P2P is off, with the reason",
            "corrupt" in service["why"]["env.NCCL_P2P_DISABLE"]["reason"],
        )
        self._check("custom all-reduce is off too", "--disable-custom-all-reduce" in service["argv"])
        levels = service["benchmark"]["levels"]
        self._check(
            "six concurrency levels measured", [x["concurrency"] for x in levels] == [1, 4, 16, 32, 64, 128]
        )
        self._check(
            "every request answered in full", all(x["ok"] == x["requests"] and not x["void"] for x in levels)
        )
        self._check(
            "the promoted revision is what runs",
            bool(service["revision"]) and service["revision"] == service["promoted"],
        )
        self._check("the status says that it is simulated", status["host"]["simulated"] == "esc8000a")

    def _check_rolled_back(self, status: Document, before: Document) -> None:
        service, old = _service(status) or {}, _service(before) or {}
        self._check(
            "the last good revision runs again",
            service["revision"] == old["revision"] == service["trial"]["restored"],
        )
        self._check("its flags are the old ones", "--disable-cuda-graph" not in service["argv"])
        self._check("it answers", service["health"] == "ok")
        self._check(
            "status says why", "C=" in service["trial"]["message"] or "tok/s" in service["trial"]["message"]
        )

    def _check(self, what: str, held: object) -> None:
        if not held:
            raise DemoError(f"not so: {what}")
        self.printer.step(f"checked: {what}")

    def _keep(self, status: Document, name: str) -> None:
        (self.directory / name).write_text(json.dumps(status, indent=2) + "\n")

    def _show_status(self) -> None:
        print(f"\n$ agent status --root {_short(self.root)}\n", flush=True)
        done = subprocess.run(self._agent("status"), check=False, timeout=60)
        if done.returncode not in {0, 3}:
            raise DemoError(f"agent status exited {done.returncode}")

    def _edit(self) -> None:
        """As an editor saves: a new file, renamed over the old one."""
        text = self.spec.read_text()
        if EDIT[0] not in text:
            raise DemoError(f"{self.spec} does not have the line that the demo edits")
        fresh = self.spec.with_name("spec.yaml.new")
        fresh.write_text(text.replace(*EDIT))
        fresh.replace(self.spec)
        self.printer.step(f"saved {_short(self.spec)}")

    def _stop(self) -> None:
        if self.daemon is None:
            return
        self.daemon.send_signal(signal.SIGTERM)
        if self.daemon.wait(timeout=30) != 0:
            raise DemoError(f"the daemon exited {self.daemon.returncode}")
        self.daemon = None
        self.printer.step("stopped; the journal and the status file stay")

    def end(self) -> None:
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.wait(timeout=30)


def _service(status: Document) -> Document | None:
    found = [s for s in status.get("services", ()) if s["name"] == "qwen"]
    return found[0] if found else None


def _short(path: Path) -> str:
    return os.path.relpath(path)


if __name__ == "__main__":
    sys.exit(main())
