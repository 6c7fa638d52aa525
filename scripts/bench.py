"""Run the benchmarks and collect their figures: `make bench` (the table of docs/performance.md), `make bench-all` (all scripts).

    python scripts/bench.py [--runs 3] [--only NAME …] [--others] [--no-vllm] [--keep FILE] [--docs FILE]

Each script ends with one JSON line. Those of the table go to `--keep` (benchmarks/results.json) and, as a table, between the
markers of `--docs` (docs/performance.md). A script that fails is named there instead of its rows, and the exit status is 1.
`--only` renews the rows of the scripts that it names and leaves the others as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- figures: written by make bench -->", "<!-- end of figures -->"


@dataclass(frozen=True)
class Script:
    """``rows`` of the table that it fills; ``minutes`` it takes on two CPU cores, for the estimate that is shown."""

    name: str
    rows: tuple[str, ...]
    minutes: float
    vllm: bool = False

    @property
    def path(self) -> Path:
        return ROOT / "benchmarks" / f"{self.name}.py"


TABLE = (
    Script("harness", ("1", "10"), 5),
    Script("rollout_efficiency", ("2",), 4, vllm=True),
    Script("makespan", ("3",), 3),
    Script("prefix_cache", ("4",), 4, vllm=True),
    Script("scoring_overlap", ("5",), 4),
    Script("training_step", ("6", "7"), 10),
    Script("logit_memory", ("8",), 2),
    Script("weight_push", ("9",), 5, vllm=True),
)
OTHERS = tuple(
    Script(name, (), minutes)
    for name, minutes in {
        "data_build": 2,
        "latent_cql": 3,
        "memory": 1,
        "micro_step": 1,
        "ped_rm": 1,
        "reat_distil": 2,
        "reat_retrieval": 2,
        "staleness": 4,
    }.items()
)


def last_line(output: str) -> dict[str, Any]:
    """The JSON object that a benchmark ends with. ValueError when it ends with something else."""
    lines = output.strip().splitlines()
    found = json.loads(lines[-1]) if lines else None
    if not isinstance(found, dict) or "benchmark" not in found:
        raise ValueError("it does not end with a JSON line of a benchmark")
    return found


def run(script: Script, arguments: Sequence[str]) -> dict[str, Any]:
    """Run one script, showing what it prints; its JSON line, or ``{"benchmark", "failed"}``."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(script.path), *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    kept = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        kept = line if line.strip() else kept
    status = process.wait()
    try:
        if status:
            raise ValueError(f"exit status {status}")
        return last_line(kept)
    except ValueError as error:
        return {"benchmark": script.name, "failed": str(error)}


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures of all scripts as a Markdown table in the order of their rows; a script without figures is named below it."""
    figures = [f | {"script": name} for name, result in results.items() for f in result.get("figures", [])]
    lines = ["| # | measure | against | target | median | runs | reached |", "|---|---|---|---|---|---|---|"]
    for f in sorted(figures, key=lambda f: _order(f["row"])):
        reached = {True: "yes", False: "**no**", None: ""}[f["met"]]
        target = f["target"].replace("<=", "≤").replace(">=", "≥") if f["target"] else ""
        unit = "" if f["unit"] == "ratio" else f" {f['unit']}"
        spread = ", ".join(f"{x:g}" for x in f["runs"])
        lines.append(
            f"| {f['row']} | {f['measure']} | {f['against']} | {target} | {f['median']:g}{unit} | {spread} | {reached} |"
        )
    missing = [name for name, result in results.items() if not result.get("figures")]
    if missing:
        why = {name: results[name].get("failed", "its line holds none") for name in missing}
        lines += ["", *(f"`{name}` gave no figure: {why[name]}." for name in missing)]
    return "\n".join(lines)


def _order(row: str) -> tuple[int, str]:
    digits = "".join(c for c in row if c.isdigit())
    return int(digits or 0), row


def machines(results: Mapping[str, Mapping[str, Any]]) -> str:
    """One sentence on what the figures were measured on."""
    found = [r["machine"] for r in results.values() if "machine" in r]
    if not found:
        return ""

    def several(key: str) -> str:
        return " and ".join(str(x) for x in sorted({m[key] for m in found}))

    loads = [m["load"] for m in found]
    return (
        f"Measured on {several('cpus')} CPU cores, Python {several('python')}, torch {several('torch')}; "
        f"load average at the end of a script: {min(loads):g} to {max(loads):g}."
    )


def put(document: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """``document`` with the table between its markers. ValueError without markers."""
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        raise ValueError(f"the document needs the markers {BEGIN} and {END}, once each")
    before, rest = document.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{machines(results)}\n\n{table(results)}\n\n{END}{after}"


def chosen(only: Sequence[str], others: bool, vllm: bool) -> list[Script]:
    """The scripts to run. SystemExit for an unknown name."""
    known = {s.name: s for s in (*TABLE, *OTHERS)}
    for name in only:
        if name not in known:
            raise SystemExit(f"--only {name}: no such benchmark; there are {', '.join(known)}")
    if only:
        return [known[name] for name in only]
    return [s for s in (*TABLE, *(OTHERS if others else ())) if vllm or not s.vllm]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="of each measurement, for the spread")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument(
        "--others", action="store_true", help="also the scripts that fill no row of the table"
    )
    parser.add_argument("--no-vllm", action="store_true", help="leave out what needs the vLLM environment")
    parser.add_argument("--keep", type=Path, default=ROOT / "benchmarks" / "results.json")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "performance.md")
    given = parser.parse_args()
    scripts = chosen(given.only, given.others, not given.no_vllm)
    kept: dict[str, Any] = {}
    if given.only and given.keep.exists():
        kept = json.loads(given.keep.read_text())
    elif given.no_vllm:
        kept = {s.name: {"benchmark": s.name, "failed": "left out, it needs vLLM"} for s in TABLE if s.vllm}
    start, failed = time.monotonic(), []
    for number, script in enumerate(scripts, 1):
        left = sum(s.minutes for s in scripts[number - 1 :])
        print(
            f"==> {script.name} ({number} of {len(scripts)}), about {left:g} min for what is left", flush=True
        )
        begun = time.monotonic()
        result = run(script, ["--runs", str(given.runs)] if script in TABLE else [])
        print(f"<== {script.name}: {time.monotonic() - begun:.0f} s", flush=True)
        if "failed" in result:
            failed.append(script.name)
        if script in TABLE:
            kept[script.name] = result
    order = [s.name for s in TABLE]
    kept = {name: kept[name] for name in order if name in kept}
    given.keep.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    given.docs.write_text(put(given.docs.read_text(), kept))
    print(table(kept))
    missed = [f["row"] for r in kept.values() for f in r.get("figures", []) if f["met"] is False]
    minutes = (time.monotonic() - start) / 60
    print(
        f"{len(scripts) - len(failed)} of {len(scripts)} scripts in {minutes:.1f} min; table: {given.docs}; "
        f"targets missed in rows: {', '.join(missed) or 'none'}"
    )
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
