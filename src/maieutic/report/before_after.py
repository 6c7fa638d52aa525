"""The same problem before and after training: dialogues side by side, and differences with an interval over problems."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from maieutic.evaluation.statistics import Difference, cluster_means, paired_difference
from maieutic.report.episode_html import dialogue_html
from maieutic.report.measures import written
from maieutic.report.page import esc
from maieutic.report.summary import Line, counted, reward_of, summarise

PER_EPISODE = ("transfer_gain", "same_gain", "reward", "pre", "post", "leak_rate", "correctness_reject_rate")
"""Measures that are a mean over episodes, so that a difference is paired by problem."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two episodes on one problem, and why they are shown."""

    title: str
    before: Line
    after: Line

    @property
    def change(self) -> float:
        """Reward after minus reward before."""
        before, after = reward_of(self.before), reward_of(self.after)
        assert before is not None and after is not None, "only episodes that count are paired"
        return after - before


def differences(first: Sequence[Line], last: Sequence[Line]) -> dict[str, Difference]:
    """After minus before for each of :data:`PER_EPISODE` that both have, paired by problem; an interval from 10 problems on."""
    before, after = _by_problem(first), _by_problem(last)
    found = {name: paired_difference(before[name], after[name]) for name in PER_EPISODE}
    return {name: difference for name, difference in found.items() if difference.pairs}


def _by_problem(lines: Sequence[Line]) -> dict[str, dict[Hashable, float]]:
    """For each measure the mean of each problem that has it."""
    rows = [(str(line["pair"]["id"]), summarise([line])) for line in lines]
    return {
        name: cluster_means(
            [row[name] for _, row in rows if name in row], [problem for problem, row in rows if name in row]
        )
        for name in PER_EPISODE
    }


def pairs(first: Sequence[Line], last: Sequence[Line]) -> list[Pair]:
    """Largest rise, median change and largest fall of the reward, each once, among problems that both evaluations counted.

    The rule chooses, not a person; ties go by the problem's id. Of several episodes on a problem the first one is taken.
    """
    before, after = _first_of_problem(first), _first_of_problem(last)
    both = [Pair("", before[p], after[p]) for p in sorted(before.keys() & after.keys())]
    ranked = sorted(both, key=lambda pair: -pair.change)  # stable: equal changes stay in order of id
    places = {"Largest rise": 0, "Median change": (len(ranked) - 1) // 2, "Largest fall": len(ranked) - 1}
    taken: set[int] = set()
    out = []
    for title, place in places.items():
        if ranked and place not in taken:
            taken.add(place)
            out.append(Pair(title, ranked[place].before, ranked[place].after))
    return out


def _first_of_problem(lines: Sequence[Line]) -> dict[str, Line]:
    out: dict[str, Line] = {}
    for line in sorted(lines, key=lambda line: line["index"]):
        if counted(line) and reward_of(line) is not None:
            out.setdefault(str(line["pair"]["id"]), line)
    return out


def pair_html(pair: Pair, titles: tuple[str, str], *, opened: bool) -> str:
    """A folded block with both dialogues in columns (one under the other on a narrow screen)."""
    columns = "".join(
        f"<div class='column' data-line='{esc(line['id'])}'><h4>{esc(title)}</h4>{dialogue_html(line)}</div>"
        for title, line in zip(titles, (pair.before, pair.after), strict=True)
    )
    problem = esc(str(pair.before["pair"]["id"]))
    return (
        f"<details class='card episode pair' data-problem='{problem}'{' open' if opened else ''}>"
        f"<summary><h3>{esc(pair.title)}</h3><span class='chip'>{problem}</span>"
        f"<span class='chip'>reward {written('reward', pair.change, difference=True)}</span></summary>"
        f"<div class='columns'>{columns}</div></details>"
    )
