"""The environment suite: held-out pairs in the training environment itself, both gains from one dialogue, every dialogue tested.

Prompts, turn limits, gates and post-test are those of the experiment's environment. A dialogue that the gates reject is tested like
any other (only training saves that): Table 1 of the paper reports gains of tutors that leak in nine dialogues of ten.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maieutic.config import ENV_TIMING
from maieutic.env.base import Episode, PostTest, Student
from maieutic.env.play import draw_student
from maieutic.env.reward import normalised_gain
from maieutic.evaluation.cache import costs, summed
from maieutic.evaluation.journal import Journal, Progress, SampleFailed, run_all
from maieutic.evaluation.parts import Parts
from maieutic.evaluation.results import SuiteResult, digest
from maieutic.evaluation.tutor_arm import Arm, identity, token_notes
from maieutic.problems import ProblemPair, load_problems
from maieutic.problems.measure import measure
from maieutic.rollout import lost
from maieutic.seeds import derive
from maieutic.transcripts import _flat, episode_to_json

MEASURES = (
    "transfer_gain",
    "same_gain",
    "transfer_gap",
    "transfer_gain_passed",
    "same_gain_passed",
    "reward",
    "gated",
    "leak_rate",
    "correctness_reject_rate",
    "unknown_rate",
    "excluded",
    "blank_turn_rate",
    "truncated_turn_rate",
    "truncated_dialogue_rate",
    "ended_by_token",
    "turns",
    "tutor_turns",
    "visible_tokens_per_turn",
    "thinking_tokens_per_turn",
    "transfer_pre",
    "transfer_post",
    "same_pre",
    "same_post",
)


async def environment_suite(
    parts: Parts, arm: Arm, folder: Path, progress: Progress = lambda done, total: None
) -> SuiteResult:
    """Play S dialogues of each held-out pair and measure them. Journals lie in ``folder``/work."""
    recipe, spec, env = parts.recipe, parts.recipe.environment, parts.env
    students, judge = parts.students(), parts.gates()
    await parts.start()
    for student in students:
        start = getattr(student, "start", None)
        if start is not None:
            await start()
    pairs = await _pairs(parts, students, folder)
    settings = _settings(parts, arm, pairs)
    journal = Journal(folder / "work" / "environment.jsonl", digest(settings))
    tutor = arm.tutor(env.templates, env.env)
    weights = [s.weight for s in parts.experiment.students]

    async def play(key: str, item: tuple[ProblemPair, int]) -> dict[str, Any]:
        pair, index = item
        with costs() as spent:
            for attempt in range(1 + spec.retries):
                seed = derive(recipe.seed, "environment", pair.id, index, attempt)
                student = draw_student(students, weights, seed)
                episode = await env.play(
                    tutor,
                    student,
                    judge,
                    parts.grader,
                    pair,
                    seed=seed,
                    id=key,
                    group_id=pair.id,
                    phase="eval",
                    index=index,
                    extra_tests=("transfer", "source"),
                )
                if not lost(episode):
                    break
            else:
                raise SampleFailed(f"{episode.exclusion}: {episode.error}")
        if (episode.exclusion or "").startswith("error:"):
            raise SampleFailed(f"{episode.exclusion}: {episode.error}")
        return sample(episode, student, key) | {"costs": summed(spent)}

    items = [(f"{pair.id}/{i}", (pair, i)) for pair in pairs for i in range(spec.samples)]
    samples, failed = await run_all(items, play, journal, concurrency=recipe.concurrency, progress=progress)
    result = SuiteResult(
        "environment", arm.name, settings, samples=samples, failed=failed, notes=token_notes(arm)
    )
    trained, gates = parts.experiment.judge, recipe.gates or parts.experiment.judge
    if gates.kind == "llm" and (gates.kind, gates.model) == (trained.kind, trained.model):
        result.notes.append(
            "The gates are judged by the judge of training: set gates to another one for a result to stand on."
        )
    return summarise(result)


async def _pairs(parts: Parts, students: list[Student], folder: Path) -> list[ProblemPair]:
    spec, experiment = parts.recipe.environment, parts.experiment
    # Rates that are measured afresh need not be there.
    keys = [] if spec.remeasure else [s.key for s in students]
    _, held_out, _ = load_problems(experiment.problems, keys, offline=parts.recipe.offline)
    pairs = held_out[: spec.problems]
    if spec.remeasure:
        for student in students:
            result = await measure(
                pairs,
                student,
                parts.grader,
                spec.remeasure,
                derive(parts.recipe.seed, "pre-rates"),
                concurrency=parts.recipe.concurrency,
                journal=folder / "work" / "pre-rates.jsonl",
            )
            pairs = [p for p in result.pairs if p.id not in result.without_rate]
    return pairs


def _settings(parts: Parts, arm: Arm, pairs: list[ProblemPair]) -> dict[str, Any]:
    experiment = parts.experiment
    gates = parts.recipe.gates or experiment.judge
    return {
        "suite": parts.recipe.environment.model_dump(mode="json"),
        "seed": parts.recipe.seed,
        "arm": identity(arm.spec),
        "env": parts.env.env.model_dump(mode="json", exclude=ENV_TIMING),
        "prompts": digest(vars(parts.env.templates) | {"defaults": None}),
        "reward": experiment.reward.model_dump(mode="json"),
        "students": [s.model_dump(mode="json", exclude={"engine"}) for s in experiment.students],
        "gates": gates.model_dump(mode="json", exclude={"engine"}),
        "pairs": {"n": len(pairs), "digest": digest([p.model_dump(mode="json") for p in pairs])},
    }


def sample(episode: Episode, student: Student, key: str) -> dict[str, Any]:
    """The record of one dialogue: its transcript line (without times) and the numbers that measures are means of.

    Gains are there for every dialogue that was tested, whatever the gates said; ``…_passed`` only where no gate rejects and none
    is unknown. A number that does not exist is None.
    """
    line = episode_to_json(episode)
    line.pop("timing")
    tests: dict[str, PostTest] = dict(episode.extra_tests)
    if episode.post_test is not None:
        tests[episode.post_test.problem] = episode.post_test
    out: dict[str, Any] = {"key": key, "problem": episode.pair.id, "episode": line}
    out["extra_tests"] = {which: _flat(t) for which, t in episode.extra_tests.items()}
    decisions = {gate: v.decision for gate, v in episode.verdicts.items()}
    passed = bool(decisions) and all(d == "ok" for d in decisions.values())
    for which, name in (("transfer", "transfer"), ("source", "same")):
        problem = episode.pair.source if which == "source" else episode.pair.transfer
        test = tests.get(which)
        if test is None or problem is None or not test.graded:
            continue
        pre = problem.rate(student.key).rate
        gain = normalised_gain(pre, test.rate)
        out |= {f"{name}_pre": pre, f"{name}_post": test.rate, f"{name}_gain": gain}
        out[f"{name}_gain_passed"] = gain if passed or not decisions else None
    if "same_gain" in out and "transfer_gain" in out:
        out["transfer_gap"] = out["same_gain"] - out["transfer_gain"]
    out["reward"] = episode.reward.reward if episode.counted and episode.reward else None
    known = [d for d in decisions.values() if d != "unknown"]
    out["gated"] = float("reject" in known) if known else None
    out["leak_rate"] = _rejected(decisions, "leakage")
    out["correctness_reject_rate"] = _rejected(decisions, "correctness")
    out["unknown_rate"] = float("unknown" in decisions.values()) if decisions else None
    out["excluded"] = float(episode.exclusion is not None)
    return out | _turns(episode)


def _rejected(decisions: Mapping[str, str], gate: str) -> float | None:
    decision = decisions.get(gate)
    return None if decision in (None, "unknown") else float(decision == "reject")


def _turns(episode: Episode) -> dict[str, Any]:
    turns, dialogue = episode.dialogue.by("tutor"), episode.dialogue
    n = len(turns)
    return {
        "blank_turn_rate": sum(t.blank for t in turns) / n if n else None,
        "truncated_turn_rate": sum(t.truncated for t in turns) / n if n else None,
        "truncated_dialogue_rate": float(dialogue.end == "context_limit"),
        "ended_by_token": float(dialogue.end == "end_token"),
        "turns": float(len(dialogue.turns)),
        "tutor_turns": float(n),
        "visible_tokens_per_turn": sum(t.visible_tokens for t in turns) / n if n else None,
        "thinking_tokens_per_turn": sum(t.thinking_tokens for t in turns) / n if n else None,
    }


def summarise(result: SuiteResult) -> SuiteResult:
    """Means over dialogues, errors clustered by problem pair; what was excluded, and why, as counts."""
    for name in MEASURES:
        if any(s.get(name) is not None for s in result.samples):
            result.add_from(name)
    result.counts["dialogues"] = len(result.samples)
    for s in result.samples:
        reason = s["episode"]["exclusion"]
        if reason:
            result.counts[f"excluded:{reason}"] = result.counts.get(f"excluded:{reason}", 0) + 1
    result.notes.append(
        "Gains are over all tested dialogues, leaking ones included; *_passed over those that every gate passed. "
        "transfer_gap = same_gain − transfer_gain."
    )
    blank = result.metrics.get("blank_turn_rate")
    cut = result.metrics.get("truncated_dialogue_rate")
    for what, e in (("empty tutor turns", blank), ("truncated dialogues", cut)):
        if e is not None and e.value > 0.15:
            result.notes.append(
                f"{e.value:.0%} {what}: measures of this environment are unreliable for this arm."
            )
    return result.close()
