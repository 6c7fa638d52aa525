"""Word lists, written as text."""

from __future__ import annotations


def listed(text: str) -> list[str]:
    """The words of a text, in order."""
    return text.split()


def words(text: str) -> frozenset[str]:
    """The set of words of a text."""
    return frozenset(text.split())
