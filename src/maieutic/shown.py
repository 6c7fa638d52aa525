"""Text of models and users where people read it: what would not be seen is named, and nothing is markup."""

from __future__ import annotations

import re

# Controls (but not tab and line feed), bidirectional and other invisible format characters, lone surrogates.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2064\u2066-\u2069\ufeff\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)


def named_controls(text: object) -> str:
    """Text in which characters that would not be seen (or that no file takes) are named by their code, ``[U+202E]``."""
    return _CONTROLS.sub(lambda m: f"[U+{ord(m[0]):04X}]", str(text).replace("\r\n", "\n"))


def markdown_text(text: object) -> str:
    """Text on one line of Markdown, also in a cell of a table: it ends no cell and no line, and begins no markup."""
    line = " ".join(named_controls(text).split("\n"))
    line = line.replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\|`*])", r"\\\1", line).replace("](", "]\\(")
