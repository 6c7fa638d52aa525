"""What a judge model wrote, as a vote: read right or ``unknown``, never a default.

A reply is usually one JSON object ``{"reasoning", "verdict", "criterion", "quote"}``; models also fence it, talk around it, write
LaTeX with single backslashes, use lower case, or stop in the middle. Two objects that disagree are no vote: one of them may be
text that the transcript planted.
"""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass
from difflib import SequenceMatcher
from html import unescape
from typing import Any

from maieutic.env.base import Decision
from maieutic.thinking import without_opened_thinking

NEAR_QUOTE = 0.9
"""Share of a quote's characters that must stand, in order, in one stretch of a tutor turn of about the quote's length."""
_LONGEST_REPLY = 200_000
_MOST_WORK = 1_000_000
"""Characters that the search for objects in one reply may look at: a reply of nothing but braces would take hours."""
_VERDICTS: dict[str, Decision] = {"ok": "ok", "reject": "reject"}
_BAD_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_LATEX_COMMANDS = (
    "bar|begin|beta|because|big|Big|binom|bmod|boxed|bullet|fbox|flat|forall|frac|nabla|ne|neg|neq|newline|nmid|not|notin|nu|"
    "rangle|rceil|rfloor|rho|right|rightarrow|tan|tanh|tau|text|textbf|textit|tfrac|therefore|theta|tilde|times|to|top|triangle"
)
_LATEX_ESCAPE = re.compile(rf"(?<!\\)((?:\\\\)*)\\(?=(?:{_LATEX_COMMANDS})(?![a-zA-Z]))")
_LINE = re.compile(
    r"^(?:(?!\n)[\s*_>#-])*+(verdict|quote|criterion)[\s*_]*+[:=]\s*+(.*)$", re.IGNORECASE | re.MULTILINE
)
_BARE = re.compile(r"^[\s*`'\"“”.!]*(ok|reject)[\s*`'\"“”.!]*$", re.IGNORECASE)
_MARKS = str.maketrans({c: "'" for c in "‘’‚`´′"} | {c: '"' for c in "“”„«»″"} | {c: "-" for c in "‐‑‒–—−"})
_LATEX_NOISE = re.compile(r"\\[()\[\]]|\$|\\(?:left|right|displaystyle|text|mathrm|mathbf|,|;|!|:| )|[{}*_]")


@dataclass(frozen=True, slots=True)
class Vote:
    """One reply, read. ``why`` says what was wrong with an ``unknown``."""

    decision: Decision
    criterion: str = ""
    quote: str = ""
    reason: str = ""
    why: str = ""


def read_vote(reply: str, *, truncated: bool = False) -> Vote:
    """The vote in a judge's reply. ``truncated``: the server cut it off at the token limit."""
    if not reply.strip():
        return Vote("unknown", why="empty")
    if len(reply) > _LONGEST_REPLY:
        return Vote("unknown", why="oversized")
    # Only where it is marked: a tag that the tutor wrote, quoted by the judge, must not cut the verdict in two.
    said = without_opened_thinking(reply)
    if not said.strip():
        return Vote("unknown", why="truncated")
    found = [v for v in (_vote(o) for o in _objects(said)) if v is not None]
    if not found:
        if truncated or said.count("{") > said.count("}"):
            return Vote("unknown", why="truncated")
        return _from_lines(said)
    if len({v.decision for v in found}) > 1:
        return Vote("unknown", why="contradictory")
    return found[-1]


def _vote(data: dict[str, Any]) -> Vote | None:
    """None for an object that is no verdict at all (an example, a nested part)."""
    keys = {str(k).strip().lower(): v for k, v in data.items()}
    if "verdict" not in keys:
        return None
    raw = keys["verdict"]
    decision = _VERDICTS.get(raw.strip().strip(".!\"'*").lower()) if isinstance(raw, str) else None
    if decision is None:
        return Vote("unknown", why="no_verdict")

    def text(key: str) -> str:
        return str(keys[key]) if keys.get(key) is not None else ""

    return Vote(decision, text("criterion").strip(), text("quote").strip(), text("reasoning").strip())


def _objects(reply: str) -> list[dict[str, Any]]:
    """Top-level JSON objects in a text, each read strictly first and with LaTeX repaired second; none at all where the search
    takes more than :data:`_MOST_WORK`, since what was not looked at might contradict what was found."""
    found: list[dict[str, Any]] = []
    at = work = 0
    while (start := reply.find("{", at)) >= 0:
        end = _closing(reply, start)
        work += (len(reply) if end is None else end) - start
        if work > _MOST_WORK:
            return []
        if end is None:
            # No balanced object opens here (a brace of prose or LaTeX, or one that was cut): look behind it.
            at = start + 1
            continue
        data = _load(reply[start:end])
        if isinstance(data, dict):
            found.append(data)
            at = end
        else:
            at = start + 1
    return found


def _closing(text: str, start: int) -> int | None:
    """Index after the brace that closes the one at ``start``; braces inside strings do not count."""
    depth, inside, i = 0, False, start
    while i < len(text):
        c = text[i]
        if inside:
            if c == "\\":
                i += 1
            elif c == '"':
                inside = False
        elif c == '"':
            inside = True
        elif c == "{":
            depth += 1
        elif c == "}":
            depth -= 1
            if depth == 0:
                return i + 1
        i += 1
    return None


def _load(text: str) -> Any:
    # "\frac" is valid JSON (a form feed and "rac"), so LaTeX commands that start like an escape are repaired before reading.
    repaired = _LATEX_ESCAPE.sub(r"\1\\\\", text)
    for candidate in (repaired, _BAD_ESCAPE.sub(r"\\\\", repaired), _BAD_ESCAPE.sub(r"\\\\", text)):
        try:
            return json.loads(candidate, strict=False, object_pairs_hook=_pairs)
        except (ValueError, RecursionError):
            continue
    return None


def _pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """A key given twice keeps both values as a list: for a verdict that is none."""
    out: dict[str, Any] = {}
    for key, value in items:
        out[key] = [out[key], value] if key in out else value
    return out


def _from_lines(reply: str) -> Vote:
    """``VERDICT: reject`` / ``QUOTE: …`` lines, or a reply that is one bare word."""
    if m := _BARE.match(reply):
        return Vote(_VERDICTS[m[1].lower()])
    lines: dict[str, list[str]] = {}
    for m in _LINE.finditer(reply):
        lines.setdefault(m[1].lower(), []).append(m[2].strip().strip("*_ "))
    verdicts = {_VERDICTS.get(v.strip(".!\"'*").lower()) for v in lines.get("verdict", [])}
    if len(verdicts) != 1:
        return Vote("unknown", why="contradictory" if verdicts else "no_verdict")
    decision = verdicts.pop()
    if decision is None:
        return Vote("unknown", why="no_verdict")
    quote, criterion = lines.get("quote", [""])[-1].strip("\"'“”"), lines.get("criterion", [""])[-1]
    return Vote(decision, criterion, quote)


def canonical(text: str) -> str:
    """Text as quotes are compared.

    The transcript's escapes are undone, compatibility forms folded, marks and dashes made one kind; LaTeX dressing, invisible
    characters and extra white space are dropped; lower case.
    """
    text = unicodedata.normalize("NFKC", unescape(text)).translate(_MARKS)
    text = "".join(c for c in text if unicodedata.category(c) != "Cf")
    return " ".join(_LATEX_NOISE.sub(" ", text).split()).casefold()


def occurs(quote: str, turn: str, near: float = NEAR_QUOTE) -> bool:
    """Whether a judge's quote stands in a turn: as it is, after :func:`canonical`, or nearly (at least ``near`` of it).

    An ellipsis in a quote separates parts that must all occur. A quote without a letter or digit occurs nowhere.
    """
    if not any(c.isalnum() for c in quote):
        return False
    if quote.strip() in turn:
        # First, because a quote that ends before a combining mark folds to something that the turn no longer holds.
        return True
    parts = [canonical(p) for p in re.split(r"\.\.\.|…|\[\.\.\.\]", quote)]
    parts = [p.strip(" \"'.,;:") for p in parts]
    parts = [p for p in parts if p]
    where = canonical(turn)
    return bool(parts) and all(_stands(p, where, near) for p in parts)


def _stands(part: str, where: str, near: float) -> bool:
    if part in where:
        return True
    if len(part) < 12 or not where:
        return False  # too short for a near match to prove anything
    blocks = SequenceMatcher(None, part, where, autojunk=False).get_matching_blocks()
    # Only what stands close together counts: scattered letters of a long turn match anything.
    window = int(len(part) * 1.15) + 2
    best = max(
        sum(b.size for b in blocks if start.b <= b.b and b.b + b.size <= start.b + window) for start in blocks
    )
    return best / len(part) >= near
