"""The transcript viewer: one HTML file that holds the episodes of one or more runs and works from the disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from maieutic.env.base import Phase
from maieutic.errors import RunFolderError
from maieutic.report.page import asset, embed_json, esc, fill, policy, write_page
from maieutic.transcripts import read_transcripts

_SCRIPTS = ("viewer-data.js", "viewer-view.js", "viewer-app.js")
_STYLES = ("theme.css", "viewer.css")


def write_viewer(
    runs: Sequence[Path], out: Path, *, phase: Phase | None = None, steps: Collection[int] | None = None
) -> Path:
    """Write the viewer of ``runs`` to the file ``out`` and return it.

    ``phase`` and ``steps`` keep the file small for long runs (a browser takes tens of thousands of episodes, a mail does not).
    Token records are left out. Raises :class:`~maieutic.errors.TranscriptError` for a line that cannot be read and
    :class:`~maieutic.errors.RunFolderError` for a run that is not there or an ``out`` that cannot be written.
    """
    for run in runs:
        if not Path(run).is_dir():
            raise RunFolderError(f"there is no run folder {run}: name a folder that holds transcripts/")
    data = viewer_data([Path(run) for run in runs], phase=phase, steps=steps)
    style = asset(*_STYLES)
    script = f'(() => {{\n"use strict";\n{asset(*_SCRIPTS)}\n}})();'
    title = ", ".join(run["name"] for run in data["runs"])
    page = fill(
        asset("viewer.html"),
        csp=policy(style, script),
        title=esc(title),
        style=style,
        script=script,
        data=embed_json(data),
    )
    return write_page(Path(out), page)


def viewer_data(
    runs: Sequence[Path], *, phase: Phase | None = None, steps: Collection[int] | None = None
) -> dict[str, Any]:
    """What the page holds: ``runs``, ``pairs`` (each text once) and ``episodes`` with unique keys, in reading order."""
    lines = []
    for n, run in enumerate(runs):
        for line in read_transcripts(run, phase, steps):
            line.pop("tokens", None)  # by far the largest part of a line, and nothing to read
            lines.append((n, line))
    names = _run_names(runs)
    arms = [_arm(run, [line["arm"] for m, line in lines if m == n]) for n, run in enumerate(runs)]
    shared = Counter(arms)
    labels = [arm if shared[arm] == 1 else f"{arm} ({name})" for arm, name in zip(arms, names, strict=True)]
    pairs = _Pairs()
    episodes = []
    keys = _Keys([line["id"] for _, line in lines])
    for n, line in lines:
        episode = {k: v for k, v in line.items() if k not in ("schema", "pair")}
        episode["key"] = keys.of(names[n], line["id"])
        episode["run"] = n
        # One run may hold lines of several arms; otherwise the run's label tells equal arms apart.
        episode["arm"] = labels[n] if line["arm"] in (None, arms[n]) else line["arm"]
        episode["pair"] = pairs.key(line["pair"])
        # Seeds may exceed what a JavaScript number holds exactly.
        episode["seed"] = str(line["seed"])
        episodes.append(episode)
    return {
        "runs": [{"name": name, "arm": label} for name, label in zip(names, labels, strict=True)],
        "pairs": pairs.texts,
        "episodes": episodes,
    }


def _run_names(runs: Sequence[Path]) -> list[str]:
    """Folder names, made unique by their number where two runs share one."""
    names = [run.resolve().name for run in runs]
    count = Counter(names)
    return [name if count[name] == 1 else f"{name}-{n + 1}" for n, name in enumerate(names)]


def _arm(run: Path, said: Sequence[str | None]) -> str:
    """The arm of a run: what most of its lines say, else its recipe, else the folder's name."""
    counted = Counter(arm for arm in said if arm is not None)
    if counted:
        return counted.most_common(1)[0][0]
    recipe = run / "recipe.yaml"
    if recipe.is_file():
        data = yaml.safe_load(recipe.read_text(encoding="utf-8"))
        if isinstance(data, dict) and isinstance(data.get("arm"), str):
            return str(data["arm"])
    return run.resolve().name


class _Keys:
    """Names of episodes in links: the id where it is unique, else with its run, else with a number."""

    def __init__(self, ids: Sequence[str]) -> None:
        self._count = Counter(ids)
        self._used: set[str] = set()

    def of(self, run: str, episode_id: str) -> str:
        base = episode_id if self._count[episode_id] == 1 else f"{run}/{episode_id}"
        key = next(k for k in _numbered(base) if k not in self._used)
        self._used.add(key)
        return key


class _Pairs:
    """Problem pairs by id, each kept once; an id that stands for two different texts gets a number."""

    def __init__(self) -> None:
        self.texts: dict[str, dict[str, Any]] = {}

    def key(self, pair: dict[str, Any]) -> str:
        kept = {side: _without_rates(pair[side]) for side in ("source", "transfer")}
        for key in _numbered(pair["id"]):
            if self.texts.setdefault(key, kept) == kept:
                return key
        raise AssertionError("unreachable: the numbers do not end")


def _without_rates(problem: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if problem is None else {k: v for k, v in problem.items() if k != "rates"}


def _numbered(base: str) -> Iterator[str]:
    yield base
    n = 2
    while True:
        yield f"{base}~{n}"
        n += 1
