"""What the rule-driven roles know of tutoring: cue words, and sentences for each student state. Crude by design."""

from __future__ import annotations

import re

from maieutic.latent.reading import wrong_calculation
from maieutic.reat.schema import Emotion, ErrorType, Intent, Struggle

EMOTIONS: tuple[tuple[Emotion, str], ...] = (
    (
        Emotion.FRUSTRATED,
        r"\bugh\b|give up|hate (this|it)|so hard|never going to|always make mistakes|no point",
    ),
    (Emotion.CONFUSED, r"don'?t (understand|get|know)|confus|stuck|lost|what do you mean|no idea"),
    (Emotion.RELIEVED, r"\boh\b,? (i see|now)|got it|makes sense|phew"),
    (Emotion.CURIOUS, r"what (if|happens)|i wonder|is it always|why does"),
    (Emotion.CONFIDENT, r"i'?m (sure|certain)|definitely|of course|easy|still think"),
)
INTENTS: tuple[tuple[Intent, str], ...] = (
    (Intent.OFF_TOPIC, r"football|lunch|my dog|game|weather"),
    (Intent.ASK_ANSWER, r"(just )?(tell|give) me the answer|what('s| is) the answer"),
    (
        Intent.REQUEST_HINT,
        r"\bhint\b|where do i start|what should i (do|calculate) (first|next)|how do i (do|start)",
    ),
    (Intent.ASK_CONCEPT, r"what does .{1,40} mean|what is an? \w+\?"),
    (Intent.ASK_EXPLANATION, r"\bwhy\b|explain|how come"),
    (Intent.CONFIRM_UNDERSTANDING, r"(is|was) (that|this|it) (right|correct)|right\?|correct\?"),
    (Intent.GUESSING, r"\bguess\b|\bmaybe\b|is it \d|or is it"),
)
ERRORS: tuple[tuple[ErrorType, str], ...] = (
    (ErrorType.CARELESS, r"mis-?read|overlooked|didn'?t see|forgot"),
    (
        ErrorType.CONCEPT_ERROR,
        r"(add|plus|times|multipl\w+|subtract|divid\w+) .*(because|since) .*|still think .*times|means? (adding|times)",
    ),
    (ErrorType.LOGIC_ERROR, r"\bso (then )?(it|the rest|i) (is|must|have)|therefore|that leaves"),
)
CLOSING = re.compile(r"^\W*(thanks|thank you|bye|goodbye|hello|hi)\b", re.IGNORECASE)
SUPPORT = {
    "specific": re.compile(
        r"(mix-?up|slip|step) (is|happens)|this part (is|trips)|many (people|learners)|takes (time|patience)|you already",
        re.I,
    ),
    "generic": re.compile(
        r"\b(great|good|nice|well) (job|work|done|try)|you can do (it|this)|don'?t worry|keep going", re.I
    ),
}
CHANGE = re.compile(
    r"\b(imagine|picture|draw|smaller (case|example|step)|another way|example with|table)\b", re.IGNORECASE
)
TARGET: dict[ErrorType, re.Pattern[str]] = {
    ErrorType.CALCULATION_ERROR: re.compile(r"\b(calculation|work (it|that) out again|check (the|your) (result|sum))", re.I),
    ErrorType.CONCEPT_ERROR: re.compile(r"\b(stands? for|what .{1,30} means|compare the (parts|two)|part of)", re.I),
    ErrorType.LOGIC_ERROR: re.compile(r"\b(follows? from|which comes first|order of|what do we know)", re.I),
    ErrorType.CARELESS: re.compile(r"\b(read (it|the \w+) again|the story says|look at the text)", re.I),
}  # fmt: skip
"""What a reply says that is aimed at an error of that kind."""
AIMED: dict[ErrorType, str] = {
    ErrorType.CALCULATION_ERROR: "Please work it out again slowly: which part of the calculation would you check first?",
    ErrorType.CONCEPT_ERROR: "Say in your own words what each quantity stands for: which one is a part of the other?",
    ErrorType.LOGIC_ERROR: "What do we know for sure, and what follows from it?",
    ErrorType.CARELESS: "Read the text again: what is given there, and what did you use?",
    ErrorType.NO_ERROR: "How do you know that your step is right, and what comes after it?",
    ErrorType.NOT_APPLICABLE: "What is asked for, and what would help you to find it?",
}
COMFORT: dict[Emotion, str] = {
    Emotion.FRUSTRATED: "This part trips many people up, and you already have a piece of it.",
    Emotion.CONFUSED: "This step is easy to mix up; it takes time.",
}
SHIFT = "Imagine a smaller example with only a few things on the table."
DIAGNOSES: dict[ErrorType, tuple[str, str]] = {
    ErrorType.CALCULATION_ERROR: ("carries out an operation wrongly", "carries out the operation wrongly"),
    ErrorType.CONCEPT_ERROR: ("takes the wrong operation", "mistakes how the quantities are related"),
    ErrorType.LOGIC_ERROR: ("draws a conclusion that does not follow", "draws a conclusion that the givens do not support"),
    ErrorType.CARELESS: ("overlooks a condition", "overlooks a condition of the text"),
    ErrorType.NO_ERROR: ("", "has a right step and does not see what it is good for"),
    ErrorType.NOT_APPLICABLE: ("", "does not know how to begin"),
}  # fmt: skip
"""(error detail, the same in the abstract)."""
COURSE: dict[Struggle, str] = {
    Struggle.FIRST_ATTEMPT: "at a first attempt",
    Struggle.REPEATED_ERROR: "again after earlier corrections",
    Struggle.PERSISTENT_CONFUSION: "and stays confused through several explanations",
    Struggle.PROGRESSING: "while making progress",
    Struggle.REGRESSION: "after having had it right before",
    Struggle.NOT_APPLICABLE: "so far without a struggle",
}


def matched(text: str, cues: tuple[tuple[object, str], ...]) -> object | None:
    """What the first cue that matches stands for."""
    return next((value for value, cue in cues if re.search(cue, text, re.IGNORECASE)), None)


def error_of(text: str, gold: str) -> ErrorType:
    """The kind of error that a student utterance shows, given the right answer."""
    if wrong_calculation(text):
        return ErrorType.CALCULATION_ERROR
    found = matched(text, ERRORS)
    if isinstance(found, ErrorType):
        return found
    numbers = re.findall(r"\d+(?:\.\d+)?", text)
    if not numbers:
        return ErrorType.NOT_APPLICABLE
    return ErrorType.NO_ERROR if gold in numbers or "=" in text else ErrorType.LOGIC_ERROR


def emotion_of(text: str) -> Emotion:
    """The feeling that a student utterance shows."""
    found = matched(text, EMOTIONS)
    return found if isinstance(found, Emotion) else Emotion.NEUTRAL


def intent_of(text: str) -> Intent:
    """What the student wants."""
    found = matched(text, INTENTS)
    return found if isinstance(found, Intent) else Intent.DEBUGGING


def struggle_of(texts: list[str], gold: str) -> Struggle:
    """How the struggle goes, from all student utterances (the opening included, the latest last)."""
    wrong = [error_of(t, gold) not in (ErrorType.NO_ERROR, ErrorType.NOT_APPLICABLE) for t in texts]
    lost = [emotion_of(t) in (Emotion.CONFUSED, Emotion.FRUSTRATED) for t in texts]
    if len(texts) == 1:
        return Struggle.FIRST_ATTEMPT
    if wrong[-1]:
        if any(wrong[:-1]):
            return Struggle.REPEATED_ERROR
        earlier = any(error_of(t, gold) == ErrorType.NO_ERROR for t in texts[:-1])
        return Struggle.REGRESSION if earlier else Struggle.FIRST_ATTEMPT
    if sum(lost) >= 2:
        return Struggle.PERSISTENT_CONFUSION
    return Struggle.PROGRESSING if any(wrong) or lost[-1] is False else Struggle.NOT_APPLICABLE
