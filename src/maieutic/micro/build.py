"""``maieutic micro build``: pre-train the micro models from nothing and measure the students' solve rates.

Everything follows from the seed. Two processes of one thread each; the models of one process come one after the other. Every
model begins with easy documents, and the thinking tutor with the weights of the tutor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maieutic.errors import MaieuticError
from maieutic.micro.shipped import RECORD, WEIGHTS, sha256
from maieutic.seeds import derive

EARLY = "-early"
"""Suffix of a model's first stage, which is not kept: easy documents (``corpus.first_document``, ``first_tutor_document``)."""
OVERRIDES = "overrides.txt"
"""Written last: a folder without it is no finished build."""
SIZES = (288, 160)
"""Pairs for training and held-out pairs."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One model to pre-train. ``start``: the model whose weights it begins with, of the same process."""

    name: str
    steps: int
    start: str | None = None

    @property
    def is_student(self) -> bool:
        return self.name.startswith("student")

    @property
    def thinking(self) -> bool:
        return self.name.endswith("thinking")


PLANS: tuple[tuple[Plan, ...], ...] = (
    (Plan("student-early", 500), Plan("student", 3600, "student-early")),
    (
        Plan("tutor-early", 800),
        Plan("tutor", 1200, "tutor-early"),
        Plan("tutor-thinking", 600, "tutor"),
        Plan("student-b-early", 500),
        Plan("student-b", 2000, "student-b-early"),
    ),
)
"""What each of the two processes trains."""


def build_model(plan: Plan, out: Path, seed: int, *, share: float = 1.0) -> float:
    """Pre-train one model and write its folder ``out/name``; returns the last loss. ``share`` scales the number of steps."""
    import torch
    from transformers import LlamaForCausalLM

    from maieutic.micro import corpus
    from maieutic.micro.models import Encoder, new_model, save
    from maieutic.micro.pretrain import pretrain
    from maieutic.micro.scripts import STUDENTS

    torch.set_num_threads(1)
    if plan.start is None:
        model: Any = new_model(derive(seed, "weights", plan.name) % 2**31)
    else:
        model = LlamaForCausalLM.from_pretrained(out / plan.start, dtype=torch.float32)

    def document(rng: random.Random) -> corpus.Document:
        if plan.name.endswith(EARLY):
            return corpus.first_document(rng) if plan.is_student else corpus.first_tutor_document(rng)
        if plan.is_student:
            return corpus.student_document(rng, STUDENTS[plan.name])
        return corpus.tutor_document(rng, thinking=plan.thinking)

    loss = pretrain(
        model,
        document,
        Encoder(thinking=plan.thinking),
        steps=max(1, round(plan.steps * share)),
        seed=derive(seed, "corpus", plan.name),
        say=lambda text: print(f"{plan.name}: {text}", flush=True),
    )
    save(model, out / plan.name, thinking=plan.thinking)
    return loss


def _process(plans: Sequence[Plan], out: Path, seed: int, share: float) -> None:
    for plan in plans:
        build_model(plan, out, seed, share=share)


def build_models(out: Path, seed: int, *, share: float = 1.0) -> dict[str, str]:
    """Pre-train all models into ``out``; returns the SHA-256 of each model's weights. Raises :class:`MaieuticError` when a
    process fails."""
    out.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = "1"  # two processes of one thread each; inherited by the spawned ones
    processes = [context.Process(target=_process, args=(plans, out, seed, share)) for plans in PLANS]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if failed := [p.exitcode for p in processes if p.exitcode]:
        raise MaieuticError(f"pre-training failed (exit codes {failed}); its error stands above")
    for early in out.glob(f"*{EARLY}"):
        shutil.rmtree(early)
    return write_record(out, seed)


def write_record(models: Path, seed: int) -> dict[str, str]:
    """Write ``build.json`` beside the models: the seed, and the checksum of each model's weights."""
    hashes = {file.parent.name: sha256(file) for file in sorted(models.glob(f"*/{WEIGHTS}"))}
    record = {"seed": seed, "weights_sha256": hashes}
    (models / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return hashes


def build_pairs(
    train: Path, test: Path, seed: int, overrides: Sequence[str], sizes: tuple[int, int] = SIZES
) -> None:
    """Write training and held-out pairs with the cold solve rates of both students (recipe ``micro/ensemble``)."""
    from maieutic.micro.pairs import make_pairs, measured
    from maieutic.problems.loaders import write_pairs

    for path, size, held_out in ((train, sizes[0], False), (test, sizes[1], True)):
        pairs = make_pairs(size, seed, test=held_out)
        found = asyncio.run(measured(pairs, "micro/ensemble", overrides, seed=derive(seed, "rates") % 2**31))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_pairs(path, found)


def build(out: Path, seed: int, *, share: float = 1.0, sizes: tuple[int, int] = SIZES) -> dict[str, str]:
    """Everything from nothing: ``out/models/*``, ``out/pairs.jsonl``, ``out/test/pairs.jsonl`` and ``out/overrides.txt``, the
    overrides with which every recipe of ``recipes/micro`` runs on this build. Returns the checksums of the weights."""
    out = out.absolute()
    hashes = build_models(out / "models", seed, share=share)
    lines = [
        f"tutor.model={out / 'models' / 'tutor'}",
        f"students.0.model={out / 'models' / 'student'}",
        f"problems.source={out / 'pairs.jsonl'}",
        f"problems.eval_source={out / 'test' / 'pairs.jsonl'}",
    ]
    second = f"students.1.model={out / 'models' / 'student-b'}"
    build_pairs(out / "pairs.jsonl", out / "test" / "pairs.jsonl", seed, [*lines[:2], second], sizes)
    (out / OVERRIDES).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return hashes


def check_target(out: Path) -> None:
    """Make ``out/models``, or raise :class:`MaieuticError`: there is a build, or one that was stopped, or it cannot be made."""
    if (out / OVERRIDES).exists():
        raise MaieuticError(f"{out} already holds a build: name another folder with --out")
    if (out / "models").exists():
        raise MaieuticError(
            f"{out} holds a build that was not finished (it has no {OVERRIDES}); one that was stopped cannot go on: delete "
            f"{out / 'models'}, or name another folder with --out"
        )
    try:
        (out / "models").mkdir(parents=True)
    except OSError as error:
        raise MaieuticError(
            f"{out}: cannot write there ({error.strerror}): name another folder with --out"
        ) from None


def install(built: Path, seed: int, *, sizes: tuple[int, int] = SIZES) -> None:
    """Put the models of ``built`` in the place of the shipped ones, and measure their rates under the shipped names.

    For a checkout, after the world has changed; the new files are then committed (``git add -f``: weights are ignored).
    """
    from maieutic.micro.shipped import models_dir
    from maieutic.resources import share_dir

    target = models_dir()
    for folder in (file.parent for file in (built / "models").glob(f"*/{WEIGHTS}")):
        shutil.rmtree(target / folder.name, ignore_errors=True)
        shutil.copytree(folder, target / folder.name)
        (target / folder.name / WEIGHTS).chmod(0o644)
    write_record(target, seed)
    data = share_dir("data")
    build_pairs(data / "micro" / "pairs.jsonl", data / "micro-test" / "pairs.jsonl", seed, [], sizes)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="maieutic micro build", description="Build the micro-classroom from nothing."
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="everything follows from it (the shipped models: 1)"
    )
    parser.add_argument("--out", type=Path, default=Path("models/micro"), help="folder to write to")
    parser.add_argument(
        "--install", action="store_true", help="then put it in the place of the shipped one (checkouts)"
    )
    given = parser.parse_args(argv)
    check_target(given.out)
    start = time.monotonic()
    for name, digest in build(given.out, given.seed).items():
        print(f"{name:16s} {digest}")
    print(
        f"built in {time.monotonic() - start:.0f} s: {given.out} (recipes run on it with the lines of overrides.txt)"
    )
    if given.install:
        install(given.out, given.seed)
        print("installed in the place of the shipped models and pairs")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
