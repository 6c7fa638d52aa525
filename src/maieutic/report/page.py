"""What the pages share: reading assets, a policy that forbids all network, safe embedding of data and text."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from maieutic.errors import RunFolderError
from maieutic.shown import named_controls

_SLOT = re.compile(r"\{\{(\w+)\}\}")


def asset(*names: str) -> str:
    """The named files of ``assets/``, one after the other."""
    folder = files("maieutic.report") / "assets"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def fill(template: str, **parts: str) -> str:
    """Put ``parts`` into the ``{{slots}}`` of a template in one pass: text that is put in is not searched for slots."""
    return _SLOT.sub(lambda m: parts[m[1]], template)


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def policy(style: str, script: str | None = None) -> str:
    """A Content-Security-Policy under which this style and this script run, and nothing is loaded or sent."""
    scripts = f"script-src {_hash(script)}; " if script is not None else ""
    return f"default-src 'none'; {scripts}style-src {_hash(style)}; base-uri 'none'; form-action 'none'"


def embed_json(data: Any) -> str:
    """JSON for a ``<script type="application/json">``: ASCII, without a character that could end or open an element."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def esc(text: object) -> str:
    """Text for HTML content and attributes; characters that would not be seen are named by their code, ``[U+202E]``."""
    return html.escape(named_controls(text), quote=True)


def write_page(path: Path, text: str) -> Path:
    """Write a page whole or not at all. Raises :class:`~maieutic.errors.RunFolderError`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}: {error.strerror or error}; free space or give write permission"
        ) from error
    finally:
        if temporary.exists():
            temporary.unlink()
    return path
