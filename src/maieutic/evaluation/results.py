"""What an evaluation leaves: one JSON file a suite and arm, with every sample, and the same numbers as Markdown.

The file holds nothing that a resume could change: no times, no dates, no counts of retries. ``schema`` is raised when a field
changes its meaning or goes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from maieutic.errors import RunFolderError
from maieutic.evaluation.cache import Cost, summed
from maieutic.evaluation.statistics import (
    Difference,
    Estimate,
    cluster_means,
    estimate,
    holm,
    paired_difference,
)
from maieutic.shown import markdown_text
from maieutic.transcripts import _plain

SCHEMA = 1


@dataclass(slots=True)
class SuiteResult:
    """One suite of one arm. ``samples``: what was observed, each with ``key`` and ``problem`` (the cluster of errors)."""

    suite: str
    arm: str
    settings: dict[str, Any]
    """What decided the samples: the suite's settings, the arm, models, seed, data with their hashes."""
    metrics: dict[str, Estimate] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    tables: dict[str, Any] = field(default_factory=dict)
    """Anything that is not a mean: distributions, confusion tables, win rates by group."""
    notes: list[str] = field(default_factory=list)
    costs: dict[str, Cost] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, values: Sequence[float], clusters: Sequence[Hashable]) -> None:
        """The mean of finite ``values`` under ``name``, with its error clustered by ``clusters``."""
        kept = [(v, c) for v, c in zip(values, clusters, strict=True) if math.isfinite(v)]
        self.metrics[name] = estimate([v for v, _ in kept], [c for _, c in kept])

    def add_from(self, name: str, key: str | None = None) -> None:
        """The mean over samples of the number at ``key`` (default: ``name``); None and absent ones are left out."""
        held = [(float(s[key or name]), s["problem"]) for s in self.samples if s.get(key or name) is not None]
        self.add(name, [v for v, _ in held], [p for _, p in held])

    def close(self) -> SuiteResult:
        """Sum the costs of the samples."""
        self.costs = summed([(r, c) for s in self.samples for r, c in s.get("costs", {}).items()])
        return self

    def to_json(self) -> dict[str, Any]:
        """JSON-ready, without numbers that JSON lacks (nan is None)."""
        data = {"schema": SCHEMA, **{f: getattr(self, f) for f in self.__dataclass_fields__}}
        data["metrics"] = {name: asdict(e) for name, e in self.metrics.items()}
        plain: dict[str, Any] = _plain(_no_nan(data))
        return plain

    def write(self, folder: Path) -> Path:
        """``<suite>.json`` and ``<suite>.md``, whole or not at all; returns the JSON's path."""
        path = folder / f"{self.suite}.json"
        write_whole(path, json.dumps(self.to_json(), indent=1, ensure_ascii=True) + "\n")
        write_whole(folder / f"{self.suite}.md", markdown(self))
        return path


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step. RunFolderError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        try:
            # Lone surrogates (a file name that is not UTF-8) are no reason to lose the rest.
            part.write_text(text, encoding="utf-8", errors="backslashreplace")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be written: {error.strerror}") from error


def _no_nan(value: Any) -> Any:
    """Floats without a JSON number as None. Texts stay, also one that reads "nan": a model may have written it."""
    if isinstance(value, Mapping):
        return {k: _no_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_no_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_result(path: Path) -> dict[str, Any]:
    """A result file as a dict. RunFolderError for an unknown schema version or a file that cannot be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path}: no result can be read: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise RunFolderError(f"{path}: not a result of schema version {SCHEMA}")
    return data


def digest(value: Any) -> str:
    """First 16 hex digits of the SHA-256 of a JSON-ready value."""
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()[:16]


# ---- comparing two arms ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compared:
    """One measure of two arms; ``p_holm`` is adjusted over all measures that were compared together."""

    name: str
    difference: Difference
    p_holm: float | None


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Compared]:
    """b − a, paired by problem, of every measure that both result files have as a number of their samples.

    Raises ValueError when they are of different suites; whether they were measured alike is told by :func:`differing`.
    """
    if a["suite"] != b["suite"]:
        raise ValueError(f"suites {a['suite']!r} and {b['suite']!r} cannot be compared")
    names = [name for name in a["metrics"] if name in b["metrics"]]
    found: list[tuple[str, Difference]] = []
    for name in names:
        sides = [_per_problem(x, name) for x in (a, b)]
        if sides[0] and sides[1]:
            found.append((name, paired_difference(*sides)))
    tested = [(name, d.p) for name, d in found if d.p is not None]
    adjusted = dict(zip([n for n, _ in tested], holm([p for _, p in tested]), strict=True))
    return [Compared(name, d, adjusted.get(name)) for name, d in found]


_OF_THE_ARM = ("arm", "dialogues")
"""Settings of a result that are the arm's own: who tutored, and the dialogues that were labelled."""


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Settings by dotted key that two results of one suite differ in, those of the arms themselves left aside."""
    return [k for k in _differing(a["settings"], b["settings"], "") if k.split(".")[0] not in _OF_THE_ARM]


def _differing(a: Any, b: Any, key: str) -> list[str]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return [
            found
            for k in sorted(a.keys() | b.keys())
            for found in _differing(a.get(k), b.get(k), f"{key}.{k}" if key else k)
        ]
    return [] if a == b else [key]


def _per_problem(result: Mapping[str, Any], name: str) -> dict[Hashable, float]:
    held = [(float(s[name]), s["problem"]) for s in result["samples"] if isinstance(s.get(name), int | float)]
    return cluster_means([v for v, _ in held], [p for _, p in held])


def compared_markdown(first: str, second: str, rows: Sequence[Compared]) -> str:
    """A table of differences second − first."""
    lines = [
        f"| {markdown_text(second)} − {markdown_text(first)} | difference | 95 % interval | p | p (Holm) | problems |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        d = row.difference
        interval = (
            f"{d.low:.3f} … {d.high:.3f}" if d.low is not None and d.high is not None else (d.note or "–")
        )
        lines.append(
            f"| {row.name} | {_number(d.value)} | {interval} | {_number(d.p)} | {_number(row.p_holm)} | {d.pairs} |"
        )
    return "\n".join(lines) + "\n"


# ---- Markdown --------------------------------------------------------------------------------------------------------------


def _number(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"


def markdown(result: SuiteResult) -> str:
    """The result for people: measures with their errors, counts, costs, notes, the samples that failed."""
    lines = [f"# {result.suite}: {markdown_text(result.arm)}", ""]
    lines += [
        "| measure | value | standard error | 95 % interval | samples | problems |",
        "|---|---|---|---|---|---|",
    ]
    for name, e in result.metrics.items():
        interval = (
            f"{e.low:.4g} … {e.high:.4g}" if e.low is not None and e.high is not None else (e.note or "–")
        )
        lines.append(f"| {name} | {_number(e.value)} | {_number(e.se)} | {interval} | {e.n} | {e.clusters} |")
    if result.counts:
        lines += ["", "| count | |", "|---|---|", *(f"| {k} | {v} |" for k, v in result.counts.items())]
    for title, table in result.tables.items():
        lines += ["", f"**{title}**", "", *_table(table)]
    if result.costs:
        lines += [
            "",
            "| role | requests | prompt tokens | completion tokens | US $ |",
            "|---|---|---|---|---|",
        ]
        for role, c in result.costs.items():
            lines.append(
                f"| {role} | {c['requests']:.0f} | {c['prompt_tokens']:.0f} | {c['completion_tokens']:.0f} | {c['usd']:.4f} |"
            )
    lines += ["", *(f"- {markdown_text(note)}" for note in result.notes)] if result.notes else []
    if result.failed:
        lines += ["", f"{len(result.failed)} samples failed and are in no number:", ""]
        lines += [
            f"- {markdown_text(key)}: {markdown_text(why[:200])}"
            for key, why in list(result.failed.items())[:20]
        ]
    return "\n".join(lines) + "\n"


def _table(table: Any) -> list[str]:
    if isinstance(table, dict) and table and all(isinstance(v, dict) for v in table.values()):
        columns = list(dict.fromkeys(k for row in table.values() for k in row))
        head = [
            "| | " + " | ".join(markdown_text(c) for c in columns) + " |",
            "|---" * (len(columns) + 1) + "|",
        ]
        return head + [
            f"| {markdown_text(name)} | " + " | ".join(_cell(row.get(c)) for c in columns) + " |"
            for name, row in table.items()
        ]
    if isinstance(table, dict):
        return ["| | |", "|---|---|", *(f"| {markdown_text(k)} | {_cell(v)} |" for k, v in table.items())]
    return [f"`{json.dumps(table)}`"]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return _number(value)
    return "–" if value is None else markdown_text(value)
