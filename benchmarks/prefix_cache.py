"""Prefix cache: hits on a real vLLM server ÷ what its block size allows; and a post-test as one n = K request or as K requests.

    python benchmarks/prefix_cache.py [--runs 3] [--problems 4] [--group 3] [--k 16] [--model smollm2-135m]

Hits: rollouts of ``smollm2/dppo`` are played as training plays them. vLLM counts the prompt tokens that it looked up and found; a
simulation over the recorded requests counts those in whole blocks that an earlier request had computed, and, as the bound that
no block size passes, those in blocks of one token.

Post-test: the recorded rollout is replayed twice, its post-tests once as one request of K samples and once as K requests, with
the same prompts, lengths and seeds, while the other dialogues go on as they did.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.outcome import Figure, Outcome, check
from support.recording import FORCED, Call, Replayed, first_hits, forced, replay, theoretical
from support.vllm_server import Room, choose_model, read_counts, recipe_of, reset_prefix_cache, serving

TEST_TOKENS = 32
"""Tokens of each answer to a replayed post-test: the same for all, so that one request can force them."""


def post_tests(calls: Sequence[Call], max_tokens: int) -> set[int]:
    """Numbers of the requests that are post-tests: the student's with the post-test's budget."""
    return {c.number for c in calls if c.role == "student" and c.body["max_tokens"] == max_tokens}


def as_one(call: Call, k: int) -> list[dict[str, Any]]:
    """A post-test of ``k`` samples as one request."""
    return [call.body | FORCED | {"n": k, "max_tokens": TEST_TOKENS}]


def as_many(call: Call, k: int) -> list[dict[str, Any]]:
    """The same as ``k`` requests; vLLM draws sample i of a request with seed + i, so they draw the same."""
    seed = call.body["seed"]
    return [call.body | FORCED | {"n": 1, "max_tokens": TEST_TOKENS, "seed": seed + i} for i in range(k)]


def check_same_work(calls: Sequence[Call], left: Replayed, right: Replayed) -> tuple[int, int, int]:
    """Both replays sampled equally many tokens, request by request; returns (tokens, choices with the same ids, choices)."""
    tokens = same = total = 0
    for i, call in enumerate(calls):
        check(
            left.lengths(i) == right.lengths(i),
            f"request {call.number}: {sum(left.lengths(i))} tokens as one request, {sum(right.lengths(i))} as many",
        )
        tokens += sum(left.lengths(i))
        ids = [[c["token_ids"] for a in r.answers[i] for c in a["choices"]] for r in (left, right)]
        same += sum(x in ids[1] for x in ids[0])
        total += len(ids[0])
    return tokens, same, total


async def play(room: Room, url: str, step: int, runs: list[dict[str, float]]) -> list[Call]:
    """One rollout on an empty cache: vLLM's counts beside the simulation's."""
    await reset_prefix_cache(url)
    before = await read_counts(url)
    _, result, calls = await room.play(step)
    after = await read_counts(url)
    check(result.counts["retried"] == 0, "an episode was lost and played again")
    check(all(c.answer for c in calls), "a request was not answered")
    block = int(after["block_size"])
    whole, tokens = theoretical(calls, block), theoretical(calls, 1)
    looked_up = after["prefix_cache_queries_total"] - before["prefix_cache_queries_total"]
    hits = after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"]
    # The probe of the weights that ends a rollout asks for prompt log-probs, which vLLM neither looks up nor counts.
    check(
        looked_up == whole["all"].queries,
        f"vLLM looked up {looked_up:.0f} tokens, the recorded prompts have {whole['all'].queries}",
    )
    alone = [c for c in calls if c.body.get("n", 1) == 1]
    first = first_hits(calls, block)
    runs.append(
        {
            "block": block,
            "queries": looked_up,
            "rate": hits / looked_up,
            "theory": whole["all"].rate,
            "bound": tokens["all"].rate,
            "tutor_theory": whole["tutor"].rate,
            "tutor_bound": tokens["tutor"].rate,
            "student_theory": whole["student"].rate,
            "student_bound": tokens["student"].rate,
            # Of requests with several choices `usage` has the cached tokens of one choice only.
            "usage": sum(c.cached for c in alone) / sum(first[c.number] for c in alone),
            "preempted": after.get("num_preemptions_total", 0.0) - before.get("num_preemptions_total", 0.0),
        }
    )
    return calls


async def compare(room: Room, url: str, calls: Sequence[Call], k: int, one_first: bool) -> dict[str, float]:
    """The recorded rollout with its post-tests as one request of ``k`` and as ``k`` requests, an empty cache before each."""
    tests = post_tests(calls, room.recipe.env.post_test_max_tokens)
    check(bool(tests), "no dialogue reached its post-test: nothing to compare")
    done: dict[str, Replayed] = {}
    for name, shape in [("one", as_one), ("many", as_many)][:: 1 if one_first else -1]:
        await reset_prefix_cache(url)
        bodies = [shape(c, k) if c.number in tests else forced(c) for c in calls]
        done[name] = await replay(url, calls, bodies, room.slots)
    tokens, same, choices = check_same_work(calls, done["one"], done["many"])

    def test_s(name: str) -> float:
        return statistics.mean(t for c, t in zip(calls, done[name].took, strict=True) if c.number in tests)

    return {
        "tests": len(tests),
        "tokens": tokens,
        "same_ids": same / choices,
        "one_s": done["one"].seconds,
        "many_s": done["many"].seconds,
        "one_test_s": test_s("one"),
        "many_test_s": test_s("many"),
    }


async def run(args: Any, folder: Path) -> Outcome:
    """The benchmark against a server of its own."""
    model = choose_model(folder, args.model)
    changes = [f"training.problems_per_step={args.problems}", f"training.group_size={args.group}"]
    recipe = recipe_of(model, folder, changes)
    cached: list[dict[str, float]] = []
    tested: list[dict[str, float]] = []
    with serving(recipe, model, folder, extra=args.serve.split()) as server:
        room = await Room.open(recipe)
        try:
            for step in range(
                1, args.runs + 1
            ):  # counts need no warm-up, and the second of two replays is not favoured
                calls = await play(room, server.url, step, cached)
                print({k: round(v, 4) for k, v in cached[-1].items()}, flush=True)
                tests = post_tests(calls, recipe.env.post_test_max_tokens)
                some = some_dialogues(calls, tests, args.tested)
                tested.append(await compare(room, server.url, some, args.k, one_first=bool(step % 2)))
                print({k: round(v, 4) for k, v in tested[-1].items()}, flush=True)
        finally:
            await room.classroom.close()
    return outcome(cached, tested, model.name, args)


def some_dialogues(calls: Sequence[Call], tests: set[int], n: int) -> list[Call]:
    """The requests of ``n`` dialogues, those that sat a post-test first (others were stopped by a gate)."""
    tested = {c.dialogue for c in calls if c.number in tests}
    names = sorted(dict.fromkeys(c.dialogue for c in calls), key=lambda name: name not in tested)
    kept = set(names[:n])
    return [c for c in calls if c.dialogue in kept]


def outcome(
    cached: Sequence[dict[str, float]], tested: Sequence[dict[str, float]], model: str, args: Any
) -> Outcome:
    def column(rows: Sequence[dict[str, float]], name: str) -> list[float]:
        return [r[name] for r in rows]

    block = int(cached[0]["block"])
    ratio = [r["rate"] / r["theory"] for r in cached]
    gained = [r["many_s"] / r["one_s"] for r in tested]
    waited = [r["many_test_s"] / r["one_test_s"] for r in tested]
    return Outcome(
        "prefix_cache",
        [
            Figure("4", f"prefix-cache hit rate, {model}", f"whole blocks of {block} computed before", "ratio", ratio, ">= 0.95"),
            Figure("4b", f"prefix-cache hit rate, {model}", "", "share of prompt tokens", column(cached, "rate")),
            Figure("4c", f"the same in blocks of {block}, theoretical", "", "share of prompt tokens", column(cached, "theory")),
            Figure("4d", "the same token by token, theoretical", "", "share of prompt tokens", column(cached, "bound")),
            Figure("4e", f"rollout, {model}: post-tests as one n={args.k} request", f"{args.k} requests each", "speed-up", gained),
            Figure("4f", f"one post-test, {model}: as one n={args.k} request", f"{args.k} requests", "speed-up", waited),
        ],
        {
            "tokens_looked_up_as_recorded": int(sum(column(cached, "queries"))),
            "cached_in_usage_over_theory": [round(r["usage"], 4) for r in cached],
            "tokens_equal_one_and_many": int(sum(column(tested, "tokens"))),
            "same_ids_one_and_many": round(statistics.mean(column(tested, "same_ids")), 4),
        },
        {
            "model": model,
            "block_size": block,
            "dialogues": args.problems * args.group,
            "k": args.k,
            "post_tests": [int(r["tests"]) for r in tested],
            "preempted": [int(r["preempted"]) for r in cached],
            **{f"{role}_{what}": [round(r[f"{role}_{what}"], 4) for r in cached]
               for role in ("tutor", "student") for what in ("theory", "bound")},
        },
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--problems", type=int, default=4, help="problem pairs a rollout")
    parser.add_argument("--group", type=int, default=3, help="dialogues a problem pair")
    parser.add_argument("--tested", type=int, default=4, help="dialogues that are replayed for the post-test")
    parser.add_argument("--k", type=int, default=16, help="samples of a replayed post-test")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--serve", default="", help="added to the server's command, as --serve='--block-size 128'"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = asyncio.run(run(args, Path(name)))
    result.emit()


if __name__ == "__main__":
    main()
