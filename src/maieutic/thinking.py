"""Where a reply's private thinking ends, in text that a server has not told apart."""

from __future__ import annotations

THINK_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Pairs of tags that chat templates use."""


def without_thinking(reply: str) -> str:
    """A reply without the thinking before it: up to the first closing tag, with or without its opening tag (a template may have
    opened it). Nothing is left of thinking that was cut off.

    Inside an answer the tag is a quotation, perhaps of someone who wrote it so that the answer be cut in two: a reply that
    begins as structured text (an object, a fence) is left whole.
    """
    if reply.lstrip().startswith(("{", "```")):
        return reply
    rest = without_opened_thinking(reply)
    if rest is not reply:
        return rest
    ends = [reply.find(closed) + len(closed) for _, closed in THINK_TAGS if closed in reply]
    return reply[min(ends) :] if ends else reply


def without_opened_thinking(reply: str) -> str:
    """The same for a reply that *begins* with an opening tag, where thinking cannot be mistaken; others are left whole."""
    for opened, closed in THINK_TAGS:
        if reply.lstrip().startswith(opened):
            return reply.partition(closed)[2]
    return reply
