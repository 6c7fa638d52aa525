"""``maieutic data push``: splits as Parquet with the published columns, and a data-set card made from their statistics."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maieutic import __version__
from maieutic.errors import ProblemDataError
from maieutic.problems.export import only_student, write_flat
from maieutic.problems.schema import ProblemPair
from maieutic.problems.stats import dataset_stats, stats_lines

_COLUMNS = [
    ("problem, answer", "the source problem, which is tutored"),
    (
        "transfer_problem, transfer_answer",
        "its near-transfer variant, which is tested; null where there is none",
    ),
    ("pre_solve_rate, pre_solve_rate_transfer_problem", "the student's cold solve rate of each"),
    ("…_n", "how many samples were graded for a rate; failed samples are in no rate"),
    ("solve_rate_student", "whose rates: model, hash of the cold prompt, temperature, top-p, token limit"),
    ("llama8b_solve_rate", "carried over from Big-Math where the source had it"),
    ("solution, transfer_solution", "worked solutions where there are any"),
    ("provenance", "JSON: where the row comes from, rewriter, solver, attempts, flags, sample counts"),
]


def card(
    name: str,
    splits: Mapping[str, Sequence[ProblemPair]],
    *,
    student: str | None = None,
    licence: str | None = None,
    language: str = "en",
) -> str:
    """The README of the repository: front matter, what it is, columns, how it was made, statistics, limits."""
    made = _makers(splits)
    front = [f"pretty_name: {name}", "language:", f"- {language}", "task_categories:", "- text-generation"]
    front += [
        "tags:",
        "- math",
        "- tutoring",
        "- near-transfer",
        "configs:",
        "- config_name: default",
        "  data_files:",
    ]
    for split in splits:
        front += [f"  - split: {split}", f"    path: data/{split}-*.parquet"]
    if licence:
        front.insert(0, f"license: {licence}")
    parts = ["---", *front, "---", "", f"# {name}", ""]
    parts.append(
        "Pairs of mathematics problems for the training of tutors: a learner is tutored on the source problem and tested on "
        "its near-transfer variant, which has the same solution structure and another answer."
    )
    parts += ["", "## Columns", "", "| column | meaning |", "|---|---|"]
    parts += [f"| `{column}` | {meaning} |" for column, meaning in _COLUMNS]
    parts += ["", "## How it was made", ""]
    parts += [f"- {line}" for line in made] or ["- The rows do not say."]
    parts.append(f"- Written by `maieutic data push`, Maieutic {__version__}.")
    for split, pairs in splits.items():
        stats = dataset_stats(pairs, only_student(pairs, student), f"split {split}")
        parts += ["", f"## Statistics of `{split}`", "", "```text", *stats_lines(stats), "```"]
    parts += ["", "## Limits", ""]
    parts.append(
        "Solve rates belong to one student, prompt and sampling: another student needs its own. Variants were checked by "
        "programs and by blind solving, not read by people. Rows flagged in the provenance missed the difficulty gate."
    )
    return "\n".join(parts) + "\n"


def _makers(splits: Mapping[str, Sequence[ProblemPair]]) -> list[str]:
    found: dict[str, dict[str, int]] = {"data set": {}, "generator": {}, "rewriter": {}, "solver": {}}
    for pair in (p for pairs in splits.values() for p in pairs):
        build = pair.provenance.get("build")
        told = {
            "data set": pair.provenance.get("dataset"),
            "generator": pair.provenance.get("generator"),
            **({k: build.get(k) for k in ("rewriter", "solver")} if isinstance(build, dict) else {}),
        }
        for kind, value in told.items():
            if value is not None:
                # a path of the machine that built it says nothing to readers
                name = (
                    Path(str(value)).name
                    if kind == "data set" and Path(str(value)).is_absolute()
                    else str(value)
                )
                found[kind][name] = found[kind].get(name, 0) + 1
    return [
        f"{kind}: {name} ({n} rows)" for kind, names in found.items() for name, n in sorted(names.items())
    ]


def push(
    repo: str,
    splits: Mapping[str, Sequence[ProblemPair]],
    *,
    student: str | None = None,
    licence: str | None = None,
    private: bool = True,
    api: Any = None,
    out: Path | None = None,
) -> str:
    """Upload to ``owner/name`` in one commit, and return its address; ``out``: write the folder there instead, no network.

    ``api``: a ``huggingface_hub.HfApi`` (None: one with the user's own login). Raises :class:`ProblemDataError` naming the cause.
    """
    if repo.count("/") != 1:
        raise ProblemDataError(f"{repo!r} is no data-set id: write owner/name")
    with tempfile.TemporaryDirectory() as temporary:
        folder = out or Path(temporary)
        (folder / "data").mkdir(parents=True, exist_ok=True)
        for split, pairs in splits.items():
            write_flat(
                folder / "data" / f"{split}-00000-of-00001.parquet", pairs, only_student(pairs, student)
            )
        text = card(repo.split("/")[1], splits, student=student, licence=licence)
        (folder / "README.md").write_text(text, encoding="utf-8")
        if out is not None:
            return str(out)
        if api is None:
            from huggingface_hub import HfApi

            api = HfApi()
        try:
            api.create_repo(repo, repo_type="dataset", private=private, exist_ok=True)
            done = api.upload_folder(
                repo_id=repo,
                repo_type="dataset",
                folder_path=str(folder),
                commit_message="Upload problem pairs",
            )
        except Exception as error:  # the Hub's client raises many kinds: all mean that nothing was published
            raise ProblemDataError(
                f"{repo}: cannot be pushed ({type(error).__name__}: {error}); log in with `hf auth login`, or write "
                "the folder with --out and upload it yourself"
            ) from error
    return str(getattr(done, "commit_url", done))
