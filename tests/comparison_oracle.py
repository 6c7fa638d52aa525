"""The report's numbers a second time, from the raw JSONL with nothing but the standard library.

It shares no code with the package, on purpose. As a program: ``python tests/comparison_oracle.py OUT`` reads
OUT/comparison.json, recomputes every mean and every difference from the transcripts of the runs that it names, and fails at the
first that differs.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from pathlib import Path


def lines_of(run: Path) -> list[dict]:
    """The last evaluation of a run folder."""
    files = sorted(run.glob("transcripts/eval-step-*.jsonl"), key=lambda p: int(p.stem.rsplit("-", 1)[1]))
    return [json.loads(text) for text in files[-1].read_text().splitlines()]


def delta(pre: float, post: float) -> float:
    return (post - pre) / (1 - pre) if post > pre else post - pre


def numbers(line: dict) -> dict[str, float]:
    """What one dialogue has to say."""
    out: dict[str, float] = {}
    counts = line["exclusion"] is None and line["reward"] is not None
    tests = {line["post_test"]["problem"]: line["post_test"]} if line["post_test"] else {}
    tests.update(line.get("extra_tests", {}))
    if counts:
        out["reward"] = line["reward"]["reward"]
        for side, name in (("transfer", "transfer_gain"), ("source", "same_gain")):
            if side not in tests:
                continue
            grades = tests[side]["grades"]
            post = grades.count("right") / (len(grades) - grades.count("error"))
            rates = {k.split("|")[0]: v["rate"] for k, v in line["pair"][side]["rates"].items()}
            main = line["post_test"]["problem"] == side
            pre = line["pre"] if main else rates.get("micro/student", next(iter(rates.values())))
            out[name] = delta(pre, post)
        if "transfer_gain" in out and "same_gain" in out:
            out["transfer_gap"] = out["same_gain"] - out["transfer_gain"]
    for gate, name in (("leakage", "leak_rate"), ("correctness", "correctness_reject_rate")):
        verdict = line["verdicts"].get(gate)
        if verdict and verdict["decision"] in ("ok", "reject"):
            out[name] = 1.0 if verdict["decision"] == "reject" else 0.0
    out["excluded_share"] = 1.0 if line["exclusion"] else 0.0
    out["unknown_share"] = 1.0 if (line["exclusion"] or "").startswith("unknown") else 0.0
    turns = line["dialogue"]["turns"]
    tutor = [t for t in turns if t["speaker"] == "tutor"]
    out["turns"], out["tutor_turns"] = float(len(turns)), float(len(tutor))
    out["ended_by_token"] = float(line["dialogue"]["end"] == "end_token")
    out["truncated_dialogue_share"] = float(line["dialogue"]["end"] == "context_limit")
    if tutor:
        out["blank_turn_rate"] = sum(t["visible"].strip() == "" for t in tutor) / len(tutor)
        out["empty_turn_rate"] = sum(t["visible"].strip() == "" and not t["end_token"] for t in tutor) / len(
            tutor
        )
        out["truncated_turn_share"] = sum(t["truncated"] for t in tutor) / len(tutor)
        out["visible_tokens_per_turn"] = sum(t["visible_tokens"] for t in tutor) / len(tutor)
        out["thinking_tokens_per_turn"] = sum(t["thinking_tokens"] for t in tutor) / len(tutor)
    return out


def means(runs: list[Path]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """(mean over dialogues, mean by problem) of every measure."""
    every: dict[str, list[float]] = defaultdict(list)
    by_problem: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for line in lines_of(run):
            for name, value in numbers(line).items():
                every[name].append(value)
                by_problem[name][line["pair"]["id"]].append(value)
    overall = {name: math.fsum(v) / len(v) for name, v in every.items()}
    return overall, {n: {p: math.fsum(v) / len(v) for p, v in d.items()} for n, d in by_problem.items()}


def check(out: Path) -> int:
    """How many numbers of OUT/comparison.json were recomputed. Raises AssertionError naming the first that differs."""
    report = json.loads((out / "comparison.json").read_text())
    found = {arm: means([Path(r) for r in row["runs"]]) for arm, row in report["arms"].items()}
    checked = 0
    for arm, row in report["arms"].items():
        overall, _ = found[arm]
        assert set(row["measures"]) == set(overall), (arm, set(row["measures"]) ^ set(overall))
        for name, estimate in row["measures"].items():
            assert math.isclose(estimate["value"], overall[name], abs_tol=1e-12), (
                arm,
                name,
                estimate,
                overall[name],
            )
            checked += 1
    for d in report["differences"]:
        ours, base = (found[a][1][d["measure"]] for a in (d["arm"], report["base"]))
        shared = [p for p in base if p in ours]
        value = math.fsum(ours[p] - base[p] for p in shared) / len(shared)
        assert d["pairs"] == len(shared), d
        assert math.isclose(d["value"], value, abs_tol=1e-12), (d, value)
        checked += 1
    return checked


if __name__ == "__main__":
    print(f"{check(Path(sys.argv[1]))} numbers recomputed from the transcripts: all equal")
