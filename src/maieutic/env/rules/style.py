"""The parts of the correctness gate that look at how the tutor speaks (paper, appendix C.2, points 4 to 6).

``empty_turn``      a turn with nothing visible (a last turn that only ends the conversation is no such turn).
``oversized``       a turn so long that it is not read to its end (:data:`maieutic.env.rules.reading.READ_LIMIT`).
``cut_off``         the token cap cut a turn in the middle of a sentence.
``scratch_work``    the tutor corrects itself aloud ("wait, no", "scratch that").
``wrong_language``  words in a script that the problem does not use.
``heavy_markdown``  a heading, table or code fence, 6 list lines or 5 bold spans in one turn.
``emojis``          3 in one turn, or 5 in all.
``repetition``      the same sentence of at least 5 words in 3 turns or 3 times in one; a word 8 times in a row.
``dictated``        the student is told what to say or write down.
``no_teaching``     no turn asks, hints, counts or names anything of the problem.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from maieutic.dialogue import Turn
from maieutic.env.rules.finding import Finding, clip
from maieutic.env.rules.reading import READ_LIMIT, read
from maieutic.env.rules.vocabulary import words

_SCRATCH = re.compile(
    r"\b(?:wait,? (?:no|actually|that's not)|no,? wait|wait,? let me|hmm,? (?:wait|let me re)|scratch that|oops|my mistake"
    r"|let me (?:re-?calculate|re-?compute|re-?do|re-?think|correct myself|start over|try that again)"
    r"|actually,? no\b|i made (?:a|an) (?:mistake|error)|sorry,? i mean|correction:)"
)
_DICTATED = re.compile(
    r"\b(?:repeat after me|repeat (?:this|these words|the following|what i (?:say|said))|say (?:it )?after me"
    r"|(?:please |just |now )?(?:say|write|type|copy|respond with|reply with)(?: down)?(?: exactly)?(?: this| the following"
    r"(?: sentence| line| words| text)?)?\s*: ?[\"'\w]|copy (?:this|the following|what i)|write (?:this|the following) down"
    r"|write down exactly|word for word|(?:please |just |now )(?:say|write|type|reply|answer)(?: with)? \")"
)
_FOREIGN = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\u1100-\u11ff]{2,}"  # kana, han, hangul
    r"|[\u0590-\u05ff\u0600-\u065f\u066e-\u06ef\u06fa-\u06ff\u0900-\u0965\u0970-\u097f\u0980-\u09e5\u0e00-\u0e4f]{2,}"
    r"|[\u0400-\u04ff]{3,}|[\u0370-\u03ff]{4,}"  # Cyrillic, Greek: single letters are symbols
)
_FOREIGN_WORDS = re.compile(
    r"\b(?:vamos a|cu[aá]nto|muy bien|por favor|tambi[eé]n|qu[eé] es|combien|c'est|s'il vous|tr[eè]s bien"
    r"|ist es|wie viele?|sehr gut|nicht|aber|und dann)\b",
    re.IGNORECASE,
)
_HEADING = re.compile(r"^[ ]{0,3}#{1,6} \S", re.MULTILINE)
_TABLE = re.compile(r"^\|.{1,400}\|[ ]{0,4}$|^[ ]{0,4}\|?[ ]{0,4}:?-{3,200}:?[ ]{0,4}\|", re.MULTILINE)
_FENCE = re.compile(r"^```", re.MULTILINE)
_LIST = re.compile(r"^[ \t]{0,8}(?:[-*+•]|\d{1,3}[.)])[ \t]", re.MULTILINE)
_BOLD = re.compile(r"\*\*")
_EMOJI = re.compile(
    "[\U0001f300-\U0001faff\U0001f1e6-\U0001f1ff\u2600-\u26ff\u2705\u2728\u2764\u2b50\u2714\u2716]"
)
_SENTENCES = re.compile(r"[^.?!\n]+[.?!]*")
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")
_FINISHED = re.compile(r"[.?!:;…)\]}\"'”’$*`。？！]\s*$")
_TEACHES = re.compile(
    r"\?|\d|\b(?:think|try|step|draw|what|how|why|find|calculate|compute|add|subtract|multiply|divide|sum|total|first|next"
    r"|because|means?|remember|notice|consider|equation|number|half|twice|double|each|check|explain|show|solve|work|say|tell"
    r"|describe|own words|read|look|write|imagine|start|begin|use|problem|question|answer|reason|understand)\b"
)
_COMMON = words(
    "this that with have from they will what when your about there their which would could should into more than then them "
    "many much does each some only also been were being just like make made over such very after before other"
)


def find_style(turns: Sequence[Turn], problem: str, ended_by_token: bool) -> Iterator[Finding]:
    """Everything found, in the order of the criteria above."""
    tutor = [(n, t) for n, t in enumerate(turns) if t.speaker == "tutor"]
    spoken = [(n, t) for n, t in tutor if not read(t.visible).blank]
    heard = {n for n, _ in spoken}
    for n, turn in tutor:
        closing = ended_by_token and turn.end_token and n == len(turns) - 1
        if n not in heard and not closing:
            yield Finding("empty_turn", n, turn.visible.strip(), "nothing visible reached the student")
    for n, turn in spoken:
        if len(turn.visible) > READ_LIMIT:
            yield Finding("oversized", n, clip(turn.visible), f"{len(turn.visible)} characters")
    spoken = [(n, replace(t, visible=t.visible[:READ_LIMIT])) for n, t in spoken]
    for n, turn in spoken:
        if turn.truncated and not _FINISHED.search(turn.visible[-20:]):
            yield Finding("cut_off", n, clip(turn.visible[-80:]), "the turn breaks off at the token cap")
    for n, turn in spoken:
        yield from _per_turn(n, turn, problem)
    yield from _emojis(spoken)
    yield from _repetition(spoken)
    yield from _teaching(spoken, problem)


def _per_turn(n: int, turn: Turn, problem: str) -> Iterator[Finding]:
    reading = read(turn.visible)
    canon = reading.canon
    for criterion, pattern in (("scratch_work", _SCRATCH), ("dictated", _DICTATED)):
        if (match := pattern.search(canon.text)) is not None:
            yield Finding(criterion, n, canon.quote(*match.span()))
    foreign = _foreign(turn.visible, problem)
    if foreign:
        yield Finding("wrong_language", n, foreign)
    for pattern, limit in ((_HEADING, 1), (_TABLE, 1), (_FENCE, 1), (_LIST, 6), (_BOLD, 10)):
        found = [m for _, m in zip(range(limit), pattern.finditer(turn.visible), strict=False)]
        if len(found) == limit:
            line = turn.visible[found[-1].start() :].split("\n", 1)[0]
            yield Finding("heavy_markdown", n, clip(line))
            break


def _foreign(text: str, problem: str) -> str:
    """A run of another script or language than the problem's, empty when there is none."""
    match = _FOREIGN.search(text)
    if match is not None and not _FOREIGN.search(problem) and not _mixed_script(text, match):
        return clip(match.group())
    match = _FOREIGN_WORDS.search(text)
    return clip(match.group()) if match is not None and not _FOREIGN_WORDS.search(problem) else ""


def _mixed_script(text: str, match: re.Match[str]) -> bool:
    """A run inside a Latin word is a disguise, which the text layer sees through, not another language."""
    before, after = text[match.start() - 1 : match.start()], text[match.end() : match.end() + 1]
    return (before.isascii() and before.isalpha()) or (after.isascii() and after.isalpha())


def _emojis(spoken: Sequence[tuple[int, Turn]]) -> Iterator[Finding]:
    total = 0
    for n, turn in spoken:
        found = _EMOJI.findall(turn.visible)
        total += len(found)
        if len(found) >= 3 or (found and total >= 5):
            yield Finding("emojis", n, found[-1], f"{len(found)} in this turn, {total} so far")
            return


def _repetition(spoken: Sequence[tuple[int, Turn]]) -> Iterator[Finding]:
    in_turns: Counter[str] = Counter()
    for n, turn in spoken:
        here: Counter[str] = Counter()
        for match in _SENTENCES.finditer(turn.visible):
            tokens = _WORD.findall(match.group().lower())
            if len(tokens) < 5:
                continue
            phrase = " ".join(tokens)
            here[phrase] += 1
            if here[phrase] == 3 or (here[phrase] == 1 and in_turns[phrase] == 2):
                yield Finding("repetition", n, clip(match.group()), "said for the third time")
                return
        in_turns.update(set(here))
        run, last = 0, ""
        for word in _WORD.finditer(turn.visible):
            run = run + 1 if word.group().lower() == last else 1
            last = word.group().lower()
            if run == 8:
                yield Finding("repetition", n, clip(word.group()), "one word eight times in a row")
                return


def _teaching(spoken: Sequence[tuple[int, Turn]], problem: str) -> Iterator[Finding]:
    if not spoken:
        return
    topic = {w for w in _WORD.findall(problem.lower()) if len(w) >= 4} - _COMMON
    for _, turn in spoken:
        text = read(turn.visible).canon.text
        if _TEACHES.search(text) or topic & set(_WORD.findall(text)):
            return
    n, turn = spoken[0]
    yield Finding("no_teaching", n, clip(turn.visible), "no turn of the tutor deals with the problem")
