#!/usr/bin/env python
"""Break the code on purpose, one place at a time, and see that a test fails each time: `make mutants`.

Each mutant is one exact replacement in a copy of the package. The tests that should notice run against the copy and stop at the
first failure. A mutant that no test notices, a text that is not found exactly once, or tests that fail without any mutant end the
script with exit code 1. Not part of the suite: it takes some seconds a mutant.

    scripts/mutants.py [--only WORD …] [--no-baseline] [--list]
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("data", "docs", "envs", "recipes", "scripts", "README.md", "requirements.lock")


@dataclass(frozen=True, slots=True)
class Mutant:
    """``old`` stands exactly once in ``file`` (below ``src/maieutic``); ``tests`` are files in ``tests/``."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


REWARD = ("test_env_reward.py", "test_env_play.py")
TOKENS = ("test_tutors.py", "test_tokens.py")
PLAY = ("test_env_play.py",)
LOSSES = ("test_algorithms.py",)

MUTANTS = (
    # ---- reward and gates
    Mutant(
        "reward: sign of the gain",
        "env/reward.py",
        "reward=base + bonus + think - penalty",
        "reward=-base + bonus + think - penalty",
        REWARD,
    ),
    Mutant(
        "reward: a rejection is paid",
        "env/reward.py",
        "reward=-spec.gate_penalty",
        "reward=spec.gate_penalty",
        REWARD,
    ),
    Mutant(
        "gates: leakage is ignored",
        "env/reward.py",
        'any(v.decision == "reject" for v in episode.verdicts.values())',
        'any(v.decision == "reject" for k, v in episode.verdicts.items() if k != "leakage")',
        REWARD,
    ),
    Mutant(
        "gates: correctness is ignored",
        "env/reward.py",
        'any(v.decision == "reject" for v in episode.verdicts.values())',
        'any(v.decision == "reject" for k, v in episode.verdicts.items() if k != "correctness")',
        REWARD,
    ),
    Mutant(
        "gates: unknown counts as ok",
        "env/play.py",
        'if d == "unknown"] if env.gates != "off" else []',
        'if d == "never"] if env.gates != "off" else []',
        PLAY,
    ),
    Mutant(
        "micro judge: finds no leakage",
        "micro/gates.py",
        "found = findings(dialogue, pair.source)[gate]",
        'found = [] if gate == "leakage" else findings(dialogue, pair.source)[gate]',
        ("test_micro_gates.py",),
    ),
    Mutant(
        "micro judge: finds nothing wrong",
        "micro/gates.py",
        "found = findings(dialogue, pair.source)[gate]",
        'found = [] if gate == "correctness" else findings(dialogue, pair.source)[gate]',
        ("test_micro_gates.py",),
    ),
    # ---- what the student sees, and when a dialogue ends
    Mutant(
        "hidden turns: the environment never hides",
        "env/play.py",
        "dialogue=dialogue, hide_tutor=env.hide_tutor\n",
        "dialogue=dialogue, hide_tutor=False\n",
        PLAY,
    ),
    Mutant(
        "hidden turns: the student never hides",
        "env/student.py",
        "view = hidden_view if hide_tutor else student_view",
        "view = student_view",
        ("test_env_student.py",),
    ),
    Mutant(
        "hidden turns: the view shows them",
        "dialogue.py",
        'else Message("user", HIDDEN)',
        'else Message("user", t.visible)',
        ("test_env_student.py", "test_env_prompts.py"),
    ),
    Mutant(
        "transfer: the tutored problem is tested",
        "env/play.py",
        '"transfer" if self.env.transfer and pair.transfer is not None else "source"',
        '"source"',
        PLAY,
    ),
    Mutant(
        "end token: honoured at once",
        "env/play.py",
        "turn.end_token and spoken >= self.env.end_after",
        "turn.end_token",
        PLAY,
    ),
    Mutant(
        "end token: never honoured",
        "env/play.py",
        "turn.end_token and spoken >= self.env.end_after",
        "False",
        PLAY,
    ),
    # ---- loss mask
    Mutant(
        "mask: all tokens are trained",
        "tokens.py",
        "self.mask += [False] * len(ids)",
        "self.mask += [True] * len(ids)",
        TOKENS,
    ),
    Mutant(
        "mask: the tutor's tokens are not trained",
        "tokens.py",
        "self.mask += [True] * len(sample.ids)",
        "self.mask += [False] * len(sample.ids)",
        TOKENS,
    ),
    Mutant(
        "mask: ignored where rows are made",
        "training/packing.py",
        "trained = np.flatnonzero(np.asarray(segment.mask, dtype=bool))",
        "trained = np.arange(1, len(ids))",
        ("test_packing.py",),
    ),
    Mutant(
        "mask: log-probs of the next position",
        "training/packing.py",
        "select=trained - 1,",
        "select=np.minimum(trained, trained[-1] - 1),",
        ("test_packing.py", "test_gradient_invariance.py"),
    ),
    # ---- advantages
    Mutant(
        "advantage: not centred",
        "algorithms/advantages.py",
        "torch.where(valid, rewards - mean[group], 0.0)",
        "torch.where(valid, rewards, 0.0)",
        LOSSES,
    ),
    Mutant(
        "advantage: sign",
        "algorithms/advantages.py",
        "torch.where(valid, rewards - mean[group], 0.0)",
        "torch.where(valid, mean[group] - rewards, 0.0)",
        LOSSES,
    ),
    Mutant(
        "advantage: groups are mixed",
        "algorithms/advantages.py",
        "index.setdefault(g, len(index)) for g in group_ids_N",
        'index.setdefault("all", 0) for g in group_ids_N',
        LOSSES,
    ),
    Mutant(
        "advantage: the trainer mixes groups",
        "training/learner.py",
        "[t.group_id for t in everything],",
        '["all" for t in everything],',
        ("test_learner.py",),
    ),
    Mutant(
        "advantage: excluded episodes count",
        "training/learner.py",
        "[not t.excluded for t in everything],",
        "[True for t in everything],",
        ("test_learner.py",),
    ),
    # ---- losses
    Mutant(
        "DPPO: mask on the other side",
        "algorithms/dppo.py",
        "torch.where(up, gap <= self.threshold, gap >= -self.threshold)",
        "torch.where(up, gap >= -self.threshold, gap <= self.threshold)",
        LOSSES,
    ),
    Mutant(
        "DPPO: KL mask drops what moves back",
        "algorithms/dppo.py",
        "torch.where(up, gap < 0, gap > 0)",
        "torch.where(up, gap > 0, gap < 0)",
        LOSSES,
    ),
    Mutant("DPPO: no mask", "algorithms/dppo.py", "torch.where(kept, adv", "torch.where(kept | True, adv", LOSSES),
    Mutant(
        "DPPO: gradient flows through the ratio",
        "algorithms/dppo.py",
        "with torch.no_grad():",
        "with torch.enable_grad():",
        LOSSES,
    ),
    Mutant("DPPO: ratio upside down", "algorithms/dppo.py", "ratio = log_r.exp()", "ratio = (-log_r).exp()", LOSSES),
    Mutant(
        "DPPO: no ratio",
        "algorithms/dppo.py",
        "adv * ratio.clamp(max=self.ratio_cap)",
        "adv * torch.ones_like(ratio)",
        LOSSES,
    ),
    Mutant("DPPO: sign of the loss", "algorithms/dppo.py", "loss = -weight * logp", "loss = weight * logp", LOSSES),
    Mutant("GRPO: clips the wrong way", "algorithms/grpo.py", "-torch.minimum(", "-torch.maximum(", LOSSES),
    Mutant(
        "KL term: policy and reference swapped",
        "algorithms/base.py",
        "k3(log_ratio(ref_logprobs_T.detach().float(), logprobs_T))",
        "k3(log_ratio(logprobs_T, ref_logprobs_T.detach().float()))",
        LOSSES,
    ),
    Mutant(
        "temperature: not applied in training",
        "training/logprobs.py",
        "inverse_temperature = batch.temperatures_T.reciprocal()",
        "inverse_temperature = torch.ones_like(batch.temperatures_T)",
        ("test_gradient_invariance.py", "test_tutors.py"),
    ),
)  # fmt: skip


def copy_of_the_package(folder: Path) -> None:
    """Sources and tests as copies, the rest as links, so that the package in ``folder`` finds its data."""
    unwanted = shutil.ignore_patterns("__pycache__", ".pytest_cache")
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)


def run_tests(folder: Path, tests: Sequence[str]) -> tuple[int, str]:
    """(exit code, name of the first failure) of pytest in the copy.

    In a fork of this process, which has imported what takes long, and nothing of the package.
    """
    output = folder / "output.txt"
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            with output.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.chdir(folder)
            os.environ |= {"CI": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder / "src")}
            sys.path.insert(0, str(folder / "src"))
            sys.dont_write_bytecode = True
            options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not slow and not vllm"]
            code = int(pytest.main([*options, *(f"tests/{name}" for name in tests)]))
            sys.stdout.flush()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = output.read_text(encoding="utf-8", errors="replace")
    first = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", text, re.MULTILINE)
    if code not in (0, 1):  # 2 to 5: nothing was tested
        print(text[-3000:], file=sys.stderr)
    return code, first[1] if first else ""


def mutate(folder: Path, mutant: Mutant) -> None:
    """Put the mutant's file into the copy. SystemExit when its text does not stand there exactly once."""
    text = (ROOT / "src" / "maieutic" / mutant.file).read_text(encoding="utf-8")
    if (n := text.count(mutant.old)) != 1:
        raise SystemExit(
            f"mutant {mutant.name!r}: the text stands {n} times in {mutant.file}, not once: {mutant.old!r}"
        )
    (folder / "src" / "maieutic" / mutant.file).write_text(
        text.replace(mutant.old, mutant.new), encoding="utf-8"
    )


def restore(folder: Path, mutant: Mutant) -> None:
    shutil.copy(ROOT / "src" / "maieutic" / mutant.file, folder / "src" / "maieutic" / mutant.file)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Which test notices which fault?")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="mutants whose name holds one of these"
    )
    parser.add_argument(
        "--no-baseline", action="store_true", help="do not run the tests without a mutant first"
    )
    parser.add_argument("--list", action="store_true", help="name them, and run nothing")
    given = parser.parse_args(argv)
    chosen = [m for m in MUTANTS if any(word in m.name for word in given.only)]
    if not chosen:
        parser.error(f"no mutant's name holds {given.only!r}")
    if given.list:
        print("\n".join(m.name for m in chosen))
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"
    for module in ("torch", "transformers.models.llama", "hypothesis", "accelerate", "peft"):
        importlib.import_module(module)
    survivors = []
    with tempfile.TemporaryDirectory(prefix="maieutic-mutants-") as name:
        folder = Path(name)
        copy_of_the_package(folder)
        for mutant in chosen:  # a text that has moved is told before anything runs
            mutate(folder, mutant)
            restore(folder, mutant)
        every = sorted({t for m in chosen for t in m.tests})
        code, first = (0, "") if given.no_baseline else run_tests(folder, every)
        if code:
            print(
                f"without any mutant: {first or f'pytest ended with exit code {code}'} fails", file=sys.stderr
            )
            return 1
        print("| mutant | killed by | s |\n|---|---|---|", flush=True)
        for mutant in chosen:
            start = time.monotonic()
            mutate(folder, mutant)
            code, first = run_tests(folder, mutant.tests)
            restore(folder, mutant)
            if code != 1:
                survivors.append(mutant.name)
            killer = f"`{first}`" if code == 1 else f"**nothing** ({', '.join(mutant.tests)})"
            print(f"| {mutant.name} | {killer} | {time.monotonic() - start:.0f} |", flush=True)
    print(f"\n{len(chosen) - len(survivors)} of {len(chosen)} killed")
    return int(bool(survivors))


if __name__ == "__main__":
    raise SystemExit(main())
