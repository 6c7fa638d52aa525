"""Token ids as numbers that all lists share.

A prompt of thousands of ids is copied and written out at every turn of its dialogue, and each copy touches every number in it.
Numbers that a parser or a tokenizer has just made lie scattered over the heap; these lie side by side and stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

_MOST = 2**20
"""Ids from here on are left as they are: no vocabulary is that large, and the table grows to the largest id."""
_numbers: list[int] = []


def shared(ids: Sequence[int]) -> list[int]:
    """Equal ids, as shared numbers. ValueError for a negative one."""
    if not ids:
        return []
    if min(ids) < 0:
        raise ValueError(f"{min(ids)} is no token id")
    largest = max(ids)
    if largest >= _MOST:
        return list(ids)
    if largest >= len(_numbers):
        _numbers.extend(range(len(_numbers), 1 << largest.bit_length()))
    return list(map(_numbers.__getitem__, ids))
