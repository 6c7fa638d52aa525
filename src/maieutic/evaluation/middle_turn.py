"""The middle-turn suite: a human dialogue is cut at its middle teacher turn, the tutor speaks in the teacher's place.

Its turn is scored by the reward model against what the human said there (win rate), and by a judge from 1 to 5. The tutor
works under the environment's own prompt, the same for all arms; the problem is in the scripted opening, as in training.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from maieutic.dialogue import Turn
from maieutic.engines.base import Sampling
from maieutic.errors import EngineError, EngineMismatchError, RecipeError, RunStop
from maieutic.evaluation.cache import costs, summed
from maieutic.evaluation.conversations import Cut, load_dialogues, middle_cut
from maieutic.evaluation.journal import Journal, Progress, SampleFailed, run_all
from maieutic.evaluation.parts import Parts
from maieutic.evaluation.ped_rm import RewardModel, load_reward_model, reward_messages
from maieutic.evaluation.ratings import rate
from maieutic.evaluation.results import SuiteResult, digest
from maieutic.evaluation.statistics import win_rate
from maieutic.evaluation.tutor_arm import Arm, fingerprint, identity, token_notes
from maieutic.seeds import derive
from maieutic.transcripts import _flat


async def middle_turn_suite(
    parts: Parts,
    arm: Arm,
    folder: Path,
    progress: Progress = lambda done, total: None,
    load: Callable[..., RewardModel] = load_reward_model,
) -> SuiteResult:
    """Generate, then score. Generations and ratings are journalled; the reward model's scores follow from the turns."""
    recipe, spec, env = parts.recipe, parts.recipe.middle_turn, parts.env
    if not spec.sets:
        raise RecipeError("middle_turn.sets: name at least one set of human dialogues")
    if spec.reward and recipe.reward_model is None:
        raise RecipeError("middle_turn.reward is on: name the model as reward_model, or switch it off")
    cuts: list[Cut] = []
    for one in spec.sets:
        cuts += [c for d in load_dialogues(one, offline=recipe.offline) if (c := middle_cut(d)) is not None]
    judge = parts.judge() if spec.ratings else None
    await parts.start()
    reward = recipe.reward_model
    settings = {
        "suite": spec.model_dump(mode="json", exclude={"sets"}),
        "seed": recipe.seed,
        "arm": identity(arm.spec),
        "env": env.env.model_dump(mode="json"),
        "prompts": digest(vars(env.templates) | {"defaults": None}),
        "judge": recipe.judge.model_dump(mode="json", exclude={"engine"}) if recipe.judge and judge else None,
        "dialogues": {"n": len(cuts), "digest": digest([_flat(c) for c in cuts])},
        "reward_model": None
        if reward is None or not spec.reward
        else reward.model_dump(mode="json") | {"weights": fingerprint(reward.model)},
    }
    journal = Journal(folder / "work" / "middle_turn.jsonl", digest(settings))
    tutor = arm.tutor(env.templates, env.env)

    async def speak(key: str, item: tuple[Cut, int]) -> dict[str, Any]:
        cut, index = item
        seed = derive(recipe.seed, "middle_turn", cut.source, cut.id, index)
        dialogue = cut.dialogue(env.templates.opening(cut.problem))
        with costs() as spent:
            try:
                turn = await tutor.reply(dialogue, seed=seed)
            except (RunStop, EngineMismatchError):
                raise
            except EngineError as error:
                raise SampleFailed(f"tutor: {error}") from error
            out: dict[str, Any] = {
                "key": key,
                "problem": f"{cut.source}/{cut.group or cut.id}",
                "set": cut.source,
            }
            out |= {"human": cut.human, "turn": None if turn is None else _flat(turn)}
            out |= _measured(turn)
            if judge is not None and recipe.judge is not None and turn is not None:
                s = recipe.judge.sampling
                rating = await rate(
                    judge,
                    cut.problem,
                    [*dialogue.turns, turn],
                    Sampling(s.temperature, s.top_p, s.max_tokens),
                    seed=derive(seed, "rate"),
                    reasks=recipe.judge.reasks,
                )
                out["pedagogy"] = None if rating is None else rating.pedagogy
                out["factual"] = None if rating is None else rating.factual
        return out | {"costs": summed(spent)}

    items = [(f"{c.source}/{c.id}/{i}", (c, i)) for c in cuts for i in range(spec.samples)]
    samples, failed = await run_all(items, speak, journal, concurrency=recipe.concurrency, progress=progress)
    result = SuiteResult(
        "middle_turn", arm.name, settings, samples=samples, failed=failed, notes=token_notes(arm)
    )
    if spec.reward:
        assert reward is not None
        by_key = dict(items)
        score(result, {k: c for k, (c, _) in by_key.items()}, load(reward, offline=recipe.offline))
    return summarise(result)


def _measured(turn: Turn | None) -> dict[str, Any]:
    if turn is None:
        return {"out_of_context": 1.0}
    return {
        "out_of_context": 0.0,
        "blank_turn_rate": float(turn.blank),
        "truncated_turn_rate": float(turn.truncated),
        "visible_tokens_per_turn": float(turn.visible_tokens),
        "thinking_tokens_per_turn": float(turn.thinking_tokens),
    }


def score(result: SuiteResult, cuts: dict[str, Cut], model: RewardModel) -> None:
    """Reward of the generated and of the human turn of every sample (equal conversations are scored once), and who won.

    A turn that could not be made (out of context) has no score; a blank one is scored as it is: an empty reply.
    """
    texts: dict[tuple[str, str], list[Any]] = {}
    for s in result.samples:
        cut = cuts[s["key"]]
        for reply in [cut.human, *([s["turn"]["visible"]] if s["turn"] else [])]:
            texts.setdefault(
                (cut.id, reply),
                reward_messages(
                    cut.problem,
                    cut.solution,
                    cut.before,
                    reply,
                    system=model.system,
                    show_solution=model.show_solution,
                ),
            )
    scores = dict(zip(texts, model.score(list(texts.values())), strict=True))
    for s in result.samples:
        s["human_reward"] = scores[cuts[s["key"]].id, s["human"]]
        if s["turn"]:
            s["reward"] = scores[cuts[s["key"]].id, s["turn"]["visible"]]
            s["win"] = float(s["reward"] > s["human_reward"])


def summarise(result: SuiteResult) -> SuiteResult:
    """Means by set and in all; win rate micro (all turns) and macro (mean of the sets)."""
    names = ["reward", "human_reward", "win", "pedagogy", "factual", "blank_turn_rate", "truncated_turn_rate"]
    names += ["out_of_context", "visible_tokens_per_turn", "thinking_tokens_per_turn"]
    sets = list(dict.fromkeys(s["set"] for s in result.samples))
    for name in names:
        if any(s.get(name) is not None for s in result.samples):
            result.add_from(name)
            for one in sets if len(sets) > 1 else []:
                held = [s for s in result.samples if s["set"] == one and s.get(name) is not None]
                result.add(f"{one}:{name}", [float(s[name]) for s in held], [s["problem"] for s in held])
    compared = [s for s in result.samples if s.get("win") is not None]
    if compared:
        won = win_rate(*([s[k] for s in compared] for k in ("reward", "human_reward", "set")))
        result.tables["win rate against the human turn"] = {
            "micro": won.micro,
            "macro": won.macro,
            "ties": won.ties,
            "n": won.n,
            **won.groups,
        }
    result.counts["turns"] = len(result.samples)
    if any("pedagogy" in s for s in result.samples):
        result.counts["rating unknown"] = sum(
            "pedagogy" in s and s["pedagogy"] is None for s in result.samples
        )
    return result.close()
