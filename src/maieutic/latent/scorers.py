"""The two classifier features as small, documented scorers in [0, 1]: math density and student reasoning.

The paper takes both from classifiers of Wang and Demszky (2024) that are not part of it. These stand in for them: transparent
counts, the same on every machine. A trained classifier can replace either (``Readers`` of a feature set are plain functions).

**Math density**: the share of an utterance's tokens that are mathematical: numbers, operators and relation signs, and words of a
fixed list. **Student reasoning**: 1 − exp(−m/2) with m = 1 for each connective of reasoning ("because", "so that", "which means",
"if … then") and for each written equation or chained calculation, 0 for an utterance without any mathematics.
"""

from __future__ import annotations

import math
import re

_TOKEN = re.compile(r"\d+(?:[.,]\d+)*|[A-Za-z]+(?:'[a-z]+)?|[+\-−–*×·/÷=<>≤≥≠%^√]")
_NUMBER = re.compile(r"\d")
_WORDS = frozenset(
    [
        "add",
        "added",
        "adding",
        "sum",
        "plus",
        "total",
        "subtract",
        "subtracted",
        "minus",
        "difference",
        "times",
        "multiply",
        "multiplied",
        "product",
        "divide",
        "divided",
        "quotient",
        "half",
        "double",
        "triple",
        "twice",
        "third",
        "quarter",
        "fraction",
        "percent",
        "percentage",
        "ratio",
        "equation",
        "equals",
        "equal",
        "number",
        "numbers",
        "digit",
        "decimal",
        "square",
        "root",
        "area",
        "perimeter",
        "length",
        "width",
        "angle",
        "triangle",
        "rectangle",
        "circle",
        "average",
        "mean",
        "variable",
        "solve",
        "calculate",
        "remainder",
        "multiple",
        "factor",
        "even",
        "odd",
        "negative",
        "positive",
        "more",
        "less",
        "fewer",
        "greater",
        "each",
        "per",
        "altogether",
    ]
)
_REASON = re.compile(
    r"\b(because|since|therefore|so that|that'?s why|which means|that means|this means|it follows|if\b[^.?!]{1,60}\bthen"
    r"|first\b[^.?!]{1,80}\bthen|i (know|think|figured|noticed) (that )?.{1,40}\bso\b)",
    re.IGNORECASE,
)
EQUATION = re.compile(
    r"[0-9A-Za-z)]\s*[+\-−–*×·/÷^]\s*[(0-9A-Za-z][^=?!.\n]{0,40}=\s*[-−(]?\s*[0-9A-Za-z]|(?<![A-Za-z])[A-Za-z]\s*=\s*-?[\d(]"
)
"""A written equation: ``3 + 4 = 7``, ``x = 5``."""


def math_density(text: str) -> float:
    """Share of mathematical tokens, in [0, 1]; 0 for an empty text."""
    tokens = _TOKEN.findall(text)
    if not tokens:
        return 0.0
    hits = sum(bool(_NUMBER.search(t)) or not t[0].isalpha() or t.lower() in _WORDS for t in tokens)
    return hits / len(tokens)


def student_reasoning(text: str) -> float:
    """Amount of mathematical reasoning, in [0, 1): 0, 0.39, 0.63, 0.78 … for 0, 1, 2, 3 marks of it."""
    equations = len(EQUATION.findall(text))
    if not equations and math_density(text) < 0.05:
        return 0.0
    return 1 - math.exp(-(len(_REASON.findall(text)) + equations) / 2)
