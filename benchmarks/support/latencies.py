"""Simulated time: how long each request of a trace takes, and what a schedule of it can reach at best.

A request's time follows from its model, seed and number of samples alone, so every schedule of the same episodes meets the same
times. Output lengths are log-normal and cut at the caps of a turn; their spreads and two of the medians are measured on human
dialogues and worked solutions (see :data:`LENGTHS`). The server model is that of slots: at most S requests at a time, each at a
speed of its own, the others in order of arrival.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maieutic.env.base import Episode
from maieutic.seeds import derive


@dataclass(frozen=True, slots=True)
class Length:
    """Tokens of one sample: log-normal with this median and sigma (of the logarithm), at most ``cap``."""

    median: float
    sigma: float
    cap: int

    def draw(self, rng: random.Random) -> float:
        return min(float(self.cap), rng.lognormvariate(math.log(self.median), self.sigma))


LENGTHS = {
    # Sigma of a teacher's words a turn in 60 dialogues of MathDial (382 turns). The median is set: a fifth of the cap of visible
    # and thinking tokens together; people write 14 words, and models, which think first, many more.
    "tutor": Length(150, 0.66, 662),
    # Student turns of the same dialogues: median 31.5 words (4/3 tokens each), sigma 0.81.
    "student": Length(42, 0.81, 500),
    # Worked solutions of 300 GSM8K problems: median 47 words (1.6 tokens each: digits and signs), sigma 0.53.
    "post_test": Length(75, 0.53, 800),
    # Not measured: a few sentences of reasoning and a verdict.
    "judge": Length(150, 0.5, 4096),
}
"""By kind of request. Cap: the published ones (150 + 512 tokens of a tutor turn, 800 of a post-test's answer)."""
END_HAZARD = 0.2
"""Share of the tutor turns from the fourth on that end their dialogue: 4 to 11 turns, 7 on average (MathDial: 3 to 13, 6.4)."""


@dataclass(frozen=True, slots=True)
class Request:
    """What identifies a request to the servers."""

    model: str
    seed: int
    n: int = 1


@dataclass(frozen=True, slots=True)
class Trace:
    """The time of every request; sent to the servers as their ``latency``.

    Args:
        token_s: seconds a token. Real servers take 20 to 30 ms with full batches, so 1 ms is time some 25 times faster, which
            magnifies whatever the harness adds.
        first_s: seconds before the first token.
    """

    token_s: float
    first_s: float

    def seconds(self, request: Request) -> float:
        """``n`` samples are drawn side by side: the longest counts."""
        post_test = request.model == "student" and request.n > 1
        length = LENGTHS["post_test" if post_test else request.model]
        rng = random.Random(derive("latency", request.model, request.seed))
        return self.first_s + self.token_s * max(length.draw(rng) for _ in range(request.n))

    def __call__(self, body: dict[str, Any]) -> float:
        return self.seconds(Request(body["model"], body["seed"], body.get("n") or 1))


Stages = list[list[Request]]
"""The requests of one episode: stages one after the other, the requests of a stage at once."""


def stages_of(episode: Episode, *, gates: Sequence[str], samples: int, votes: int) -> Stages:
    """The requests that an episode must have made, from its seed and its number of turns alone.

    Args:
        gates: names of the gates that a served judge decides (asked for the first majority of ``votes`` in one request).
        samples: K of the post-test; 0: there was none.
    """
    out: Stages = []
    for number, turn in episode.dialogue.numbered():
        if not turn.scripted:
            out.append([Request(turn.speaker, derive(episode.seed, "turn", number))])
    if gates:
        seeds = [derive(derive(derive(episode.seed, "gates"), gate), "votes", 0) for gate in gates]
        # Endpoints by messages are sent 31 bits of a seed.
        out.append([Request("judge", seed % 2**31, votes // 2 + 1) for seed in seeds])
    if samples:
        out.append([Request("student", derive(episode.seed, "post_test", "transfer"), samples)])
    return out


Timed = list[list[tuple[str, float]]]
"""The stages of one episode as (model, seconds)."""


def timed(stages: Stages, trace: Trace) -> Timed:
    """What the servers need for each request."""
    return [[(r.model, trace.seconds(r)) for r in stage] for stage in stages]


@dataclass(frozen=True, slots=True)
class Bound:
    """What no schedule undercuts: the longest chain of one episode, and each server's work ÷ its slots. Seconds."""

    chain: float
    work: dict[str, float]

    @property
    def seconds(self) -> float:
        return max(self.chain, *self.work.values())


def bound(episodes: Sequence[Timed], slots: Mapping[str, int]) -> Bound:
    """Of episodes that start together."""
    chain = max(sum(max(s for _, s in stage) for stage in stages) for stages in episodes)
    work = dict.fromkeys(slots, 0.0)
    for model, seconds in (request for stages in episodes for stage in stages for request in stage):
        work[model] += seconds / slots[model]
    return Bound(chain, work)


Order = Callable[[Timed, int, float], float]
"""(the episode's stages, the stage, the time at which it is asked for) → the smallest is served first; ties by arrival."""


def arrival(stages: Timed, stage: int, now: float) -> float:
    """First come, first served: what the product and vLLM do."""
    return now


def fewest_turns(stages: Timed, stage: int, now: float) -> float:
    """Dialogues that are behind go first."""
    return stage


def longest_left(stages: Timed, stage: int, now: float) -> float:
    """The episode with most left to do goes first: nobody can know that, it shows what knowing would be worth."""
    return -sum(max(s for _, s in rest) for rest in stages[stage:])


def simulate(episodes: Sequence[Timed], slots: Mapping[str, int], order: Order = arrival) -> float:
    """Seconds until the last episode ends, when nothing but the servers takes time."""
    queues: dict[str, list[tuple[float, int, int, int, float]]] = {model: [] for model in slots}
    free, ticket, open_ = dict(slots), itertools.count(), [0] * len(episodes)
    running: list[tuple[float, int, int, int, str]] = []
    now = 0.0

    def ask(episode: int, stage: int) -> None:
        stages = episodes[episode]
        open_[episode] = len(stages[stage])
        for model, seconds in stages[stage]:
            entry = (order(stages, stage, now), next(ticket), episode, stage, seconds)
            heapq.heappush(queues[model], entry)

    def serve() -> None:
        for model, queue in queues.items():
            while free[model] and queue:
                _, _, episode, stage, seconds = heapq.heappop(queue)
                free[model] -= 1
                heapq.heappush(running, (now + seconds, next(ticket), episode, stage, model))

    for number in range(len(episodes)):
        ask(number, 0)
    serve()
    while running:
        now, _, episode, stage, model = heapq.heappop(running)
        free[model] += 1
        open_[episode] -= 1
        if not open_[episode] and stage + 1 < len(episodes[episode]):
            ask(episode, stage + 1)
        serve()
    return now
