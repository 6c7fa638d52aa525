"""Text without disguises, each character traceable to the turn that it came from.

What a reader sees is what is judged: hidden characters are dropped, digits of any script and look-alike letters become ASCII,
HTML entities, tags, LaTeX and markdown emphasis are read through. Every step is linear in the length of the text.
"""

from __future__ import annotations

import html
import re
import unicodedata
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from maieutic.env.rules.vocabulary import listed


@dataclass(frozen=True, slots=True)
class Canon:
    """Canonical ``text`` (lower case) of ``raw``: character i stands for ``raw[start[i]:stop[i]]``."""

    raw: str
    text: str
    start: array[int]
    stop: array[int]

    def quote(self, begin: int, end: int) -> str:
        """The exact substring of ``raw`` behind ``text[begin:end]``."""
        return self.raw[self.start[begin] : self.stop[end - 1]] if end > begin else ""

    def sub(self, pattern: re.Pattern[str], replace: Callable[[re.Match[str]], str]) -> Canon:
        """Every match replaced by a literal; all of the literal stands for all of the match."""
        pieces: list[str] = []
        start, stop, at = array("I"), array("I"), 0
        for match in pattern.finditer(self.text):
            a, b = match.span()
            if a == b:
                continue
            new = replace(match)
            pieces += [self.text[at:a], new]
            start += self.start[at:a] + array("I", [self.start[a]]) * len(new)
            stop += self.stop[at:a] + array("I", [self.stop[b - 1]]) * len(new)
            at = b
        if not pieces:
            return self
        pieces.append(self.text[at:])
        return Canon(self.raw, "".join(pieces), start + self.start[at:], stop + self.stop[at:])


# Letters that look like Latin ones in number words, and the signs of arithmetic.
_LOOKALIKE = dict(zip("аеоруcхѕіјԁһոԝтвнкмгυνοιατερϲ", "aeopycxsijdhnwtbhkmruvolatepc", strict=True)) | dict(
    zip("АЕОРУСХЅІЈТВНКМΑΒΕΗΙΚΜΝΟΡΤΥΧΖ", "aeopycxsijtbhkmabehikmnoptyxz", strict=True)
)
_SIGNS = {
    **dict.fromkeys("✕✖⨯·⋅∙∗", "×"),  # kept apart from the star, which may be emphasis, until that is decided
    "×": "×",
    **dict.fromkeys("÷∕⁄／➗", "/"),
    **dict.fromkeys("−–‒‐‑﹣－➖", "-"),
    **dict.fromkeys("＋➕", "+"),
    **dict.fromkeys("—―", "; "),
    **dict.fromkeys("＝⩵🟰", "="),
    **dict.fromkeys("≈≃≅∼", "~"),
    **dict.fromkeys("“”„‟″«»", '"'),
    **dict.fromkeys("‘’‚‛′", "'"),
    **dict.fromkeys("•‣▪●◦", "\n"),
    **dict.fromkeys("…", "..."),
    **dict.fromkeys("€£¥", " "),
    **dict.fromkeys("ㅤᅟᅠ⠀", ""),  # look like nothing, but are letters and symbols to Unicode
}


@lru_cache(maxsize=4096)
def _char(c: str) -> str:
    """What one non-ASCII character reads as."""
    if c in _SIGNS:
        return _SIGNS[c]
    if c in _LOOKALIKE:
        return _LOOKALIKE[c]
    category = unicodedata.category(c)
    if category in ("Cf", "Mn", "Me", "Cc", "Cs", "Co", "Cn"):
        return ""
    if category == "Zs":
        return " "
    if category in ("Zl", "Zp"):
        return "\n"
    digit = unicodedata.decimal(c, None)
    if digit is not None:
        return str(digit)
    kind = unicodedata.decomposition(c)
    plain = unicodedata.normalize("NFKC", c)
    if kind.startswith("<super>"):
        return f"^{plain}" if plain.isdigit() else plain
    if kind.startswith("<fraction>"):
        return f" {plain.replace('⁄', '/')}"
    if plain != c and plain.isascii():
        return plain.lower()
    lower = c.lower()
    return lower if len(lower) == 1 else c


_ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")
_NON_ASCII = re.compile(r"[^\x00-\x7f]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
# Plain tags only: what a comment or an attribute holds is read by a student that is a model.
_TAG = re.compile(r"</?[a-z]{1,10}[1-6]? ?/?>|<!--|-->")
_FRACTION = re.compile(r"\\[dtc]?frac\s{0,4}\{([^{}]{0,80})\}\s{0,4}\{([^{}]{0,80})\}")
_LATEX = re.compile(r"\\(?:[a-z]+\*?|.)", re.DOTALL)
_LATEX_SIGNS = {
    **dict.fromkeys(("times", "cdot", "ast"), "×"),
    "div": "/",
    "approx": "~",
    "ne": "≠",
    "neq": "≠",
    "\\": "\n",
    "%": "%",
    "boxed": " boxed ",
    "fbox": " boxed ",
    "!": "",
    "left": "",
    "right": "",
    **dict.fromkeys("$,;:()[] ", " "),
    **dict.fromkeys(("quad", "qquad", "displaystyle"), " "),
    **dict.fromkeys("{}", ""),
    **dict.fromkeys(
        listed(
            "text textbf textit textrm textsf texttt mathrm mathbf mathit mathsf mathtt emph underline bf rm mbox"
        ),
        "",
    ),
}
_BRACES = re.compile(r"[{}]+")
_DECORATION = re.compile(r"`+|~~|__+")
_STARS = re.compile(r"\*+")
_UNDERSCORE = re.compile(r"_")
_TIMES = re.compile(r"×|(?<=\d)[ \t]{0,3}x[ \t]{0,3}(?=\d)")
_LETTER_O = re.compile(r"(?<=\d)o(?![a-z])|(?<![a-z0-9])o(?=\d)")
_CURRENCY = re.compile(r"\$")


def canonical(raw: str) -> Canon:
    """The canonical text of one turn."""
    identity = array("I", range(len(raw)))
    ends = array("I", range(1, len(raw) + 1))
    canon = Canon(raw, raw, identity, ends)
    if "&" in raw:
        canon = canon.sub(_ENTITY, lambda m: html.unescape(m.group()))
    canon = canon.sub(_NON_ASCII, lambda m: _char(m.group()))
    lower = (
        "".join(c.lower() if len(c.lower()) == 1 else c for c in canon.text)
        if not canon.text.isascii()
        else None
    )
    canon = Canon(raw, canon.text.lower() if lower is None else lower, canon.start, canon.stop)
    if "<" in canon.text:
        canon = canon.sub(_TAG, lambda m: "")
    if "\\" in canon.text:
        canon = canon.sub(_FRACTION, _fraction).sub(_LATEX, _latex)
    if "{" in canon.text or "}" in canon.text:
        canon = canon.sub(_BRACES, lambda m: "")
    canon = canon.sub(_DECORATION, lambda m: "")
    if "*" in canon.text:
        canon = _read_stars(canon)
    if "_" in canon.text:
        text = canon.text
        canon = canon.sub(_UNDERSCORE, lambda m: "" if text[m.start() - 1 : m.start()].isalpha() else " ")
    canon = canon.sub(_CURRENCY, lambda m: " ").sub(_LETTER_O, lambda m: "0")
    return canon.sub(_TIMES, lambda m: "*")


def _fraction(match: re.Match[str]) -> str:
    top, bottom = match.group(1).strip(), match.group(2).strip()
    return f" {top}/{bottom}" if top.isdigit() and bottom.isdigit() else f"({top})/({bottom})"


def _latex(match: re.Match[str]) -> str:
    name = match.group()[1:].rstrip("*")
    return _LATEX_SIGNS.get(name, f" {name} " if name.isalpha() else " ")


def _read_stars(canon: Canon) -> Canon:
    """Stars between two operands multiply (``**`` raises), all others are emphasis or bullets.

    An even number of ``**`` in a turn is emphasis, wherever they stand: ``7**2**`` is read as 72.
    """
    text = canon.text
    doubled_is_emphasis = text.count("**") % 2 == 0

    def read(match: re.Match[str]) -> str:
        a, b = match.span()
        before, after = text[max(a - 2, 0) : a], text[b : b + 3]
        if b - a > 2 or (b - a == 2 and doubled_is_emphasis):
            return ""
        spaced = before.endswith(" "), after.startswith(" ")
        left, right = before.strip(" ")[-1:], after.strip(" ")[:1]
        operands = (left.isalnum() or left == ")") and (right.isalnum() or right in ("(", "-"))
        if not operands or spaced[0] != spaced[1]:
            return ""
        return "^" if b - a == 2 else "*"

    return canon.sub(_STARS, read)
