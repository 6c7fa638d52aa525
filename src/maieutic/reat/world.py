"""A constructed classroom in which it is known what helps: the right advice raises a student's success, the wrong one lowers it.

A student is in one of four *moods* (a state of the paper's schema each) and stuck at one of four *bottlenecks*. Of four
*approaches* exactly one fits, and which one depends on both: ``fitting[mood, bottleneck] = (mood + bottleneck) mod 4``, a Latin
square. So neither the state alone nor the difficulty alone tells what to do: an experience drawn at random in the right state fits
one time in four, and one with the right difficulty from another state never does. A tutor turn either takes an approach or is a
plain question; the student understands one more idea with

    p = 0.80 (fitting approach)   0.45 (plain question)   0.10 (another approach)

and has understood the problem after ``ideas`` of them. Everything is said in words, and read from words again
(:mod:`maieutic.reat.world_roles`). It is a test of machinery and no model of people: nothing about tutoring follows from it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from maieutic.reat.schema import Emotion, ErrorType, Intent, StateTags, Struggle

MOODS = ("confused", "frustrated", "confident", "calm")
TAGS: dict[str, StateTags] = {
    "confused": StateTags(
        emotion=Emotion.CONFUSED,
        intent=Intent.REQUEST_HINT,
        error_type=ErrorType.CONCEPT_ERROR,
        struggle=Struggle.FIRST_ATTEMPT,
    ),
    "frustrated": StateTags(
        emotion=Emotion.FRUSTRATED,
        intent=Intent.ASK_ANSWER,
        error_type=ErrorType.LOGIC_ERROR,
        struggle=Struggle.PERSISTENT_CONFUSION,
    ),
    "confident": StateTags(
        emotion=Emotion.CONFIDENT,
        intent=Intent.CONFIRM_UNDERSTANDING,
        error_type=ErrorType.CARELESS,
        struggle=Struggle.REPEATED_ERROR,
    ),
    "calm": StateTags(
        emotion=Emotion.NEUTRAL,
        intent=Intent.DEBUGGING,
        error_type=ErrorType.CALCULATION_ERROR,
        struggle=Struggle.PROGRESSING,
    ),
}
"""The state of each mood. No two are related (:mod:`maieutic.reat.related_states`): a filter that widens never mixes them."""
MOOD_SAYS: dict[str, tuple[str, ...]] = {
    "confused": ("I don't understand what to do.", "Hm, I'm lost here."),
    "frustrated": ("Ugh, just tell me the answer!", "This is so annoying, I keep failing."),
    "confident": ("I'm sure that I have it.", "Easy, it must be right like this."),
    "calm": ("I went on with it.", "Okay, here is my next line."),
}
BOTTLENECKS: dict[str, str] = {
    "order": "does not see which quantity all others depend on",
    "part": "takes a share for everything together",
    "key_word": "picks the operation because of some word in the text",
    "kinds": "adds up things that are measured differently",
}
"""Bottleneck → the abstract sentence that describes it."""
BOTTLENECK_SAYS: dict[str, str] = {
    "order": "I started with the last number that is given.",
    "part": "I took the piece as if it was all of it.",
    "key_word": "It says more, so I multiply.",
    "kinds": "I put both numbers into one sum.",
}
APPROACHES: dict[str, tuple[str, str]] = {
    "picture": ("draw a picture of the story", "Can you sketch the story as boxes and show me?"),
    "tiny_case": ("try a tiny made-up case", "Suppose everything was very small. What would you get then?"),
    "own_words": ("have it retold in own words", "Tell me the story again in your own words. What is asked?"),
    "reassure": (
        "name the feeling and take a smaller step",
        "That is a hard spot, and it is fine. Which bit is clear?",
    ),
}
"""Approach → (its name as advice says it, what a tutor who takes it says)."""
PLAIN = ("What would you do next?", "And how do you go on from there?")
"""Questions that take no approach."""
NAMES = tuple(APPROACHES)


@dataclass(frozen=True)
class World:
    """The law. ``p_advice``: how often a tutor takes the approach that its prompt advises."""

    ideas: int = 3
    p_fitting: float = 0.80
    p_plain: float = 0.45
    p_other: float = 0.10
    p_advice: float = 0.95
    p_plain_turn: float = 0.6
    """Without advice: how often the tutor asks a plain question; else it takes an approach at random."""
    p_mood_stays: float = 0.7

    def fitting(self, mood: str, bottleneck: str) -> str:
        """The one approach that helps."""
        return NAMES[(MOODS.index(mood) + list(BOTTLENECKS).index(bottleneck)) % len(NAMES)]

    def p_understand(self, mood: str, bottleneck: str, approach: str | None) -> float:
        """Chance of one more idea after a tutor turn that takes ``approach`` (None: a plain question)."""
        if approach is None:
            return self.p_plain
        return self.p_fitting if approach == self.fitting(mood, bottleneck) else self.p_other


def mood_of(text: str) -> str:
    """The mood that a student's message shows. Raises ValueError for one that is not of this world."""
    return _which(text, MOOD_SAYS, "mood")


def bottleneck_of(text: str) -> str:
    """The bottleneck that a student's message shows. Raises ValueError for one that is not of this world."""
    return _which(text, {k: (v,) for k, v in BOTTLENECK_SAYS.items()}, "bottleneck")


def _which(text: str, says: dict[str, tuple[str, ...]], what: str) -> str:
    for name, phrases in says.items():
        if any(p in text for p in phrases):
            return name
    raise ValueError(f"no {what} of this world shows in {text[:80]!r}")


def approach_of(text: str) -> str | None:
    """The approach that a tutor's message takes; None for a plain question."""
    return next((name for name, (_, says) in APPROACHES.items() if says in text), None)


def advised(text: str) -> str | None:
    """The approach that a piece of advice names, whichever it names first."""
    found = [(text.find(name), key) for key, (name, _) in APPROACHES.items() if name in text]
    return min(found)[1] if found else None


def student_says(mood: str, bottleneck: str, understood: int, rng: random.Random, surface: str) -> str:
    """A student's message: mood, how many ideas are there, what it is stuck at, and something of the problem's surface."""
    return (
        f"{rng.choice(MOOD_SAYS[mood])} {BOTTLENECK_SAYS[bottleneck]} "
        f"(That makes {understood} things that are clear to me.) I have {surface} on my page."
    )
