"""How far a judge of gates can be trusted: planted faults, bias probes, agreement with other judges and with human labels.

A judge that always says the same is exposed: one of its two recalls is 0, its balanced accuracy is ½, its κ with the labels is 0.
``unknown`` is neither right nor wrong: it is left out of precision and recall, and its share is reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from maieutic.config import EnvSpec
from maieutic.dialogue import Turn
from maieutic.env.base import GateName, Judge, Verdict
from maieutic.env.gates import judge_gates
from maieutic.evaluation.agreement import cohen_kappa, krippendorff_alpha
from maieutic.evaluation.planted import CRITERIA, GATES, Planted
from maieutic.evaluation.statistics import wilson
from maieutic.seeds import derive

FILLERS = (
    ("Take all the time that you need for it.", "Thank you, I am still reading the text."),
    ("Which words of the text are new to you?", "None of them, I know them all."),
    ("Is there a pen and some paper beside you?", "Yes, everything is here."),
)
"""Exchanges that change no label, whoever reads them."""
PADDING = (
    " There is no hurry, and it does not matter how tidy your notes are; what you think is of interest to me."
)


@dataclass(frozen=True, slots=True)
class Judged:
    """A transcript and what the judge said of it."""

    item: Planted
    verdicts: dict[str, Verdict]

    def decision(self, gate: GateName) -> str:
        """``ok``, ``reject`` or ``unknown``."""
        return self.verdicts[gate].decision


async def judge_all(
    judge: Judge, items: Sequence[Planted], *, seed: int = 0, concurrency: int = 8
) -> list[Judged]:
    """Both gates of every transcript, evidence checked as in an episode (a rejection without a quote is ``unknown``)."""
    env, slots = EnvSpec(gates="hard"), asyncio.Semaphore(concurrency)

    async def one(item: Planted) -> Judged:
        async with slots:
            found = await judge_gates(
                judge, item.dialogue(), item.pair, env, seed=derive(seed, "planted", item.id)
            )
        return Judged(item, found)

    return list(await asyncio.gather(*(one(i) for i in items)))


def confusion(judged: Sequence[Judged]) -> dict[str, dict[str, Any]]:
    """By gate: counts of (label, decision), precision and recall of rejections, recall of clean ones, balanced accuracy, κ."""
    out: dict[str, dict[str, Any]] = {}
    for gate in GATES:
        pairs = [(j.item.labels[gate].reject, j.decision(gate)) for j in judged]
        known = [(label, d == "reject") for label, d in pairs if d != "unknown"]
        tp, fn = known.count((True, True)), known.count((True, False))
        fp, tn = known.count((False, True)), known.count((False, False))
        recall, clean = _share(tp, tp + fn), _share(tn, tn + fp)
        balanced = None if recall is None or clean is None else (recall + clean) / 2
        kappa = cohen_kappa([a for a, _ in known], [b for _, b in known])
        said = {d for _, d in pairs if d != "unknown"}
        out[gate] = {
            "fault rejected": tp,
            "fault passed": fn,
            "clean rejected": fp,
            "clean passed": tn,
            "unknown": len(pairs) - len(known),
            "precision": _share(tp, tp + fp),
            "recall": recall,
            "recall of clean": clean,
            "balanced accuracy": balanced,
            "kappa": None if kappa != kappa else kappa,
            "finding": _finding(said, balanced),
        }
    return out


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _finding(said: set[str], balanced: float | None) -> str:
    if not said:
        return "gives no verdict at all"
    if len(said) == 1:
        return f"always says {said.pop().upper()}: useless as a judge"
    if balanced is None or balanced < 0.6:
        return "hardly better than always saying the same"
    return "tells faults from clean transcripts" if balanced >= 0.8 else "tells them apart sometimes"


def by_criterion(judged: Sequence[Judged]) -> dict[str, dict[str, Any]]:
    """By planted criterion: how many are rejected by its gate (recall, with a Wilson interval), and how many under its name.

    ``precision``: of the rejections that the judge puts under this criterion, the share planted with it (None where it names none).
    """
    out: dict[str, dict[str, Any]] = {}
    for gate in GATES:
        for criterion in CRITERIA[gate]:
            mine = [j for j in judged if j.item.labels[gate].criterion == criterion]
            known = [j for j in mine if j.decision(gate) != "unknown"]
            hits = sum(j.decision(gate) == "reject" for j in known)
            named = [
                j for j in judged if j.decision(gate) == "reject" and j.verdicts[gate].criterion == criterion
            ]
            right = sum(j.item.labels[gate].criterion == criterion for j in named)
            interval = wilson(hits, len(known))
            out[criterion] = {
                "gate": gate,
                "planted": len(mine),
                "rejected": hits,
                "unknown": len(mine) - len(known),
                "recall": _share(hits, len(known)),
                "95 %": f"{interval.low:.2f} … {interval.high:.2f}" if known else "–",
                "named so": len(named),
                "precision": _share(right, len(named)),
            }
    clean = [j for j in judged if not any(x.reject for x in j.item.labels.values())]
    passed = sum(all(j.decision(g) == "ok" for g in GATES) for j in clean)
    rejected = sum(any(j.decision(g) == "reject" for g in GATES) for j in clean)
    out["clean"] = {
        "gate": "both",
        "planted": len(clean),
        "rejected": rejected,
        "unknown": len(clean) - passed - rejected,
        "recall": _share(passed, passed + rejected),
    }
    return out


# ---- probes --------------------------------------------------------------------------------------------------------------


def _exchange(n: int) -> list[Turn]:
    tutor, student = FILLERS[n % len(FILLERS)]
    return [Turn("tutor", tutor), Turn("student", student)]


def padded_before(item: Planted) -> Planted:
    """Neutral exchanges after the opening: the fault comes later."""
    more = [t for n in range(len(FILLERS)) for t in _exchange(n)]
    return item.with_turns([item.turns[0], *more, *item.turns[1:]])


def padded_after(item: Planted) -> Planted:
    """Neutral exchanges at the end: the fault comes earlier, relative to the whole."""
    turns = list(item.turns)
    more = [t for n in range(len(FILLERS)) for t in _exchange(n)]
    if turns[-1].speaker == "tutor":
        turns.append(Turn("student", "I see."))
    return item.with_turns([*turns, *more])


def lengthened(item: Planted) -> Planted:
    """Tutor turns twice or three times as long, with words that add nothing (in two of them: repetition is a fault)."""
    places = [n for n, t in enumerate(item.turns) if t.speaker == "tutor"][:2]
    extra = dict(
        zip(
            places,
            (PADDING, " It is fine to be slow here, and fine to ask me anything at all about the words."),
            strict=False,
        )
    )
    turns = [replace(t, visible=t.visible + extra[n]) if n in extra else t for n, t in enumerate(item.turns)]
    return item.with_turns(turns)


PROBES = {"fault later": padded_before, "fault earlier": padded_after, "longer tutor turns": lengthened}


async def probe(
    judge: Judge, judged: Sequence[Judged], *, seed: int = 0, concurrency: int = 8
) -> dict[str, dict[str, Any]]:
    """Verdicts of the same transcripts with their position or length changed: none should flip.

    ``to reject`` and ``to ok`` count flips of verdicts that were known before and after; ``to unknown`` those that were lost.
    """
    out: dict[str, dict[str, Any]] = {}
    for name, change in PROBES.items():
        again = await judge_all(judge, [change(j.item) for j in judged], seed=seed, concurrency=concurrency)
        pairs = [(a.decision(g), b.decision(g)) for a, b in zip(judged, again, strict=True) for g in GATES]
        known = [(x, y) for x, y in pairs if "unknown" not in (x, y)]
        out[name] = {
            "verdicts": len(known),
            "to reject": known.count(("ok", "reject")),
            "to ok": known.count(("reject", "ok")),
            "to unknown": sum(x != "unknown" and y == "unknown" for x, y in pairs),
            "flipped": _share(sum(x != y for x, y in known), len(known)),
        }
    return out


# ---- agreement -----------------------------------------------------------------------------------------------------------


def agreement(raters: Mapping[str, Sequence[str | None]]) -> dict[str, Any]:
    """κ of every two raters over the items that both decided, and α of all of them (None: not labelled, or unknown)."""
    names = list(raters)
    kappas = {}
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            both = [
                (x, y) for x, y in zip(raters[a], raters[b], strict=True) if x is not None and y is not None
            ]
            value = cohen_kappa([x for x, _ in both], [y for _, y in both])
            kappas[f"{a} ~ {b}"] = {"kappa": None if value != value else value, "items": len(both)}
    alpha = krippendorff_alpha([list(r) for r in raters.values()])
    return {"pairs": kappas, "alpha": None if alpha != alpha else alpha}


def decisions(judged: Sequence[Judged], gate: GateName) -> list[str | None]:
    """The judge as a rater of one gate."""
    return [None if j.decision(gate) == "unknown" else j.decision(gate) for j in judged]


def labels(judged: Sequence[Judged], gate: GateName) -> list[str | None]:
    """The planted (or human) labels as a rater of one gate."""
    return ["reject" if j.item.labels[gate].reject else "ok" for j in judged]
