"""What simulated servers say: whole lines of each role, drawn by the bytes of a request. Light to import: servers start with it."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from support.latencies import END_HAZARD
from support.loopback import Piece

RIGHT = 4
"""Answers are drawn from 1 … 4, so one in four is right."""
ALGEBRA = 64
"""One answer in so many needs algebra: tens of milliseconds of a CPU, which simulated time does not shorten."""
_OPENERS = ["first", "now", "then", "next", "here", "for a start", "once more", "in your words"]
_THINGS = [
    "amounts",
    "people",
    "groups",
    "boxes",
    "numbers",
    "parts",
    "steps",
    "units",
    "words",
    "quantities",
]
_ASKS = ["tell you", "stand for", "have in common", "say about the question", "change in the story"]


@dataclass(frozen=True, slots=True)
class Lines:
    """What the servers say (a :class:`support.loopback.Script` by its methods): whole lines, drawn by the request's bytes.

    ``lines[model]``: answers to requests for one sample. ``tests[model]``: to requests for several.
    """

    lines: Mapping[str, Sequence[Piece]]
    tests: Mapping[str, Sequence[Piece]]
    stop: Piece
    max_model_len: int = 32_768

    @property
    def tokens(self) -> Mapping[str, Sequence[Piece]]:
        """The models that are served."""
        return self.lines

    def keys(self, raw: bytes, n: int) -> list[int]:
        """One for each of ``n`` answers."""
        first = zlib.crc32(raw)
        return [zlib.crc32(b"%d" % i, first) for i in range(n)]

    def pieces(self, model: str, key: int, n: int = 1) -> list[Piece]:
        """The answer with this key."""
        among = self.tests[model] if n > 1 and model in self.tests else self.lines[model]
        return [among[key % len(among)], self.stop]


def make_lines(end_token: str) -> Lines:
    """Tutor turns that ask, student turns that answer vaguely, verdicts OK, post-test answers of which a quarter is right.

    One tutor turn in five carries the end token (honoured from the fourth on): :data:`support.latencies.END_HAZARD`. Of the
    post-test's answers one in :data:`ALGEBRA` needs algebra, and so the grader's worker processes; the others are plain numbers.
    """
    from maieutic.tiny import TURN_END, tiny_tokenizer

    tokenizer = tiny_tokenizer()

    def piece(text: str) -> Piece:
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        rng = random.Random(text)
        logprobs = tuple(round(-rng.expovariate(1.5), 6) for _ in ids)
        return Piece(text, ids, tuple(tokenizer.decode([i]) for i in ids), logprobs)

    phrases = [(o, t, a) for o in _OPENERS for t in _THINGS for a in _ASKS]
    every = round(1 / END_HAZARD)
    tutor = [
        piece(f"{o.capitalize()}, what do the {t} {a}?" + (f" {end_token}" if i % every == 0 else ""))
        for i, (o, t, a) in enumerate(phrases)
    ]
    # Under 12 words: longer ones that come twice in a dialogue would be taken for copies, and be sampled again.
    student = [piece(f"The {t} {a}? {o.capitalize()} I wonder.") for o, t, a in phrases]
    algebra = [f"{k}(x + {x}) - {k}x - {(k - 1) * x}" for k in range(2, 10) for x in range(1, RIGHT + 1)]
    plain = [piece(f"So I get \\boxed{{{x}}}.") for x in range(1, RIGHT + 1)]
    # As often as keeps the share.
    often = (ALGEBRA - 1) * len(algebra) // RIGHT
    answers = [piece(f"So I get \\boxed{{{a}}}.") for a in algebra] + plain * often
    verdict = {"reasoning": "The tutor asks.", "verdict": "OK", "criterion": "", "quote": ""}
    ids = (int(tokenizer.convert_tokens_to_ids(TURN_END)),)
    return Lines(
        {"tutor": tutor, "student": student, "judge": [piece(json.dumps(verdict))]},
        {"student": answers},
        Piece("", ids, (TURN_END,), (-0.1,)),
    )
