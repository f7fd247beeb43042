"""Measures what the tool promises about itself: start-up, planning, memory, rate.

``make bench`` prints a table and writes ``bench-results/<time>.json``; exit code 1 when a limit
is missed. Peak memory is the kernel's ``ru_maxrss`` of the finished process (its VmHWM).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from compare import Usage, compare
from compare import run as run_command
from synthetic import write_experts, write_llama, write_small_experts, write_trillion

from quantize.demo import build_target

COMMAND = [sys.executable, str(Path(sys.executable).with_name("quantize"))]
RESULTS = Path(__file__).resolve().parents[2] / "bench-results"
HEAVY = ("torch", "quark", "transformers", "vllm")
LAYERS = {"1 GB": 7, "4 GB": 30}
EXPERTS = (8, 32)
SCHEMES = ("fp8_rowwise", "mxfp4")


@dataclass(frozen=True)
class Row:
    """One measurement; ``limit`` None means that it is reported, not judged."""

    name: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def missed(self) -> bool:
        """Whether the measurement is above its limit."""
        return self.limit is not None and self.value > self.limit


def main() -> int:
    """Run all benchmarks, in a temporary folder beside the results."""
    RESULTS.mkdir(exist_ok=True)
    machine = describe_machine()
    with TemporaryDirectory(prefix="work-", dir=RESULTS) as work:
        rows = measure_start() + measure_plan(Path(work) / "trillion")
        for scheme in SCHEMES:
            rows += measure_run(Path(work), scheme)
        rows += compare_all(Path(work))
        rows += measure_experts(Path(work))
    time_now = datetime.now(UTC).strftime("%Y-%m-%dT%H%M%SZ")
    result = {"time": time_now, "machine": machine, "rows": [asdict(row) for row in rows]}
    (RESULTS / f"{time_now}.json").write_text(json.dumps(result, indent=2) + "\n")
    show(machine, rows)
    return int(any(row.missed for row in rows))


def measure_start() -> list[Row]:
    """Wall time of ``quantize --help``, and whether it imports anything heavy."""
    times = [run_tool("--help").seconds for _ in range(5)]
    return [
        Row("--help, median of 5", median(times), "s", 0.5),
        Row("--help, heavy imports", len(find_heavy("--help")), "", 0),
    ]


def measure_plan(folder: Path) -> list[Row]:
    """Wall time of ``quantize plan`` of a header set of one trillion parameters."""
    parameters = write_trillion(folder)
    arguments = ("plan", str(folder), "--scheme", "mxfp4")
    usage = run_tool(*arguments)
    return [
        Row("plan, parameters", parameters / 1e12, "10^12"),
        Row("plan", usage.seconds, "s", 5),
        Row("plan, processor time", usage.processor, "s"),
        Row("plan, peak memory", usage.peak / 1e6, "MB"),
        Row("plan, heavy imports", len(find_heavy(*arguments)), "", 0),
    ]


def measure_run(work: Path, scheme: str) -> list[Row]:
    """Peak memory and rate of ``quantize run``, verification included, for two model sizes."""
    rows, peaks = [], []
    for label, layers in LAYERS.items():
        with TemporaryDirectory(dir=work) as folder:
            source = Path(folder) / "source"
            size = write_llama(source, layers)
            out = str(Path(folder) / "out")
            told = ask_estimate(source, scheme)
            usage = run_tool("run", str(source), "-o", out, "--scheme", scheme)
        peaks.append(usage.peak)
        name = f"run {scheme}, {label}"
        rows += [
            Row(f"{name}: weights", size / 1e9, "GB"),
            Row(f"{name}: time", usage.seconds, "s"),
            Row(f"{name}: processor time", usage.processor, "s"),
            Row(f"{name}: rate", size / 1e9 / usage.seconds, "GB/s"),
            Row(f"{name}: peak memory", usage.peak / 1e6, "MB"),
            Row(f"{name}: processor time / estimate", usage.processor / told["seconds"], ""),
            Row(f"{name}: peak memory / estimate", usage.peak / told["memory"], "", 1.25),
        ]
    return [
        *rows,
        Row(f"run {scheme}: peak memory, larger / smaller", peaks[1] / peaks[0], "", 1.1),
    ]


def measure_experts(work: Path) -> list[Row]:
    """Peak memory of ``quantize run`` on experts that are stored in 3-D FP8 tensors.

    What must be in memory is one expert, whatever their number: its stored bytes, its BF16
    weight and its output.
    """
    rows, peaks = [], []
    for experts in EXPERTS:
        with TemporaryDirectory(dir=work) as folder:
            source = Path(folder) / "source"
            size = write_experts(source, experts)
            usage = run_tool("run", str(source), "-o", f"{folder}/out", "--scheme", "mxfp4")
        peaks.append(usage.peak)
        name = f"run mxfp4, {experts} experts in a tensor"
        rows += [
            Row(f"{name}: weights", size / 1e9, "GB"),
            Row(f"{name}: time", usage.seconds, "s"),
            Row(f"{name}: peak memory", usage.peak / 1e6, "MB"),
        ]
    return [*rows, Row("run mxfp4, experts: peak memory, 32 / 8", peaks[1] / peaks[0], "", 1.1)]


def ask_estimate(source: Path, scheme: str) -> dict[str, float]:
    """What ``quantize plan`` says that a run takes: bytes of memory, seconds of one core."""
    command = [*COMMAND, "plan", str(source), "--scheme", scheme, "--json", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)["estimate"]
    seconds = told["core_seconds"] + told["proof_core_seconds"]
    return {"memory": told["peak_memory_bytes"], "seconds": seconds}


def compare_all(work: Path) -> list[Row]:
    """Our rate beside other tools' on a real small model, a dense one and one of small experts."""
    small = build_target(work / "smollm2")
    sources = {
        small: (269_030_720, 2 * 49152 * 576),
        work / "dense": (write_llama(work / "dense", LAYERS["4 GB"]), 2 * 2048 * 8192),
        work / "experts": (write_small_experts(work / "experts", 4, 64), 2 * 2048 * 4096),
    }
    rows = []
    for source, (size, largest) in sources.items():
        for scheme, share in (("mxfp4", 1 / 20), ("ptpc_fp8", 1 / 4)):
            limits = {"seconds": 2.5} if source == small else {"Quark": share, "cp and sync": 2.5}
            limits["llmcompressor"] = 1.0
            lines = compare(source, work, scheme, size, largest, limits)
            rows += [Row(*line) for line in lines]
    return rows


def run_tool(*arguments: str) -> Usage:
    """Run the tool as a user would; SystemExit with its messages when it fails."""
    print("quantize", *arguments, file=sys.stderr, flush=True)
    return run_command([*COMMAND, *arguments])


def find_heavy(*arguments: str) -> set[str]:
    """Which heavy packages a command imports, by the interpreter's own import log."""
    command = [sys.executable, "-X", "importtime", *COMMAND[1:], *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "click" in imported, "the import log is missing"
    return {name for name in HEAVY if name in imported}


def describe_machine() -> dict[str, str | float]:
    """Processor, cores, memory, Python; and how busy the machine is, which wall times depend on."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": models[0] if models else os.uname().machine,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9),
        "python": sys.version.split()[0],
        "load": round(os.getloadavg()[0], 1),
    }


def show(machine: dict[str, str | float], rows: list[Row]) -> None:
    """Print the table on stdout."""
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    for row in rows:
        limit = "" if row.limit is None else f"at most {row.limit:g}"
        verdict = "MISSED" if row.missed else ""
        print(f"{row.name:<50}{row.value:>10.3f} {row.unit:<6}{limit:<14}{verdict}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
