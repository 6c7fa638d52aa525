"""A small factory of synthetic episodes for the tests of transcripts, report and viewer."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from maieutic.dialogue import Dialogue, Turn
from maieutic.env.base import Episode, Phase, PostTest, RewardBreakdown, Verdict
from maieutic.problems.schema import Problem, ProblemPair
from maieutic.report.summary import summarise
from maieutic.training.trajectory import Segment, Trajectory
from maieutic.transcripts import TranscriptWriter, read_transcripts

STORIES = [
    ("{n} boxes hold {a} pencils each. {b} pencils are lost. How many are left?", "pencils"),
    ("A baker makes {n} trays of {a} rolls and sells {b} rolls. How many rolls remain?", "rolls"),
    ("Mia reads {a} pages a day for {n} days, then {b} pages more. How many pages in all?", "pages"),
    ("A bus makes {n} trips with {a} people and {b} people walk. How many people came?", "people"),
]


def make_pair(number: int) -> ProblemPair:
    """Pair ``p-<number>`` with a numeric answer on both sides."""
    rng = random.Random(number)
    story, _ = STORIES[number % len(STORIES)]
    sign = -1 if number % len(STORIES) < 2 else 1

    def problem() -> Problem:
        n, a, b = rng.randint(3, 9), rng.randint(10, 30), rng.randint(2, 9)
        return Problem(text=story.format(n=n, a=a, b=b), answer=str(n * a + sign * b))

    return ProblemPair(
        id=f"p-{number:03d}", source=problem(), transfer=problem(), provenance={"generator": "test"}
    )


def make_turns(rng: random.Random, tutor_turns: int, pair: ProblemPair, leak: bool) -> list[Turn]:
    turns = [Turn("student", f"Hi! Can you help me with this?\n\n{pair.source.text}", scripted=True)]
    hints = [
        "What do you know already, and what is it that you want to find out?",
        "Good start. How many things are there in **one** group, and how many groups?",
        "Nearly. Say in your own words why you multiply here. $a \\times n$ counts what?",
        "Check the last step again: does the story add to the pile, or take away from it?",
    ]
    replies = [
        "I know how many groups there are, and how many are in each. I think it is {}?",
        "Oh, so I multiply first. That gives {}.",
        "Because every group has the same number. Then I have {} before the last step.",
        "It takes some away, so I subtract. Now I get {}.",
    ]
    for k in range(tutor_turns):
        visible = hints[k % len(hints)]
        if leak and k == tutor_turns - 1:
            visible = f"You work too hard. The answer is {pair.source.answer}, so write that down."
        turns.append(
            Turn(
                "tutor",
                visible,
                thinking="The student mixes up the groups.\nI should ask, not tell." if k % 2 == 0 else "",
                visible_tokens=rng.randint(12, 60),
                thinking_tokens=rng.randint(20, 90) if k % 2 == 0 else 0,
            )
        )
        if k < tutor_turns - 1:
            turns.append(
                Turn(
                    "student",
                    replies[k % len(replies)].format(rng.randint(20, 200)),
                    visible_tokens=12,
                )
            )
    return turns


def make_episode(
    *,
    number: int = 0,
    index: int = 0,
    step: int = 0,
    phase: Phase = "eval",
    skill: float = 0.4,
    turns: Sequence[Turn] | None = None,
    leak: bool | None = None,
    unknown: bool | None = None,
    k: int = 8,
    tokens: bool = False,
) -> Episode:
    """One episode; equal arguments give an equal episode. ``skill`` moves the post-test and the share of leaks."""
    rng = random.Random(f"{number}/{index}/{step}/{phase}/{skill}")
    pair = make_pair(number)
    leak = rng.random() < 0.4 * (1 - skill) if leak is None else leak
    unknown = rng.random() < 0.04 if unknown is None else unknown
    eid = f"{phase}-{step:06d}-{pair.id}-{index}"
    dialogue = Dialogue(id=eid, problem=pair.source.text)
    dialogue.turns = list(turns) if turns is not None else make_turns(rng, rng.randint(2, 5), pair, leak)
    dialogue.end = "end_token" if rng.random() < skill else "max_turns"
    last_tutor = max((n for n, t in enumerate(dialogue.turns) if t.speaker == "tutor"), default=None)
    verdicts = {
        "leakage": Verdict(
            "leakage",
            "reject" if leak else "ok",
            criterion="answer_stated" if leak else "",
            quote=f"The answer is {pair.source.answer}" if leak else "",
            turn=last_tutor if leak else None,
        ),
        "correctness": Verdict("correctness", "unknown", criterion="timeout")
        if unknown
        else Verdict("correctness", "ok"),
    }
    grades = [
        rng.choices(["right", "wrong", "no_answer"], [0.2 + 0.6 * skill, 0.5, 0.1])[0] for _ in range(k)
    ]
    answers = [
        f"First I count the groups.\nSo it is \\boxed{{{pair.transfer.answer if g == 'right' else rng.randint(1, 99)}}}"
        if g != "no_answer"
        else "I do not know."
        for g in grades
    ]
    post_test = PostTest("transfer", True, answers, grades)
    pre, post = 0.25, post_test.rate
    gain = (post - pre) / (1 - pre) if post > pre else post - pre
    reward = RewardBreakdown(
        reward=-0.2 if leak else gain,
        gated=leak,
        pre=pre,
        post=post,
        gain=gain,
        penalty=0.2 if leak else 0.0,
    )
    record = None
    if tokens:
        record = Trajectory(
            eid,
            f"g-{pair.id}",
            [Segment([5, 6, 7], [False, True, True], [0.0, -0.5, -1.25], step)],
            reward.reward,
            1.0,
        )
    return Episode(
        id=eid,
        group_id=f"{phase}-{step:06d}-{pair.id}",
        pair=pair,
        phase=phase,
        step=step,
        index=index,
        seed=rng.getrandbits(63),
        student="student",
        dialogue=dialogue,
        verdicts=verdicts,
        post_test=post_test,
        reward=None if unknown else reward,
        exclusion="unknown:correctness" if unknown else None,
        trajectory=record,
        policy_version=step,
        timing={"dialogue": 1.5, "total": 2.0},
    )


def write_run(
    run: Path,
    *,
    arm: str = "dppo",
    steps: Sequence[int] = (0, 4),
    problems: int = 6,
    samples: int = 1,
    lift: float = 0.1,
) -> list[Episode]:
    """Evaluation transcripts of a run whose skill grows by ``lift`` a step; returns the episodes."""
    writer = TranscriptWriter(run, arm=arm)
    everything = []
    for step in steps:
        episodes = [
            make_episode(number=n, index=i, step=step, skill=min(0.95, 0.2 + lift * step))
            for n in range(problems)
            for i in range(samples)
        ]
        writer.write("eval", step, episodes)
        everything += episodes
    return everything


RECIPE = """name: {name}
arm: {arm}
seed: 7
tutor: {{model: smollm2-135m}}
students: [{{model: smollm2-135m, name: student}}]
judge: {{kind: rule}}
env: {{name: near_transfer, transfer: true, hide_tutor: true, gates: hard, tutor_sees_solution: false}}
problems: {{source: gsm-symbolic-mini}}
training: {{max_steps: {steps}}}
"""


def write_record(
    run: Path, *, steps: int = 4, planned: int = 4, arm: str = "dppo"
) -> list[dict[str, float | None]]:
    """``recipe.yaml`` and ``metrics.jsonl`` of a run: a row a training step, evaluations before the first and after the last."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "recipe.yaml").write_text(RECIPE.format(name=run.name, arm=arm, steps=planned))
    rng = random.Random(3)
    rows: list[dict[str, float | None]] = []

    def evaluation(step: int) -> None:
        lines = list(read_transcripts(run, "eval", [step]))
        rows.append({"train/step": step} | {f"eval/{k}": v for k, v in summarise(lines).items()})

    if steps:
        evaluation(0)
    for step in range(1, steps + 1):
        rows.append(
            {
                "train/step": step,
                "rollout/reward": round(-0.1 + 0.1 * step + rng.uniform(-0.05, 0.05), 4),
                "rollout/leak_rate": round(max(0.0, 0.5 - 0.08 * step), 4),
                "rollout/visible_tokens_per_turn": 40.0 + rng.uniform(-5, 5),
                "train/loss": None if step == 2 else round(rng.uniform(-0.1, 0.1), 4),
                "train/entropy": round(1.4 - 0.05 * step, 4),
                "time/step": 12.5,
            }
        )
        if step == planned:
            evaluation(step)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows
