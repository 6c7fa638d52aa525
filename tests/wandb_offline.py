"""Read an offline W&B run back, without W&B's server: ``run-ID.wandb`` is a LevelDB log of protobuf records.

The log is cut into blocks of 32 KiB; a record is a chain of chunks (checksum, length, kind: whole, first, middle, last), none
of which crosses a block. A file that was cut in mid-write ends with a chunk that is too short: what is whole is returned.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BLOCK = 32 * 1024
_MAGIC_LENGTH = 7  # ":W&B", a number and a version, at the beginning of the first block
_WHOLE, _FIRST, _LAST = 1, 2, 4


@dataclass
class OfflineRun:
    """What one ``.wandb`` file holds. ``history``: one row a step, in order. ``alerts``: (title, text)."""

    id: str = ""
    group: str = ""
    name: str = ""
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    alerts: list[tuple[str, str]] = field(default_factory=list)
    exit_code: int | None = None


def read_runs(root: Path) -> list[OfflineRun]:
    """Every offline run below ``root``, the oldest first (a resumed training makes another folder with the same id)."""
    return [_read(file) for file in sorted(root.glob("wandb/offline-run-*/run-*.wandb"))]


def _chunks(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = _MAGIC_LENGTH
    while at + 7 <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        body = data[at + 7 : at + 7 + length]
        if kind == 0 or len(body) < length:
            return
        yield kind, body
        at += 7 + length


def _read(file: Path) -> OfflineRun:
    from wandb.proto.wandb_internal_pb2 import Record

    run, parts = OfflineRun(), b""
    for kind, body in _chunks(file.read_bytes()):
        parts = body if kind in (_WHOLE, _FIRST) else parts + body
        if kind not in (_WHOLE, _LAST):
            continue
        record = Record()
        record.ParseFromString(parts)
        match record.WhichOneof("record_type"):
            case "run":
                run.id, run.group, run.name = record.run.run_id, record.run.run_group, record.run.display_name
                run.tags = list(record.run.tags)
                _put(run.config, record.run.config.update)
            case "config":
                _put(run.config, record.config.update)
            case "history":
                run.history.append(_put({}, record.history.item))
            case "alert":
                run.alerts.append((record.alert.title, record.alert.text))
            case "exit":
                run.exit_code = record.exit.exit_code
    return run


def _put(into: dict[str, Any], items: Any) -> dict[str, Any]:
    for item in items:
        into[".".join(item.nested_key) or item.key] = json.loads(item.value_json)
    return into
