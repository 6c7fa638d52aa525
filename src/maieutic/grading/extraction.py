r"""The final answer in a model's text. Pure, linear in the length of the text, no algebra.

The order, first hit wins:

1. the last `\boxed{...}` or `\fbox{...}` with balanced braces that is not empty (of nested boxes the outermost,
   the inner box commands removed); `\boxed 5` without braces also counts. A box that is never closed was cut
   by the token cap: it and what follows it are ignored.
2. the last "answer is ...", "answer: ...", "answer = ..." up to the end of its sentence.
3. the last `#### ...` whose line is a value (a Markdown heading in words is not).
4. the last number, or the last `(B)`, `option B` or line `B`, whichever ends later.

Only visible text should be given: thinking is private, and may name other answers.
"""

import re

from maieutic.grading.plain import MAX_ANSWER_CHARS, clean, has_prose, read_choice, read_number

_MAX_HITS = 64
"""Of each kind of mark only the last ones are looked at, so that hostile text cannot make this quadratic."""
_TAIL_CHARS = 4000

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_ANSWER = re.compile(
    r"\banswers?\b(?:\s+(?:to|for)\s[^.\n:]{0,80}?)?[\s*]*(?:\bis\b|\bwas\b|\bequals\b|\b(?:would|will|must|should) be\b|:|=)"
    r"[\s*:]*(?:[^\S\n]*\n)?",
    re.IGNORECASE,
)
_HASHES = re.compile(r"####[ \t]*([^\n]+)")
_DEC = r"(?:\d{1,3}(?:(?:,|\{,\}|\\,)\d{3})+(?:\.\d+)?(?![\d])|\d+(?:\.\d+)?|\.\d+)"
_FRAC = r"\\[dtc]?frac\s*(?:\{\s*[-+]?[\d.,]+\s*\}|\d)\s*(?:\{\s*[-+]?[\d.,]+\s*\}|\d)"
_NUMBER = re.compile(
    r"(?<![\w.\\])(?:(?<!\))[-+−])?\\?[$€£]?[-+−]?"
    rf"(?:\d+(?::\d+)+(?:\s*[AaPp]\.?[Mm]\b)?|\d+\s*{_FRAC}|{_FRAC}|\d+[ ]\d+/\d+|{_DEC}/{_DEC}|{_DEC})"
    r"(?:\s*\\?%|\s*percent\b)?"
)
_CHOICE = re.compile(
    r"(?<![\w)])\(([A-J])\)(?!\w)|\b(?:option|choice)\s+\(?([A-J])\b\)?|^[ \t*]*([A-J])[.)]?[ \t*.]*$",
    re.MULTILINE,
)
_TIME = re.compile(r"\d{1,2}:\d{2}(?:\s*[ap]\.?m\b\.?)?", re.IGNORECASE)
_MATH_SPAN = re.compile(r"\$\$?([^$\n]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_MATH_RUN = re.compile(
    r"(?:[-+*/^=<>().,:{}\[\]\d\s%$€£_−]|\\[A-Za-z]+|\\[%$,;!{}]|(?<![A-Za-z])[A-Za-z](?![A-Za-z']))+"
)


def _closing(text: str, opening: int) -> int:
    """Index of the brace that closes the one at `opening`, or -1. Escaped braces do not count."""
    depth = 0
    for m in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, opening):
        if m[0] == "{":
            depth += 1
        elif m[0] == "}":
            depth -= 1
            if depth == 0:
                return m.start()
    return -1


def _boxed(text: str) -> tuple[str | None, str]:
    """The content of the last closed box, and the text that the other rules may use."""
    best: tuple[int, str] | None = None
    usable = text
    for m in reversed(list(_BOX.finditer(text))[-_MAX_HITS:]):
        if text[m.end() : m.end() + 1] == "{":
            end = _closing(text, m.end())
            if end < 0:
                usable = text[: m.start()]
                continue
            content = text[m.end() + 1 : end]
        else:
            token = re.compile(r"[^\s{}$\\]+").match(text, m.end())
            if token is None:
                continue
            end, content = token.end(), token[0].rstrip(".,;")
        if not _unbox(content):
            continue
        if best is None or end > best[0]:
            best = (end, content)
    return (_unbox(best[1]) if best else None), usable


def _unbox(content: str) -> str:
    if len(content) > MAX_ANSWER_CHARS:
        return content.strip()
    while m := _BOX.search(content):
        if content[m.end() : m.end() + 1] == "{" and (end := _closing(content, m.end())) >= 0:
            content = content[: m.start()] + content[m.end() + 1 : end] + content[end + 1 :]
        else:
            content = content[: m.start()] + content[m.end() :]
    return content.strip()


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(reversed(list(pattern.finditer(text))), None)


def _last_number(text: str) -> tuple[int, str] | None:
    last = _last(_NUMBER, text)
    return None if last is None else (last.end(), last[0].strip())


def _from_phrase(tail: str) -> str | None:
    """The answer inside what follows "the answer is"."""
    tail = tail.strip().split("\n", 1)[0]
    sentence = (
        re.split(r"(?<=[^.])[.!?](?=\s|$|\*)(?!\s*[=+*/-])", tail, maxsplit=1)[0].strip().strip("*").strip()
    )
    if not sentence or re.match(r"(?:not|n't|in|unclear|unknown)\b", sentence, re.IGNORECASE):
        return None
    plain = clean(sentence)
    if not plain:
        return None
    if read_number(plain) or read_choice(plain):
        return sentence
    for m in _MATH_SPAN.finditer(sentence):
        span = (m[1] or m[2] or m[3]).strip()
        if span and not has_prose(clean(span)):
            return span
    if time := _TIME.match(plain):
        return time[0]
    left, equals, right = plain.rpartition("=")
    if equals and not has_prose(left) and read_number(right.strip()):
        return right.strip()  # `4/5 of 20 = 16`
    if re.search(r"\d", plain) and _MATH_RUN.fullmatch(re.sub(r"\b(?:and|or)\b", ",", plain)):
        return sentence  # `4 and 5`
    if label := re.match(r"\(([A-J])\)|([A-J])(?=[),:])", plain):
        return str(label[1] or label[2])
    if (math := _MATH_RUN.match(plain)) and (re.search(r"[\d\\]", math[0]) or math.end() == len(plain)):
        run = math[0].strip().rstrip(",.=").strip()
        # A unit may follow; a letter before a word is that word's article, not algebra.
        run = re.sub(r"\s+[aAI]$", "", run)
        if run and not re.search(r"[-+*/^(]$", run):
            return run
    if number := _last_number(sentence):
        return number[1]
    return sentence if len(plain.split()) <= 6 else None


def extract_answer(text: str) -> str | None:
    """The final answer as the text writes it, or None when there is none. The order is at the top of this module."""
    boxed, text = _boxed(text)
    if boxed is not None:
        return boxed
    for m in reversed(list(_ANSWER.finditer(text))[-_MAX_HITS:]):
        if (answer := _from_phrase(text[m.end() : m.end() + _TAIL_CHARS])) is not None:
            return answer
    for m in reversed(list(_HASHES.finditer(text))[-_MAX_HITS:]):
        value = m[1].strip().strip("*").strip()
        plain = clean(value)
        if plain and (read_number(plain) or read_choice(plain) or not has_prose(plain)):
            return value
    tail = text[-_TAIL_CHARS:]
    number = _last_number(tail)
    choice = _last(_CHOICE, tail)
    if choice is not None and (number is None or choice.end() > number[0]):
        return choice[1] or choice[2] or choice[3]
    return number[1] if number else None
