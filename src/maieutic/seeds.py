"""Seeds that follow from other seeds: the same parts give the same seed on every machine, process and Python."""

from __future__ import annotations

import hashlib

BITS = 63
"""Seeds are non-negative and fit a signed 64-bit integer, which is what engines and HTTP servers take."""


def derive(*parts: int | str) -> int:
    """A 63-bit seed: the first 63 bits of the SHA-256 of the parts.

    Parts are encoded with their type and length, so that ``(1, 2)``, ``(12,)``, ``("1", 2)`` and ``("12",)`` all differ.
    """
    if not parts:
        raise ValueError("derive() needs at least one part")
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int | str):
            raise TypeError(
                f"a seed is derived from integers and strings, not {type(part).__name__}: {part!r}"
            )
        data = str(part).encode("utf-8", "surrogatepass")
        digest.update(f"{'s' if isinstance(part, str) else 'i'}{len(data)}:".encode())
        digest.update(data)
    return int.from_bytes(digest.digest()[:8], "big") >> (64 - BITS)
