"""The training step on recorded ragged dialogues: ours against TRL's GRPOTrainer and against packed supervised fine-tuning.

    python benchmarks/training_step.py [--runs 3] [--case NAME …] [--threads 2]

A step is one optimizer step on the same episodes: SmolLM2-135M (the adapter of recipe ``smollm2/grpo``; all weights on demand) on
the first episodes of the first group of ``benchmarks/data/transcripts.json.gz``, a Llama of 10 million parameters (ids mod 8,192)
on more of them. fp32, the recipe's settings. TRL and SFT are tried at several settings; the fastest runs against ours. Only
the training part is timed: TRL's rollout, padding and shuffling are not. Before any figure, in the same process: token counts are
equal, TRL's loss and gradient are ours, the packed gradient is the unpacked one, and so are loss and gradient of SFT.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.outcome import Figure, Outcome, check
from support.training_cases import (
    CASES,
    Case,
    Groups,
    choose,
    make_model,
    read_transcripts,
    recipe_of,
    relative_difference,
    twin,
    with_own_logprobs,
)
from support.training_peers import Ours, Sft, Trl, TrlSetting, tokens_of

from maieutic.algorithms.base import TokenLoss
from maieutic.models import resolve_model

DEFAULT = ["smollm2-135m-lora", "llama-10m"]
"""``smollm2-135m-full`` takes twice as long as the adapter."""
TRL_BEST = "TRL 1.16 GRPOTrainer, its fastest settings, and the compact head that it has on GPUs"
TRL_INSTALLED = "TRL as installed (on a CPU its head scores every position)"
SAME_AS_TRL, SAME_AS_UNPACKED = 1e-5, 5e-6
"""Most relative difference of gradients, in fp32."""
SAME_AS_SFT = 3e-4
"""Of that of transformers' loss: its log-softmax sums a vocabulary's small terms one by one in fp32. Over 49,152 of them its
log-probs are 4e-6 low on average (against fp64), logsumexp, which is what ours and TRL's are made of, 1e-7."""


def trl_settings(case: Case) -> list[TrlSetting]:
    """Micro-batches of 1, 2, 4, … episodes; a group a generation batch where it fits, since padding is then least."""
    sizes = [n for n in (1, 2, 4, 8, 16) if n <= case.groups * case.members]
    return [TrlSetting(n, n > case.members, True) for n in sizes]


def check_trl(ours: Ours, trl: Trl, groups: Groups) -> dict[str, float]:
    """Same tokens, same loss, same gradient as TRL with all episodes in one generation batch."""
    tokens, _, trained = trl.positions()
    expected = sum(t.n_trained for g in groups for t in g)
    check(
        tokens == tokens_of(groups),
        f"TRL's batches hold {tokens} tokens, the transcripts {tokens_of(groups)}",
    )
    check(trained == expected, f"TRL trains {trained} tokens, the transcripts have {expected}")
    check(
        sum(b.n_trained for b in ours.batches()) == expected,
        "our micro-batches train another number of tokens",
    )
    loss, gradient = ours.gradient()
    other_loss, other = trl.gradient()
    check(abs(loss - other_loss) <= 1e-5, f"our loss is {loss:.8f}, TRL's {other_loss:.8f}")
    off = relative_difference(gradient, other)
    check(off <= SAME_AS_TRL, f"our gradient differs from TRL's by {off:.1e}")
    alone = relative_difference(gradient, ours.gradient(ours.unpacked())[1])
    check(alone <= SAME_AS_UNPACKED, f"packed and unpacked gradient differ by {alone:.1e}")
    return {
        "loss_difference": abs(loss - other_loss),
        "gradient_difference": off,
        "unpacked_difference": alone,
    }


def check_sft(ours: Ours, sft: Sft) -> dict[str, float]:
    """With the loss −log π at temperature 1 ours is supervised fine-tuning: the same loss and gradient."""
    batches = ours.batches()
    for batch in batches:
        batch.temperatures_T = torch.ones_like(batch.temperatures_T)
    loss_of_run, ours.learner.loss = ours.learner.loss, lambda logp, mu, adv, ref=None: TokenLoss(-logp, {})
    loss, gradient = ours.gradient(batches)
    ours.learner.loss = loss_of_run
    other_loss, other = sft.gradient()
    check(abs(loss - other_loss) <= 1e-5 * abs(loss), f"our NLL is {loss:.8f}, that of SFT {other_loss:.8f}")
    off = relative_difference(gradient, other)
    check(off <= SAME_AS_SFT, f"the gradient of our NLL differs from that of SFT by {off:.1e}")
    return {"sft_loss_difference": abs(loss - other_loss), "sft_gradient_difference": off}


def fastest(makers: dict[str, Callable[[], Any]]) -> tuple[Any, str, dict[str, float]]:
    """The contestant whose first step is fastest, its name, and the seconds of all."""
    seconds: dict[str, float] = {}
    best, name = None, ""
    for candidate, make in makers.items():
        contestant = make()
        seconds[candidate] = round(contestant.step(), 3)
        if best is None or seconds[candidate] < seconds[name]:
            best, name = contestant, candidate
    return best, name, seconds


def run_case(
    case: Case, groups: Groups, model: Any, tokenizer: Any, runs: int, folder: Path
) -> tuple[list[Figure], dict[str, Any], dict[str, Any]]:
    """Figures, checks and settings of one model."""
    recipe = recipe_of(case)
    ours = Ours(recipe, model, groups)
    sft_rows = {
        "rows as ours": ours.batches(),
        "packed, one row": ours.single_rows(),
        "an episode a row": ours.unpacked(),
    }
    checks = check_trl(
        ours,
        Trl(recipe, twin(model), tokenizer, groups, TrlSetting(case.members, True, True), folder),
        groups,
    )
    checks |= check_sft(ours, Sft(recipe, twin(model), sft_rows["packed, one row"], kept=True))
    say(f"{case.name}: loss and gradient are those of TRL ({checks['gradient_difference']:.1e}) and SFT")

    peer = twin(model)
    # One model serves all settings of a peer: its weights move by 1e-6 of their size.
    trials = {str(s): partial(Trl, recipe, peer, tokenizer, groups, s, folder) for s in trl_settings(case)}
    best, chosen, swept = fastest(trials)
    say(f"{case.name}: TRL's seconds a step: {swept}")
    as_installed = Trl(recipe, peer, tokenizer, groups, replace(best.setting, compact=False), folder)
    pupil = twin(model)
    lessons = {
        name: partial(Sft, recipe, pupil, rows, kept=all(b.input_ids.shape[0] == 1 for b in rows))
        for name, rows in sft_rows.items()
    }
    sft, sft_chosen, sft_swept = fastest(lessons)
    say(f"{case.name}: SFT's seconds a step: {sft_swept}")

    for cold in (ours, as_installed):  # the others have taken a step by now
        cold.step()
    contestants = {"ours": ours.step, "trl": best.step, "installed": as_installed.step, "sft": sft.step}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(runs):
        for name, step in contestants.items():
            times[name].append(step())
        say(f"{case.name}, run {number + 1}: " + ", ".join(f"{n} {t[-1]:.2f} s" for n, t in times.items()))
    tokens = tokens_of(groups)
    padded = best.positions()[1]

    def ratio(name: str) -> list[float]:
        return [other / mine for other, mine in zip(times[name], times["ours"], strict=True)]

    figures = [
        Figure("6", f"training step, {case.name}: tokens/s", TRL_BEST, "ratio", ratio("trl"), ">= 1.5"),
        Figure("6b", f"the same, {case.name}", TRL_INSTALLED, "ratio", ratio("installed")),
        Figure("7", f"training step, {case.name}: tokens/s", "SFT step, its fastest rows", "ratio", ratio("sft"), ">= 0.85"),
        Figure("7b", f"ours, {case.name}", "", "tokens/s", [tokens / t for t in times["ours"]]),
    ]  # fmt: skip
    lengths = sorted(len(t.segments[0]) for g in groups for t in g)
    settings = {
        "episodes": len(lengths), "tokens": tokens, "trained": sum(t.n_trained for g in groups for t in g), "lengths": lengths,
        "trl": chosen, "trl_positions": padded, "trl_seconds": swept, "sft": sft_chosen, "sft_seconds": sft_swept,
        "micro_batches": [list(b.input_ids.shape) for b in ours.batches()],
        "seconds": {n: round(statistics.median(t), 3) for n, t in times.items()},
    }  # fmt: skip
    return figures, checks, settings


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """All cases, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--case", nargs="*", choices=list(CASES), default=DEFAULT)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    logging.getLogger("maieutic").setLevel(logging.ERROR)
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2-135m"))
    episodes = read_transcripts()
    figures: list[Figure] = []
    checks: dict[str, Any] = {}
    settings: dict[str, Any] = {"threads": given.threads}
    for name in given.case:
        case = CASES[name]
        model: Any = make_model(case)
        groups = with_own_logprobs(choose(episodes, case), model, model.config.vocab_size)
        with tempfile.TemporaryDirectory() as folder:
            found, checked, set_ = run_case(case, groups, model, tokenizer, given.runs, Path(folder))
        figures += found
        checks[name], settings[name] = checked, set_
    Outcome("training_step", figures, checks, settings).emit()


if __name__ == "__main__":
    main()
