"""Weight pushes to a real vLLM server: seconds and bytes of ``disk`` (all weights) and ``lora`` (the adapter), two sizes of model.

    python benchmarks/weight_push.py [--runs 3] [--model smollm2-135m] [--folder /dev/shm/…]

The product's own push does it: weights written to a shared folder, the server's reload, the probe. Before each push all weights
(the tied embeddings too), or all of the adapter, are moved; after it the server's log-probs of fresh sequences must be those of a
plain transformers forward, and before it they must not (else the comparison would show nothing). Beside each push the same bytes
are written to the same folder and read back by nobody: the least that a push through a folder can cost.

How much of a push could hide behind the tail of a rollout: a few dialogues' last requests run alone, and while weights are
written. Today nothing of a push is hidden: at staleness 0 no rollout runs, at staleness 1 the push comes before the next one.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from support.outcome import Figure, Outcome, check
from support.recording import FORCED, Call, replay
from support.vllm_server import Chosen, choose_model, random_model, recipe_of, serving

from maieutic.config import Recipe
from maieutic.engines.connect import connect_vllm
from maieutic.engines.push import DiskPush, WeightPush
from maieutic.engines.push_lora import LoraPush
from maieutic.engines.usage import Ledger
from maieutic.engines.vllm import VllmEngine
from maieutic.training.policy import load_model
from maieutic.training.push_probe import make_scorer

TOLERANCE = 1e-3
"""Most |log-prob difference| between server and trainer, fp32."""
PROBE, FRESH = (4, 256), (2, 64)
"""Sequences and tokens of the push's probe (as in training), and of the comparison that this benchmark adds."""
TAIL = (4, 64)
"""Requests that are still decoding at the end of a rollout, and tokens of each."""


def sequences(vocabulary: int, shape: tuple[int, int], seed: int) -> list[list[int]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, vocabulary, shape, generator=generator).tolist()


@torch.no_grad()
def move(model: torch.nn.Module, seed: int, share: float = 0.02) -> None:
    """Add noise of ``share`` of its spread to every trained tensor; tensors of zeros (LoRA's B) get a little, too."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.requires_grad:
            scale = share * max(float(p.std()), 0.02)
            p.add_(torch.randn(p.shape, generator=generator) * scale)


@torch.no_grad()
def plain_logprobs(model: torch.nn.Module, ids: list[int]) -> list[float]:
    """Log-probs of ``ids[1:]`` by the model's own forward pass."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


async def gap_of(engine: VllmEngine, model: torch.nn.Module, fresh: Sequence[list[int]]) -> float:
    """Largest |server − trainer| over fresh sequences, under the name that requests are served with now."""
    worst = 0.0
    for ids in fresh:
        theirs = await engine.score_at(engine.pool.urls[0], ids, model=engine.adapter)
        # In a thread: a loop that stands still does not notice that the server closes an idle connection.
        ours = await asyncio.to_thread(plain_logprobs, model, ids)
        gaps = [abs(a - b) for a, b in zip(theirs, ours, strict=True)]
        worst = max(worst, *(g if g == g else float("inf") for g in gaps))
    return worst


def write_raw(folder: Path, size: int) -> float:
    """Seconds for writing ``size`` bytes to a file of ``folder``."""
    data = memoryview(bytearray(size))
    start = time.perf_counter()
    with (folder / "raw").open("wb") as file:
        file.write(data)
    seconds = time.perf_counter() - start
    (folder / "raw").unlink()
    return seconds


async def push_once(
    push: WeightPush, engine: VllmEngine, model: torch.nn.Module, version: int, folder: Path
) -> dict[str, float]:
    """Move the weights, see that the server's are others, push, see that they are the same."""
    fresh = sequences(model.config.vocab_size, FRESH, 1000 + version)
    await asyncio.to_thread(move, model, version)
    stale = await gap_of(engine, model, fresh)
    check(
        stale > 10 * TOLERANCE, f"weights that were not pushed differ by {stale:.2e} only: nothing would show"
    )
    start = time.perf_counter()
    await push.push(version)
    total = time.perf_counter() - start
    gap = await gap_of(engine, model, fresh)
    check(
        gap <= TOLERANCE,
        f"version {version}: server and trainer differ by {gap:.2e} (tolerance {TOLERANCE:g})",
    )
    report = push.report
    assert report is not None
    return {
        "total_s": total,
        "write_s": report.write_s,
        "load_s": report.load_s,
        "probe_s": report.probe_s,
        "bytes": report.bytes,
        "raw_s": write_raw(folder, report.bytes),
        "gap": gap,
        "probe_gap": report.probe_gap,
        "stale_gap": stale,
    }


async def tail(engine: VllmEngine, prompts: Sequence[list[int]]) -> float:
    """Seconds for the last requests of a rollout."""
    body = {
        "model": engine.adapter or engine.model,
        "temperature": 1.0,
        "max_tokens": TAIL[1],
        "seed": 1,
        **FORCED,
    }
    calls = [Call(i, "tutor", str(i), None, {**body, "prompt": p}, 0.0) for i, p in enumerate(prompts)]
    done = await replay(engine.pool.urls[0], calls, [[c.body] for c in calls], slots=len(calls))
    return done.seconds


async def overlap(push: WeightPush, engine: VllmEngine, vocabulary: int, version: int) -> dict[str, float]:
    """Writing weights alone, the tail of a rollout alone, and both at once."""
    prompts = sequences(vocabulary, (TAIL[0], 128), version)
    await tail(engine, prompts)  # its prompts are cached from now on
    start = time.perf_counter()
    await asyncio.to_thread(push._stage, version)
    stage = time.perf_counter() - start
    alone = await tail(engine, prompts)
    start = time.perf_counter()
    await asyncio.gather(tail(engine, prompts), asyncio.to_thread(push._stage, version))
    both = time.perf_counter() - start
    return {"stage_s": stage, "tail_s": alone, "both_s": both, "hidden": (stage + alone - both) / stage}


async def measure(
    recipe: Recipe, model: Chosen, folder: Path, runs: int
) -> dict[str, list[dict[str, float]]]:
    """``runs`` pushes of each kind to a running server, interleaved."""
    from peft import LoraConfig, get_peft_model

    def load() -> Any:
        return load_model(model.folder, torch.float32, torch.device("cpu"), revision=None, offline=True)

    lora = recipe.tutor.lora
    assert lora is not None
    full = load()
    adapted = get_peft_model(load(), LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules="all-linear"))
    adapted.eval()
    rows: dict[str, list[dict[str, float]]] = {"disk": [], "lora": [], "overlap": []}
    # Two clients of one server: the adapter lies upon the weights that the server holds, so it goes first.
    engines = [connect_vllm(recipe.tutor.engine, role="tutor", ledger=Ledger()) for _ in range(2)]
    try:
        for engine in engines:
            await engine.start()
        probe = sequences(full.config.vocab_size, PROBE, 0)
        settings = {"probe": probe, "tolerance": TOLERANCE}
        lora_push = LoraPush(
            adapted, engines[0], folder / "lora", score=make_scorer(adapted, 512), **settings
        )
        disk_push = DiskPush(full, engines[1], folder / "disk", score=make_scorer(full, 512), **settings)
        for version in range(runs + 1):  # the first of each is warm-up
            rows["lora"].append(await push_once(lora_push, engines[0], adapted, version, folder))
            print("lora", {k: round(v, 5) for k, v in rows["lora"][-1].items()}, flush=True)
        for version in range(runs + 1):
            rows["disk"].append(await push_once(disk_push, engines[1], full, version, folder))
            print("disk", {k: round(v, 5) for k, v in rows["disk"][-1].items()}, flush=True)
            rows["overlap"].append(await overlap(disk_push, engines[1], full.config.vocab_size, version))
            print("overlap", {k: round(v, 5) for k, v in rows["overlap"][-1].items()}, flush=True)
    finally:
        for engine in engines:
            await engine.close()
    return {name: several[1:] for name, several in rows.items()}


def run(args: Any, folder: Path) -> Outcome:
    """The benchmark against a server for each size of model."""
    shared = Path(args.folder or ("/dev/shm" if Path("/dev/shm").is_dir() else folder))
    small = Chosen("random-30m", str(random_model(folder / "random-30m", vocab_size=8192)), real=False)
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for model in (choose_model(folder, args.model), small):
        print(model.name, flush=True)
        recipe = recipe_of(model, folder, [f"tutor.engine.push={kind}" for kind in ("lora",)])
        with (
            tempfile.TemporaryDirectory(dir=shared) as name,
            serving(recipe, model, folder),
        ):
            found[model.name] = asyncio.run(measure(recipe, model, Path(name), args.runs))
    return outcome(found, str(shared))


def outcome(found: dict[str, dict[str, list[dict[str, float]]]], shared: str) -> Outcome:
    figures = []
    names = {"disk": "all weights", "lora": "adapter"}
    for model, rows in found.items():
        for kind, what in names.items():
            of = f"push of {what}, {model}"

            def add(
                row: str, measure: str, unit: str, values: list[float], against: str = "", of: str = of
            ) -> None:
                figures.append(Figure(row, f"{of}: {measure}", against, unit, values))

            several = rows[kind]
            add("9", "total", "s", [r["total_s"] for r in several])
            add("9a", "writing", "s", [r["write_s"] for r in several])
            add("9b", "server's reload", "s", [r["load_s"] for r in several])
            add("9c", "probe", "s", [r["probe_s"] for r in several])
            add("9d", "written", "MB", [r["bytes"] / 1e6 for r in several])
            if kind == "disk":
                add(
                    "9e",
                    "writing",
                    "ratio",
                    [r["write_s"] / r["raw_s"] for r in several],
                    "the same bytes, plainly written",
                )
        tails = rows["overlap"]
        figures.append(Figure("9f", f"writing all weights, {model}: could hide behind the tail of a rollout",
                              "the tail alone", "share", [r["hidden"] for r in tails]))  # fmt: skip
    pushes = [(m, k, r) for m, rows in found.items() for k in names for r in rows[k]]
    return Outcome(
        "weight_push",
        figures,
        {
            "logprob_gap_after_push": max(r["gap"] for _, _, r in pushes),
            "logprob_gap_in_probe": max(r["probe_gap"] for _, _, r in pushes),
            "least_gap_before_push": min(r["stale_gap"] for _, _, r in pushes),
            "pushes": len(pushes),
        },
        {"models": list(found), "dtype": "float32", "folder": shared},
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--folder", help="that trainer and server share (default: /dev/shm where there is one)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = run(args, Path(name))
    result.emit()


if __name__ == "__main__":
    main()
