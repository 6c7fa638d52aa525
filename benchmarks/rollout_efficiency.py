"""Rollout efficiency: tokens a second of a rollout ÷ a raw replay of the requests that it made, on one real vLLM server.

    python benchmarks/rollout_efficiency.py [--runs 3] [--problems 4] [--group 3] [--model smollm2-135m]

The recipe ``smollm2/dppo`` (tutor, student, gates by rule, post-test) is played as training plays it, and every request is
written down. Then a bare client that does nothing else sends the same prompt ids with forced lengths, each request when the one
that it waited for is answered, as many at once as the product allows. The prefix cache is emptied before each. Turn for turn the
engine has the same work, so what is missing to 1 is what the harness costs.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from support.outcome import Figure, Outcome, check
from support.recording import Call, Recording, Replayed, forced, replay
from support.vllm_server import Room, choose_model, read_counts, recipe_of, reset_prefix_cache, serving

from maieutic.env.base import Episode

TOLERANCE = 1e-3
"""Most |log-prob difference| between engine and transformers, fp32."""
SCORED = 4
"""Episodes of a run whose log-probs are computed again."""


# ---- correctness -----------------------------------------------------------------------------------------------------


def check_served(calls: Sequence[Call]) -> int:
    """Every request was answered, for as many ids as were sent; a tutor's next prompt begins with what it read and said.

    The product's client drops the server's echo of the ids: :func:`check_replay` compares it, for the same prompts. Returns how
    many prompts were compared with what was said before them.
    """
    spoken: dict[str, list[int]] = {}
    compared = 0
    for call in calls:
        check(call.answer is not None, f"request {call.number} of {call.dialogue} was not answered")
        read = call.answer["usage"]["prompt_tokens"]
        check(
            read == len(call.prompt),
            f"request {call.number}: the server read {read} ids, {len(call.prompt)} were sent",
        )
        if call.role != "tutor":
            continue
        before = spoken.get(call.dialogue, [])
        check(
            call.prompt[: len(before)] == before,
            f"request {call.number}: the prompt does not go on from the ids that were served before",
        )
        compared += bool(before)
        spoken[call.dialogue] = [*call.prompt, *call.ids[0]]
    return compared


def check_trajectories(episodes: Sequence[Episode], calls: Sequence[Call]) -> int:
    """What would be trained on is what was served, ids and log-probs; returns the number of tokens."""
    ids: dict[str, list[int]] = {}
    logprobs: dict[str, list[float]] = {}
    for call in calls:
        if call.role == "tutor":
            ids.setdefault(call.dialogue, []).extend(call.ids[0])
            logprobs.setdefault(call.dialogue, []).extend(call.logprobs[0])
    total = 0
    for episode in episodes:
        check(episode.trajectory is not None, f"episode {episode.id} has no trajectory")
        for what, served in (("ids", ids), ("logprobs", logprobs)):
            trained = [
                x
                for s in episode.trajectory.segments
                for x, m in zip(getattr(s, what), s.mask, strict=True)
                if m
            ]
            check(
                trained == served[episode.id],
                f"episode {episode.id}: its {what} are not those that were served",
            )
        total += len(ids[episode.id])
    return total


@torch.no_grad()
def logprob_gap(model: torch.nn.Module, episodes: Sequence[Episode]) -> tuple[float, int]:
    """Largest |engine − transformers| over sampled tokens (a plain forward of the whole sequence, at the sampling temperature)."""
    worst, tokens = 0.0, 0
    for episode in episodes:
        for segment in episode.trajectory.segments:
            logits = model(input_ids=torch.tensor([segment.ids])).logits[0, :-1].float()
            logp = torch.log_softmax(logits / episode.trajectory.temperature, -1)
            for i, (token, trained) in enumerate(zip(segment.ids[1:], segment.mask[1:], strict=True)):
                if trained:
                    gap = abs(float(logp[i, token]) - segment.logprobs[i + 1])
                    worst = max(worst, gap if gap == gap else float("inf"))
                    tokens += 1
    return worst, tokens


def check_replay(calls: Sequence[Call], replayed: Replayed) -> tuple[int, int]:
    """Request by request the server read the recorded prompt and sampled as many tokens as were recorded; returns (equal, all):
    choices whose ids are the same, too."""
    equal = total = 0
    for i, call in enumerate(calls):
        lengths = sorted(map(len, call.ids))
        check(
            replayed.lengths(i) == lengths,
            f"request {call.number}: {replayed.lengths(i)} tokens replayed, {lengths} recorded",
        )
        choices = [c for a in replayed.answers[i] for c in a["choices"]]
        check(
            all(c.get("prompt_token_ids") == call.prompt for c in choices),
            f"request {call.number}: the server does not say that it read the ids that were sent",
        )
        again = [c["token_ids"] for c in choices]
        equal += sum(ids in again for ids in call.ids)
        total += len(call.ids)
    return equal, total


# ---- measuring -------------------------------------------------------------------------------------------------------


async def measure(room: Room, url: str, step: int) -> dict[str, float]:
    """One rollout and its replay."""
    await reset_prefix_cache(url)
    before = await read_counts(url)
    seconds, result, calls = await room.play(step)
    between = await read_counts(url)
    check(result.counts["retried"] == 0, "an episode was lost and played again")
    compared = check_served(calls)
    trained = check_trajectories(result.episodes, calls)
    played = [e for e in result.episodes if e.trajectory is not None]
    gap, scored = logprob_gap(room.policy.model, played[:SCORED])
    check(
        gap <= TOLERANCE,
        f"engine and transformers differ by {gap:.2e} on a log-prob (tolerance {TOLERANCE:g})",
    )

    await reset_prefix_cache(url)
    start = await read_counts(url)
    again = await replay(url, calls, [forced(c) for c in calls], room.slots)
    after = await read_counts(url)
    equal, choices = check_replay(calls, again)

    tokens = Recording.tokens(calls)
    return {
        "tokens": tokens,
        "requests": len(calls),
        "replayed_requests": again.requests,
        "seconds": seconds,
        "rollout_only_s": result.seconds,
        "replay_s": again.seconds,
        "ours": tokens / seconds,
        "replay": tokens / again.seconds,
        "post_tests": sum(e.post_test is not None for e in result.episodes),
        "continued": compared,
        "trained": trained,
        "scored": scored,
        "gap": gap,
        "same_ids": equal / choices,
        "hits": between["prefix_cache_hits_total"] - before["prefix_cache_hits_total"],
        "replay_hits": after["prefix_cache_hits_total"] - start["prefix_cache_hits_total"],
    }


async def run(args: Any, folder: Path) -> Outcome:
    """The benchmark against a server of its own."""
    model = choose_model(folder, args.model)
    recipe = recipe_of(
        model, folder, [f"training.problems_per_step={args.problems}", f"training.group_size={args.group}"]
    )
    with serving(recipe, model, folder) as server:
        room = await Room.open(recipe)
        try:
            print("warming up", flush=True)
            await room.play(args.runs + 1, problems=1)
            rows = []
            for step in range(1, args.runs + 1):
                rows.append(await measure(room, server.url, step))
                print({k: round(v, 6) for k, v in rows[-1].items()}, flush=True)
        finally:
            await room.classroom.close()
    return outcome(rows, model.name, args)


def outcome(rows: Sequence[dict[str, float]], model: str, args: Any) -> Outcome:
    ratios = [r["ours"] / r["replay"] for r in rows]
    return Outcome(
        "rollout_efficiency",
        [
            Figure(
                "2",
                f"rollout, {model}: tokens a second",
                "raw replay of its requests",
                "ratio",
                ratios,
                ">= 0.95",
            ),
            Figure("2b", f"rollout, {model}: tokens a second", "", "tok/s", [r["ours"] for r in rows]),
            Figure("2c", f"raw replay, {model}: tokens a second", "", "tok/s", [r["replay"] for r in rows]),
        ],
        {
            "tokens_equal_request_by_request": int(sum(r["tokens"] for r in rows)),
            "prompts_that_go_on_from_served_ids": int(sum(r["continued"] for r in rows)),
            "trained_tokens_as_served": int(sum(r["trained"] for r in rows)),
            "logprob_gap_to_transformers": max(r["gap"] for r in rows),
            "logprobs_compared": int(sum(r["scored"] for r in rows)),
            "same_ids_in_replay": round(statistics.mean(r["same_ids"] for r in rows), 4),
        },
        {
            "model": model,
            "dtype": "float32",
            "dialogues": args.problems * args.group,
            **{
                k: [int(r[k]) for r in rows]
                for k in ("requests", "replayed_requests", "post_tests", "hits", "replay_hits")
            },
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--problems", type=int, default=4, help="problem pairs a rollout")
    parser.add_argument("--group", type=int, default=3, help="dialogues a problem pair")
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = asyncio.run(run(args, Path(name)))
    result.emit()


if __name__ == "__main__":
    main()
