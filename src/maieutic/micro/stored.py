"""The results of ``make science`` in brief, as one JSON file that ships with the package: what a run's report compares itself with.

python -m maieutic.micro.stored runs/science/results       writes data/micro/science.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from maieutic.errors import MaieuticError
from maieutic.micro.science_report import Finding, bootstrap, findings, load
from maieutic.micro.shipped import RECORD, models_dir
from maieutic.resources import share_dir

SCHEMA = 1
Triple = tuple[float, float, float]
"""Mean, and the ends of its 95 % interval."""


@dataclass(frozen=True, slots=True)
class StoredArm:
    """One arm over its seeds: leak rate and masked gain after training, masked gain before, gain by the arm's own measure."""

    name: str
    seeds: tuple[int, ...]
    leak: Triple
    before: Triple
    masked: Triple
    own: Triple


@dataclass(frozen=True, slots=True)
class Stored:
    """``weights``: SHA-256 of the models that were used, by name, so that results of another build are told apart."""

    problems: int
    weights: dict[str, str]
    arms: tuple[StoredArm, ...]
    findings: tuple[Finding, ...]

    def figure(self) -> str:
        """Gains by arm as SVG."""
        from maieutic.micro.figures import dots_svg

        rows = [(arm.name, (arm.before, arm.masked, arm.own)) for arm in self.arms]
        return dots_svg(rows, ["before", "after, tutor hidden", "after, own measure"], "learning gain")


def stored_file() -> Path:
    """Where the shipped results are."""
    return share_dir("data") / "micro" / "science.json"


def shipped_weights() -> dict[str, str]:
    """SHA-256 of the shipped models, as recorded when they were built."""
    found: dict[str, str] = json.loads((models_dir() / RECORD).read_text(encoding="utf-8"))["weights_sha256"]
    return found


def summarise(files: Sequence[Path]) -> Stored:
    """Result files of :mod:`maieutic.micro.science` in brief. Raises ValueError when there is none, or when they do not fit
    together."""
    if not files:
        raise ValueError("there are no results to store")
    arms = load(files)
    setting = arms[0].results[0]["setting"]
    if setting["overrides"]:
        raise ValueError(
            f"results with overrides ({' '.join(setting['overrides'])}) are not those of the recipes: not stored"
        )

    def triple(table: object) -> Triple:
        e = bootstrap(table)  # type: ignore[arg-type]
        return round(e.mean, 4), round(e.low, 4), round(e.high, 4)

    return Stored(
        setting["problems"],
        setting["build"]["weights_sha256"],
        tuple(
            StoredArm(
                a.name,
                tuple(a.seeds),
                triple(a.leak("masked")),
                triple(a.gain("before")),
                triple(a.gain("masked")),
                triple(a.gain("own")),
            )
            for a in arms
        ),
        tuple(findings(arms)),
    )


def write_stored(files: Sequence[Path], target: Path | None = None) -> Path:
    """Write :func:`summarise` to ``target`` (None: the shipped place) and return where."""
    path = target or stored_file()
    text = json.dumps({"schema": SCHEMA, **asdict(summarise(files))}, indent=1, ensure_ascii=False)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text + "\n", encoding="utf-8")
    scratch.rename(path)
    return path


def load_stored(path: Path | None = None) -> tuple[Stored | None, str]:
    """(results, a remark): no results and why, or results and "" (or that they are of other models than ship now)."""
    path = path or stored_file()
    if not path.is_file():
        return None, "No results of the arms are stored with this copy."
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            return None, f"The stored results have schema {data['schema']!r}, not {SCHEMA}."
        arms = tuple(
            StoredArm(
                a["name"], tuple(a["seeds"]), *(_triple(a[k]) for k in ("leak", "before", "masked", "own"))
            )
            for a in data["arms"]
        )
        claims = tuple(Finding(f["claim"], f["holds"], f["evidence"]) for f in data["findings"])
        found = Stored(int(data["problems"]), dict(data["weights"]), arms, claims)
    except (ValueError, KeyError, TypeError) as error:  # an edited or cut file must not cost a run its report
        return None, f"The stored results ({path.name}) cannot be read: {type(error).__name__}: {error}."
    if found.weights != shipped_weights():
        return found, "These results are of another build of the models than the one that ships now."
    return found, ""


def _triple(values: Sequence[float]) -> Triple:
    mean, low, high = (float(v) for v in values)
    return mean, low, high


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m maieutic.micro.stored", description="Store results of make science with the package."
    )
    parser.add_argument("results", type=Path, help="folder of result files")
    parser.add_argument("--out", type=Path, help="file to write (else data/micro/science.json)")
    given = parser.parse_args(argv)
    try:
        path = write_stored(sorted(given.results.glob("*.json")), given.out)
    except ValueError as error:
        raise MaieuticError(f"{given.results}: {error}") from None
    print(f"stored: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
