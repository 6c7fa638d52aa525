"""What the harness itself costs: CPU a turn, lag of its event loop, and how both grow with dialogues and turns.

    python benchmarks/harness.py [--runs 3] [--model smollm2-135m]

The product's own rollout, built from a recipe, plays against a server of scripted answers without latency in a process of its
own (benchmarks/support/loopback.py). A *turn* is one utterance that a server was asked for, of tutor or student; its cost is all
CPU of this process (every thread, the lag's sampler included) from the first dialogue's beginning to the last episode's end,
divided by the turns. ``whole`` episodes have both rule gates, the post-test (one request for 16 samples), grading, reward and the
token record for training; ``dialogues`` are only the turns and that record. The scripted answers are numbers, which are graded in
this process: workers, which answers that need algebra would wake, have nothing to do. Connections are opened inside of what is
measured; imports, tokenizers and a first rollout, which warms up, are not.

Before any figure: every dialogue ended at its last turn, has as many turns and tokens as scripted, no request was repeated, ids and
log-probs that would be trained on are those that the server says it sent for that turn's seed, and a rollout against a server with
irregular latencies gives the same episodes to the last bit.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from support.classroom import PAIRS, STUDENT, TUTOR, scripted_classroom
from support.loopback import Loopback, Script, make_script
from support.outcome import Figure, Outcome, check

from maieutic import pace
from maieutic.env.base import Episode
from maieutic.rollout import Slot, rollout
from maieutic.runtime import Classroom
from maieutic.seeds import derive

TOKENS = {TUTOR: 96, STUDENT: 96}
"""Sampled tokens of a turn, its stop token included."""
TEST_TOKENS, SAMPLES = 64, 16
LAG_S = 0.005
SIZES, LENGTHS = (64, 256, 1024), (4, 11, 22)


@dataclass(frozen=True)
class Case:
    """One rollout. ``turns``: of a dialogue, with the scripted opening that nobody is asked for."""

    dialogues: int
    turns: int = 22
    student: Literal["ids", "chat"] = "ids"
    whole: bool = False
    rounds: int = 1
    """Rollouts one after the other: enough of them that a small case is measured as long as a large one."""

    @property
    def asked(self) -> dict[str, int]:
        """Turns that each model is asked for in one dialogue."""
        return {TUTOR: self.turns // 2, STUDENT: (self.turns - 1) // 2}

    @property
    def tokens(self) -> int:
        """Sampled in one dialogue."""
        return sum(n * TOKENS[role] for role, n in self.asked.items())


@dataclass
class Played:
    """What a case cost, and what came of its last round."""

    episodes: list[Episode]
    served: list[dict[str, Any]]
    usage: dict[str, dict[str, float]]
    cpu_s: float
    wall_s: float
    lags_s: list[float]
    case: Case

    @property
    def ms_per_turn(self) -> float:
        case = self.case
        return 1e3 * self.cpu_s / (case.rounds * case.dialogues * sum(case.asked.values()))

    @property
    def us_per_token(self) -> float:
        case = self.case
        return 1e6 * self.cpu_s / (case.rounds * case.dialogues * case.tokens)

    @property
    def lag_p99_ms(self) -> float:
        return 1e3 * statistics.quantiles(self.lags_s, n=100)[-1]


def play(case: Case, server: Loopback, model: str) -> Played:
    """Play one case in a classroom and an event loop of its own."""
    with tempfile.TemporaryDirectory() as folder:
        classroom = scripted_classroom(
            Path(folder),
            server.url,
            model=model,
            student=case.student,
            concurrency=case.dialogues,
            max_turns=case.turns,
            post_test_samples=SAMPLES,
            post_test_max_tokens=256,
        )
        with asyncio.Runner(loop_factory=pace.new_event_loop) as runner:  # as a training run has it
            return runner.run(_play(case, classroom, server))


async def _play(case: Case, classroom: Classroom, server: Loopback) -> Played:
    pairs = classroom.train_pairs[:PAIRS]

    async def dialogue(slot: Slot) -> Episode:
        episode = Episode(
            id=slot.id, group_id=slot.group_id, pair=slot.pair, phase=slot.phase, step=slot.step, index=slot.index,
            seed=slot.seed, student=STUDENT, dialogue=classroom.env.new_dialogue(slot.pair, slot.id), pre=0.5,
        )  # fmt: skip
        await classroom.env.converse(classroom.tutor, classroom.students[0], episode.dialogue, seed=slot.seed)
        episode.trajectory = classroom.tutor.trajectory(episode)
        return episode

    async def round_of(step: int, size: int) -> list[Episode]:
        plays = classroom.play_train if case.whole else dialogue
        taken = pairs[:size]
        result = await rollout(
            plays, taken, phase="train", step=step, run_seed=0, group_size=size // len(taken), retries=0
        )
        return result.episodes

    lags: list[float] = []

    async def sample_lag() -> None:
        due = time.perf_counter() + LAG_S
        while True:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            late = overdue(due, time.perf_counter())
            lags.extend(late)
            due += LAG_S * len(late)

    try:
        await classroom.start()
        await round_of(0, 4)
        classroom.ledger.roles.clear()
        sampler = asyncio.create_task(sample_lag())
        server.reset()
        cpu, wall = time.process_time(), time.perf_counter()
        for step in range(case.rounds):
            if step:
                server.reset()
            episodes = await round_of(1 + step, case.dialogues)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        sampler.cancel()
        usage = classroom.ledger.state()
    finally:
        await classroom.close()
    return Played(episodes, server.served(), usage, cpu, wall, lags, case)


def overdue(due: float, now: float) -> list[float]:
    """Seconds by which each timer is late that has come due, one every :data:`LAG_S` from ``due`` on. A loop that stands still for
    50 ms delays ten of them; a timer that is set when the last one has rung would see one."""
    return [now - due - LAG_S * i for i in range(int((now - due) / LAG_S) + 1)]


# ---- what must be right before a figure counts ------------------------------------------------------------------------------


def fault(played: Played, script: Script) -> str:
    """What is wrong with a rollout, ``""`` when nothing is."""
    case, asked = played.case, played.case.asked
    if len(played.episodes) != case.dialogues:
        return f"{len(played.episodes)} episodes of {case.dialogues}"
    requests = {role: case.rounds * case.dialogues * n for role, n in asked.items()}
    requests[STUDENT] += case.rounds * case.dialogues * case.whole
    for role, usage in played.usage.items():
        got = (usage["requests"], usage["retries"], usage["failures"])
        if got != (requests[role], 0, 0):
            return f"{role}: (requests, retries, failures) are {got}, scripted {(requests[role], 0, 0)}"
    sent = {(row["model"], row["seed"], row["n"]): row for row in played.served}
    if len(sent) != len(played.served):
        return "the server was asked twice with one seed"
    for episode in played.episodes:
        if wrong := _episode_fault(episode, case, script, sent):
            return f"episode {episode.id}: {wrong}"
    return ""


def _episode_fault(
    episode: Episode, case: Case, script: Script, sent: dict[tuple[str, int, int], Any]
) -> str:
    turns = episode.dialogue.turns
    if episode.exclusion is not None or episode.dialogue.end != "max_turns" or len(turns) != case.turns:
        return f"ended as {episode.dialogue.end} ({episode.exclusion}) after {len(turns)} turns"
    if any(t.attempts > 1 for t in turns):
        return "a student turn was sampled again"
    if case.whole and (
        episode.post_test is None or episode.post_test.graded != SAMPLES or episode.reward is None
    ):
        return "the post-test is not complete"
    if episode.trajectory is None or len(episode.trajectory.segments) != 1:
        return "the token record is not one segment"
    (segment,) = episode.trajectory.segments
    ids, logprobs = [], []
    for number, turn in enumerate(turns[1:], start=1):
        seed = derive(episode.seed, "turn", number)
        by_chat = turn.speaker == "student" and case.student == "chat"
        row = sent.get((turn.speaker, seed % 2**31 if by_chat else seed, 1))
        if row is None:
            return f"turn {number}: the server knows nothing of its seed"
        said = script.said(turn.speaker, row["keys"][0])
        if turn.visible != said.text:
            return f"turn {number}: {turn.visible!r} is not what the server sent: {said.text!r}"
        if turn.speaker == "tutor":
            ids += said.ids
            logprobs += said.logprobs
    trained = [i for i, own in enumerate(segment.mask) if own]
    if [segment.ids[i] for i in trained] != ids or [segment.logprobs[i] for i in trained] != logprobs:
        return "ids or log-probs to be trained on are not those that the server sent"
    return ""


def fingerprint(episodes: Sequence[Episode]) -> str:
    """Of everything that must not depend on timing."""
    digest = hashlib.sha256()
    for e in episodes:
        assert e.trajectory is not None
        turns = [(t.speaker, t.visible, t.visible_tokens, t.attempts) for t in e.dialogue.turns]
        verdicts = {gate: (v.decision, v.criterion, v.quote, v.turn) for gate, v in e.verdicts.items()}
        test = None if e.post_test is None else (e.post_test.answers, e.post_test.grades)
        reward = None if e.reward is None else e.reward.reward
        parts = (e.id, e.seed, turns, verdicts, test, reward, e.trajectory.to_json())
        digest.update(json.dumps(parts).encode())
    return digest.hexdigest()


def irregular(body: dict[str, Any]) -> float:
    """0 to 30 ms, by the request's seed: an order of arrival that has nothing to do with that of the dialogues."""
    return zlib.crc32(str(body["seed"]).encode()) % 31 / 1e3


def same_whatever_the_timing(script: Script, model: str, case: Case) -> str:
    """Play a case against a quick and an irregular server; ends the benchmark when the episodes differ."""
    prints = []
    for latency in (None, irregular):
        with Loopback(script, latency=latency) as server:
            played = play(case, server, model)
        check(not (wrong := fault(played, script)), wrong)
        prints.append(fingerprint(played.episodes))
    check(prints[0] == prints[1], f"episodes of {case} depend on the order of answers")
    return prints[0][:16]


# ---- the figures ----------------------------------------------------------------------------------------------------------


def cases(sizes: Sequence[int] = (256, 512)) -> dict[str, Case]:
    """Everything that one run plays, by name."""
    full = max(SIZES) // 4
    out = {f"whole {n} {how}": Case(n, student=how, whole=True) for n in sizes for how in ("ids", "chat")}
    out |= {f"dialogues {n} × 22": Case(n, rounds=max(1, full // n)) for n in SIZES}
    out |= {f"dialogues {full} × {t}": Case(full, t, rounds=22 // t) for t in LENGTHS}
    return out


def figures(found: dict[str, list[Played]], sizes: Sequence[int] = (256, 512)) -> list[Figure]:
    """Rows 1 and 10."""
    out = []
    for n in sizes:
        for how, row in (("ids", "1"), ("chat", "1b")):
            runs = found[f"whole {n} {how}"]
            what = f"{n} whole episodes, student by {'token ids' if how == 'ids' else 'chat'}"
            out += [
                Figure(row, f"harness CPU a turn, {what}", "", "ms", [p.ms_per_turn for p in runs], "<= 1.5"),
                Figure(row, f"event-loop lag p99, {what}", "", "ms", [p.lag_p99_ms for p in runs], "<= 20"),
            ]
    full = max(SIZES) // 4
    for n in SIZES:
        runs = found[f"dialogues {n} × 22"]
        out.append(
            Figure("1c", f"harness CPU a turn, {n} dialogues alone", "", "ms", [p.ms_per_turn for p in runs])
        )
    by = {
        f"{', '.join(map(str, SIZES))} dialogues of 22 turns": [f"dialogues {n} × 22" for n in SIZES],
        f"{full} dialogues of {', '.join(map(str, LENGTHS))} turns": [
            f"dialogues {full} × {t}" for t in LENGTHS
        ],
    }
    for what, names in by.items():
        for name in names:
            costs = [p.us_per_token for p in found[name]]
            if not any(f.measure.endswith(name) for f in out):
                out.append(Figure("10b", f"harness CPU a sampled token, {name}", "", "µs", costs))
        columns = [[p.us_per_token for p in found[name]] for name in names]
        spread = [max(row) / min(row) - 1 for row in zip(*columns, strict=True)]
        out.append(
            Figure(
                "10", f"harness CPU a sampled token, most ÷ least − 1: {what}", "", "ratio", spread, "<= 0.15"
            )
        )
    first, *later = LENGTHS
    further = []
    for a, b in zip([first, *later], later, strict=False):
        short, long = found[f"dialogues {full} × {a}"], found[f"dialogues {full} × {b}"]
        further.append([_further(p, q) for p, q in zip(short, long, strict=True)])
        out.append(
            Figure("10c", f"harness CPU of a further sampled token, {a} to {b} turns", "", "µs", further[-1])
        )
    ratio = [max(row) / min(row) - 1 for row in zip(*further, strict=True)]
    out.append(Figure("10c", "the same, most ÷ least − 1", "", "ratio", ratio))
    return out


def _further(short: Played, long: Played) -> float:
    """Microseconds that each token costs by which a dialogue is longer."""
    cost = long.us_per_token * long.case.tokens - short.us_per_token * short.case.tokens
    return cost / (long.case.tokens - short.case.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer both speakers have")
    parser.add_argument(
        "--only", default="", help="play only the cases whose name holds this, and print no figures"
    )
    given = parser.parse_args()
    logging.getLogger("maieutic").setLevel(logging.ERROR)

    from transformers import AutoTokenizer

    from maieutic.models import resolve_model

    model = resolve_model(given.model)
    script = make_script(AutoTokenizer.from_pretrained(model), TOKENS, tests={STUDENT: TEST_TOKENS})
    checks: dict[str, Any] = {}
    for how in ("ids", "chat"):
        case = Case(64, 11, student=how, whole=True)
        checks[f"same episodes whatever the timing, student by {how}"] = same_whatever_the_timing(
            script, model, case
        )
    print("the same episodes whatever the timing", file=sys.stderr, flush=True)
    found: dict[str, list[Played]] = {}
    with Loopback(script) as server:
        for run in range(given.runs):
            for name, case in cases().items():
                if given.only not in name:
                    continue
                played = play(case, server, model)
                check(not (wrong := fault(played, script)), f"{name}: {wrong}")
                checks["turns compared with the server's record"] = checks.get(
                    "turns compared with the server's record", 0
                ) + case.dialogues * sum(case.asked.values())
                found.setdefault(name, []).append(replace(played, episodes=[], served=[]))
                print(
                    f"run {run + 1}, {name}: {played.ms_per_turn:.3f} ms a turn, {played.us_per_token:.2f} µs a token, lag p99 "
                    f"{played.lag_p99_ms:.1f} ms, {played.wall_s:.1f} s",
                    file=sys.stderr,
                    flush=True,
                )
    if given.only:
        return
    settings = {
        "model": given.model, "tokens": TOKENS, "samples": SAMPLES, "pairs": PAIRS, "runs": given.runs,
        "gates": "soft, by rule", "lag_every_s": LAG_S,
    }  # fmt: skip
    Outcome("harness", figures(found), checks, settings).emit()


if __name__ == "__main__":
    main()
