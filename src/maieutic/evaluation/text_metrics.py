r"""The text and classification metrics of MathTutorBench, from their definitions.

Sentence BLEU is that of sacreBLEU's defaults: mteval-13a tokens, orders 1 to 4 (as many as the hypothesis has), exponential
smoothing, brevity penalty against the closest reference length. F1 is averaged micro, macro (over all labels that occur) or
weighted by support.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence

_13A = (
    (re.compile(r"([\{-\~\[-\` -\&\(-\+\:-\@\/])"), r" \1 "),
    (re.compile(r"([^0-9])([\.,])"), r"\1 \2 "),
    (re.compile(r"([\.,])([^0-9])"), r" \1 \2"),
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),
)
_ENTITIES = (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">"))


def tokens_13a(text: str) -> list[str]:
    """The words and signs that BLEU counts."""
    text = text.rstrip().replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, sign in _ENTITIES:
        text = text.replace(entity, sign)
    text = f" {text} "
    for pattern, put in _13A:
        text = pattern.sub(put, text)
    return text.split()


def _ngrams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def sentence_bleu(hypothesis: str, references: Sequence[str]) -> float:
    """BLEU in [0, 1] of one sentence against several references."""
    words, refs = tokens_13a(hypothesis), [tokens_13a(r) for r in references]
    if not words or not refs:
        return 0.0
    logs, halving = [], 1.0
    any_right = False
    for n in range(1, 5):
        found = _ngrams(words, n)
        total = sum(found.values())
        if total == 0:
            break
        allowed: Counter[tuple[str, ...]] = Counter()
        for ref in refs:
            allowed |= _ngrams(ref, n)
        right = sum(min(count, allowed[gram]) for gram, count in found.items())
        any_right = any_right or right > 0
        if right == 0:
            halving *= 2
        logs.append(math.log(right / total if right else 1 / (halving * total)))
    if not any_right:
        return 0.0
    closest = min((abs(len(r) - len(words)), len(r)) for r in refs)[1]
    brevity = 1.0 if len(words) >= closest else math.exp(1 - closest / len(words))
    return brevity * math.exp(sum(logs) / len(logs))


def accuracy(targets: Sequence[Hashable], predictions: Sequence[Hashable]) -> float:
    """Share of equal labels."""
    return sum(t == p for t, p in zip(targets, predictions, strict=True)) / len(targets)


def f1_of(
    targets: Sequence[Hashable], predictions: Sequence[Hashable], label: Hashable
) -> tuple[float, float, float]:
    """Precision, recall and F1 of one label; 0 where there is nothing to divide by."""
    hit = sum(t == p == label for t, p in zip(targets, predictions, strict=True))
    said, true = sum(p == label for p in predictions), sum(t == label for t in targets)
    precision, recall = hit / said if said else 0.0, hit / true if true else 0.0
    return precision, recall, 2 * hit / (said + true) if said + true else 0.0


def f1_macro(targets: Sequence[Hashable], predictions: Sequence[Hashable]) -> float:
    """Mean F1 of all labels that occur in either."""
    labels = list(dict.fromkeys([*targets, *predictions]))
    return sum(f1_of(targets, predictions, x)[2] for x in labels) / len(labels)


def f1_weighted(targets: Sequence[Hashable], predictions: Sequence[Hashable]) -> float:
    """Mean F1 of labels, weighted by how often each is the target."""
    support = Counter(targets)
    return sum(n * f1_of(targets, predictions, x)[2] for x, n in support.items()) / len(targets)
