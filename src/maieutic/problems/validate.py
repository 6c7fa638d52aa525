"""Every check that a finished set can be put to without a model: answers, variants, rates, duplicates inside and across splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from maieutic.errors import ProblemDataError
from maieutic.grading.equivalence import check_gold
from maieutic.problems.build.checks import check_variant
from maieutic.problems.build.recipe import ChecksSpec
from maieutic.problems.dedup import NearDuplicates
from maieutic.problems.schema import ProblemPair

INFORMATION = frozenset({"no_variant", "no_rate"})
"""Findings that a set may have on purpose; the others make ``maieutic data validate`` fail."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One finding about one pair."""

    split: str
    pair: str
    reason: str
    detail: str


@dataclass(slots=True)
class Validation:
    """All findings on a set."""

    pairs: dict[str, int]
    """Pairs by split."""
    evaluation: int
    faults: list[Fault] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(f.reason in INFORMATION for f in self.faults)

    def counts(self) -> dict[str, int]:
        """Findings by reason, most frequent first."""
        out: dict[str, int] = {}
        for f in self.faults:
            out[f.reason] = out.get(f.reason, 0) + 1
        return dict(sorted(out.items(), key=lambda x: (-x[1], x[0])))

    def as_dict(self) -> dict[str, Any]:
        faults = [
            {"split": f.split, "pair": f.pair, "reason": f.reason, "detail": f.detail} for f in self.faults
        ]
        return {
            "schema": 1,
            "ok": self.ok,
            "pairs": self.pairs,
            "evaluation": self.evaluation,
            "counts": self.counts(),
            "faults": faults,
        }

    def lines(self, examples: int = 3) -> list[str]:
        """For people: counts, each with its first examples."""
        sizes = ", ".join(f"{n} pairs in {name}" for name, n in self.pairs.items())
        out = [sizes + (f"; {self.evaluation} evaluation problems" if self.evaluation else "")]
        for reason, n in self.counts().items():
            out.append(f"{n:>6}  {reason}" + (" (allowed)" if reason in INFORMATION else ""))
            of = [f for f in self.faults if f.reason == reason]
            if reason not in INFORMATION:
                out += [f"          {f.split} {f.pair}: {f.detail}" for f in of[:examples]]
        out.append("valid" if self.ok else "not valid")
        return out


def validate(
    splits: Mapping[str, Sequence[ProblemPair]],
    *,
    evaluation: Mapping[str, Sequence[ProblemPair]] | None = None,
    checks: ChecksSpec | None = None,
    threshold: float = 0.8,
    shingle: int = 3,
) -> Validation:
    """Check all splits, each pair by itself and all texts against each other and against the evaluation sets.

    A text that nearly repeats an earlier one is ``duplicate`` inside its split, ``split_overlap`` across splits,
    ``evaluation_set`` against an evaluation set. A variant may resemble its own source.
    """
    checks = checks or ChecksSpec()
    index = NearDuplicates(threshold, shingle)
    count = 0
    for name, pairs in (evaluation or {}).items():
        for pair in pairs:
            for side, problem in (("source", pair.source), ("transfer", pair.transfer)):
                if problem is not None:
                    index.add(f"evaluation\x00{name}\x00{pair.id}\x00{side}", problem.text)
                    count += 1
    out = Validation({name: len(pairs) for name, pairs in splits.items()}, count)
    for name, pairs in splits.items():
        for pair in pairs:
            out.faults += [Fault(name, pair.id, *found) for found in _alone(pair, checks)]
            own = [f"split\x00{name}\x00{pair.id}\x00{side}" for side in ("source", "transfer")]
            for key, problem in zip(own, (pair.source, pair.transfer), strict=True):
                if problem is None:
                    continue
                if (found := index.find(problem.text, ignore=own)) is not None:
                    kind, split, other, _ = found.key.split("\x00")
                    reason = "evaluation_set"
                    if kind == "split":
                        reason = "duplicate" if split == name else "split_overlap"
                    told = f"{key.rsplit(chr(0), 1)[1]} is {found.similarity:.0%} the same as {split} {other}"
                    out.faults.append(Fault(name, pair.id, reason, told))
                index.add(key, problem.text)
    return out


def _alone(pair: ProblemPair, checks: ChecksSpec) -> list[tuple[str, str]]:
    out = []
    for side, problem in (("source", pair.source), ("transfer", pair.transfer)):
        if problem is None:
            continue
        try:
            check_gold(problem.answer)
        except ProblemDataError as error:
            out.append(("unusable_answer", f"{side}: {error}"))
        for student, rate in problem.rates.items():
            if abs(rate.rate * rate.n - round(rate.rate * rate.n)) > 1e-6 * rate.n:
                out.append(
                    ("impossible_rate", f"{side}: {rate.rate} is no share of {rate.n} samples ({student})")
                )
    if pair.transfer is None:
        return [*out, ("no_variant", "no variant")]
    if not out and (found := check_variant(pair.source, pair.transfer.text, pair.transfer.answer, checks)):
        out.append((found.reason, found.detail))
    if lacking := set(pair.source.rates) ^ set(pair.transfer.rates):
        out.append(("rate_on_one_side", f"one side only has a rate of {sorted(lacking)[0]}"))
    if not pair.source.rates and not pair.transfer.rates:
        out.append(("no_rate", "no solve rate"))
    return out
