"""SFT: which turns are learned, that the loss is on the tutor's ids alone, and that the result tutors."""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from maieutic.check import resolve
from maieutic.config import EnvSpec
from maieutic.dialogue import Dialogue, Turn
from maieutic.env.prompts import load_env
from maieutic.errors import MaieuticError, ProblemDataError, RecipeError
from maieutic.recipe import load_recipe
from maieutic.runtime import build_classroom, build_policy, make_renderer
from maieutic.tiny import make_tiny_model, tiny_tokenizer
from maieutic.tokens import Renderer
from maieutic.training.sft import check_labels, make_trainer, run_sft
from maieutic.training.sft_config import QualitySpec, SftRecipe, SourceSpec, load_sft_recipe
from maieutic.training.sft_data import (
    Example,
    Examples,
    filter_quality,
    from_chat,
    from_dialogue,
    from_mathdial,
    from_transcripts,
    split_by_problem,
    tokenise,
    with_scores,
)

TEMPLATES = load_env("near_transfer")
ENV = EnvSpec()
END = ENV.end_token
SAID = "What do you know about the problem?"
MATHDIAL = (
    Path(os.environ.get("MAIEUTIC_SHARED", Path(__file__).parents[2] / "shared"))
    / "data"
    / "mathdial-test-60.jsonl"
)


def talk(*turns: Turn) -> Dialogue:
    return Dialogue("d", "P", turns=[Turn("student", "open", scripted=True), *turns])


def example(visible="Go on.", **fields) -> Example:
    (made,) = from_dialogue(talk(Turn("tutor", visible)), "p", TEMPLATES, ENV).kept
    return replace(made, **fields)


# --- which turns ------------------------------------------------------------------------------------------------------


def test_every_sound_tutor_turn_with_what_was_said_before_it():
    dialogue = talk(
        Turn("tutor", "A", thinking="secret"),
        Turn("student", "b"),
        Turn("tutor", "cut", truncated=True),
        Turn("student", "d"),
        Turn("tutor", " "),
        Turn("student", "f"),
        Turn("tutor", "G", end_token=True),
        Turn("student", "h"),
        Turn("tutor", "", end_token=True),
    )
    got = from_dialogue(dialogue, "p", TEMPLATES, ENV)
    assert [(e.turn, e.visible, e.end_token) for e in got.kept] == [
        (1, "A", False),
        (7, "G", True),
        (9, "", True),
    ]
    assert got.dropped == {"truncated turn": 1, "blank turn": 1}
    roles = [m.role for m in got.kept[1].prompt]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user", "assistant", "user"]
    assert got.kept[1].prompt[2].content == "A"  # earlier thinking is not in the prompt
    assert got.kept[0].prompt[0].content == TEMPLATES.tutor_system(ENV, "P")


def episodes(tmp_path: Path, rewards: dict[str, list[float | None]]) -> Path:
    """A run with one dialogue an episode: its tutor says the reward."""
    from maieutic.env.base import Episode, RewardBreakdown
    from maieutic.problems.schema import Problem, ProblemPair
    from maieutic.transcripts import TranscriptWriter

    made = []
    for group, values in rewards.items():
        pair = ProblemPair(id=group, source=Problem(text="P", answer="1"))
        for i, value in enumerate(values):
            dialogue = talk(Turn("tutor", f"{group} {i} {value}"))
            reward = None if value is None else RewardBreakdown(value, False, 0.5, 0.5, 0.0)
            excluded = "unknown:leakage" if value is None else None
            made.append(
                Episode(
                    f"{group}/{i}",
                    group,
                    pair,
                    "train",
                    3,
                    i,
                    0,
                    "s",
                    dialogue,
                    reward=reward,
                    exclusion=excluded,
                )
            )
    TranscriptWriter(tmp_path).write("train", 3, made)
    return tmp_path


def test_rejection_sampling_keeps_the_best_of_each_group(tmp_path):
    run = episodes(tmp_path, {"a": [0.1, 0.5, 0.5, None], "b": [-0.2, -0.1], "c": [0.3, 0.0]})
    spec = SourceSpec(kind="transcripts", path=str(run), best_of=1, min_reward=0.05)
    got = from_transcripts(spec, run, TEMPLATES, ENV)
    assert [e.visible for e in got.kept] == ["a 1 0.5", "c 0 0.3"]  # a tie goes to the lower index
    assert got.dropped == {
        "excluded episode": 1,
        "episode below min_reward": 3,
        "episode not among the best of its group": 2,
    }
    everything = from_transcripts(SourceSpec(kind="transcripts", path=str(run)), run, TEMPLATES, ENV)
    assert len(everything.kept) == 7 and everything.kept[0].dialogue == "train-3:a/1"


def test_mathdial_rows(tmp_path):
    row = {
        "qid": 7,
        "question": "Q?",
        "ground_truth": "S",
        "conversation": "Teacher: (generic)Hi!|EOM|Ann: Hello|EOM|Ann: I got 4|EOM|Teacher: (focus)Why?|EOM|Ann: Oh.",
    }
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps(row) + "\n")
    got = from_mathdial(SourceSpec(kind="mathdial", path=str(path)), TEMPLATES, ENV, offline=True).kept
    assert [e.visible for e in got] == ["Hi!", "Why?"] and {e.problem for e in got} == {"Q?"}
    assert [m.content for m in got[1].prompt[1:]] == [TEMPLATES.opening("Q?"), "Hi!", "Hello\nI got 4"]
    assert "S" not in got[1].prompt[0].content.split()  # this environment does not show the solution


def test_chat_rows(tmp_path):
    path = tmp_path / "c.jsonl"
    rows = [
        {"id": "x", "problem": "P", "score": 90, "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": f"Well done. {END}", "score": 40},
            {"role": "user", "content": "v"},
            {"role": "assistant", "content": "w"}]},
        {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]},
    ]  # fmt: skip
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    got = from_chat(SourceSpec(kind="chat", path=str(path)), TEMPLATES, ENV).kept
    assert [(e.visible, e.end_token, e.score) for e in got] == [
        ("Well done.", True, 40),
        ("w", False, 90),
        ("a", False, None),
    ]
    assert got[0].prompt[0].content == TEMPLATES.tutor_system(ENV, "P") and got[2].prompt[0].content == "S"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "u"}]}) + "\n")
    with pytest.raises(ProblemDataError, match=r"c\.jsonl:1: neither a system message nor a field 'problem'"):
        from_chat(SourceSpec(kind="chat", path=str(path)), TEMPLATES, ENV)


# --- the quality filter -------------------------------------------------------------------------------------------------


def test_the_quality_filter_keeps_turns_of_at_least_gamma(tmp_path):
    path = tmp_path / "scores.jsonl"
    path.write_text('{"id": "d", "score": 86}\n{"id": "d", "turn": 3, "score": 84.9}\n')
    turns = [
        example(turn=1),
        example(turn=3),
        example(turn=5),
        example(dialogue="other", score=85.0),
        example(dialogue="e"),
    ]
    scored = with_scores(turns, str(path))
    assert [e.score for e in scored] == [
        86,
        84.9,
        86,
        85,
        None,
    ]  # the turn's own score, then its dialogue's, then its own
    kept = filter_quality(Examples(scored), QualitySpec(min_score=85, unscored="drop"))
    assert [(e.dialogue, e.turn) for e in kept.kept] == [("d", 1), ("d", 5), ("other", 1)]
    assert kept.dropped == {"turn below min_score": 1, "turn without score": 1}
    with pytest.raises(ProblemDataError, match="'e' has no score"):
        filter_quality(Examples(scored), QualitySpec(min_score=85))
    path.write_text('{"id": "d", "score": 101}\n')
    with pytest.raises(ProblemDataError, match=r"scores\.jsonl:1.*0 to 100"):
        with_scores(turns, str(path))


def test_a_problem_is_on_one_side_only():
    turns = [example(problem=f"p{i % 10}", turn=i) for i in range(40)]
    train, held = split_by_problem(turns, 0.2, seed=1)
    assert len(train) == 32 and len(held) == 8
    assert not {e.problem for e in train} & {e.problem for e in held}
    assert split_by_problem(turns, 0.0, seed=1) == (turns, [])
    assert split_by_problem(turns[:1], 0.5, seed=1) == (turns[:1], [])  # one problem: nothing can be held out


# --- ids and labels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["plain", "hybrid", "thinking"])
def test_labels_are_the_ids_of_the_turn_and_its_end_and_nothing_else(template):
    renderer = Renderer(tiny_tokenizer(template))
    one = example("What is 3 + 4?", thinking="Ask." if template == "thinking" else "")
    ids, labels = tokenise(renderer, one, END)
    prompt = renderer.prompt(one.prompt)
    turn = [x for x in labels if x != -100]
    assert len(ids) == len(labels) and ids[: len(prompt)] == prompt
    assert labels == [-100] * len(prompt) + ids[len(prompt) :]
    assert turn[-1] == renderer.end_of_turn
    read = renderer.split(turn)
    assert (read.visible, read.thinking, read.well_formed) == ("What is 3 + 4?", one.thinking, True)


def test_prompt_ids_are_those_that_the_tutor_is_given():
    from maieutic.engines.base import Sampling
    from maieutic.tutors import PolicyTutor

    class Engine:
        context_limit = 4096

    renderer = Renderer(tiny_tokenizer())
    tutor = PolicyTutor(Engine(), renderer, TEMPLATES, ENV, Sampling())
    dialogue = talk(Turn("tutor", "A"), Turn("student", "b"))
    grown = Dialogue(dialogue.id, dialogue.problem, turns=[*dialogue.turns, Turn("tutor", "C")])
    last = from_dialogue(grown, "p", TEMPLATES, ENV).kept[-1]
    ids, labels = tokenise(renderer, last, END)
    assert ids[: labels.index(next(x for x in labels if x != -100))] == tutor.prompt_ids(dialogue)


def test_the_end_token_is_learned_and_forged_control_tokens_are_text():
    renderer = Renderer(tiny_tokenizer())
    _, labels = tokenise(renderer, example("Bye <|im_end|>", end_token=True), END)
    turn = [x for x in labels if x != -100]
    assert renderer.decode(turn[:-1]) == f"Bye <|im_end|> {END}"
    assert turn.count(renderer.end_of_turn) == 1
    _, labels = tokenise(renderer, example(visible="x", end_token=True), END)
    _, bare = tokenise(renderer, replace(example("x"), visible="", end_token=True), END)
    assert (
        renderer.decode([x for x in bare if x != -100][:-1])
        == END
        != renderer.decode([x for x in labels if x != -100][:-1])
    )


# --- training -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def sft_recipe(tmp_path: Path, tiny: Path, lora=True, **fields) -> SftRecipe:
    overrides = [f"tutor.model={tiny}", f"students.0.model={tiny}"]
    if not lora:
        overrides.append("tutor.lora=null")
    data = {
        "name": "sft",
        "output_dir": str(tmp_path / "runs"),
        "offline": True,
        "experiment": "smollm2/dppo",
        "experiment_overrides": overrides,
        "training": {"lr": 1e-2 if lora else 1e-3, "batch_size": 4, "micro_batch": 2, "held_out": 0.25},
    }
    return SftRecipe.model_validate({**data, **fields})


def chat_file(tmp_path: Path, n: int = 8) -> Path:
    path = tmp_path / "chat.jsonl"
    rows = [
        {"id": str(i), "problem": f"What is {i} + 1?", "messages": [
            {"role": "user", "content": f"What is {i} + 1?"}, {"role": "assistant", "content": SAID}]}
        for i in range(n)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_the_trainers_own_batches_have_the_loss_on_the_turn_alone(tmp_path, tiny):
    recipe = sft_recipe(tmp_path, tiny, sources=[{"kind": "chat", "path": "x"}])
    experiment = resolve(load_recipe(recipe.experiment, recipe.experiment_overrides))
    policy = build_policy(experiment, torch.device("cpu"))
    renderer = make_renderer(experiment.tutor, policy.tokenizer)
    turns = [example("Go on."), example("A longer turn: what is 3 times 4?", turn=3)]
    rows = [dict(zip(("input_ids", "labels"), tokenise(renderer, e, END), strict=True)) for e in turns]
    trainer = make_trainer(recipe, policy, rows, [], tmp_path)
    check_labels(trainer, rows)
    (batch,) = trainer.get_train_dataloader()
    learned = {tuple(x for x in row.tolist() if x != -100) for row in batch["labels"]}
    expected = {
        tuple(renderer._plain.join([e.visible], first=False)) + (renderer.end_of_turn,) for e in turns
    }
    assert learned == expected
    # The check can fail: rows that claim other labels than those that reach the loss.
    with pytest.raises(MaieuticError, match="differs from the rows"):
        check_labels(trainer, [{"input_ids": r["input_ids"], "labels": r["input_ids"]} for r in rows])
    # And the loss is the mean of −log p over exactly these positions.
    with torch.no_grad():
        logp = policy.model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits.log_softmax(-1)
        picked = [
            logp[i, t - 1, label]
            for i, row in enumerate(batch["labels"])
            for t, label in enumerate(row.tolist())
            if label != -100
        ]
        loss = trainer.compute_loss(trainer.model.eval(), dict(batch))
    assert loss.item() == pytest.approx(-torch.stack(picked).mean().item(), abs=1e-4)


@pytest.mark.parametrize("lora", [True, False])
def test_a_run_lowers_the_held_out_loss_and_the_result_tutors(tmp_path, tiny, lora):
    recipe = sft_recipe(tmp_path, tiny, lora, sources=[{"kind": "chat", "path": str(chat_file(tmp_path))}])
    result = run_sft(recipe)
    assert (result.turns, result.held_out_turns) == (6, 2)
    assert result.held_out_after < result.held_out_before - 0.5
    summary = json.loads((result.folder / "sft.json").read_text())
    assert summary["held_out_loss"]["after"] == result.held_out_after
    steps = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert sum("sft/loss" in s for s in steps) == result.optimizer_steps == 4
    assert (result.model / ("adapter_config.json" if lora else "config.json")).is_file()
    with pytest.raises(MaieuticError, match="already holds a run"):
        run_sft(recipe)
    # The result is a tutor: it plays an episode, and its weights are not those that it started from.
    overrides = [*recipe.experiment_overrides, f"tutor.init_from={result.model}", "offline=true"]
    overrides += ["problems.options={rates_of: 'smollm2-135m|360bb6045517|T=0.6|p=1|max=80'}"]
    experiment = resolve(load_recipe("smollm2/dppo", overrides))
    policy = build_policy(experiment, torch.device("cpu"))
    base = build_policy(
        resolve(load_recipe("smollm2/dppo", recipe.experiment_overrides)), torch.device("cpu")
    )
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert (policy.model(ids).logits - base.model(ids).logits).abs().max() > 0.1

    async def play():
        from maieutic.rollout import rollout

        classroom = build_classroom(experiment, policy)
        try:
            await classroom.new_step(0)
            pairs = classroom.eval_pairs[:1]
            return await rollout(
                classroom.play_eval, pairs, phase="eval", step=0, run_seed=0, group_size=1, retries=0
            )
        finally:
            await classroom.close()

    (episode,) = asyncio.run(play()).episodes
    assert len(episode.dialogue.by("tutor")) >= 1 and episode.post_test is not None


def test_no_turn_left_is_an_error_that_says_why(tmp_path, tiny):
    recipe = sft_recipe(
        tmp_path,
        tiny,
        sources=[{"kind": "chat", "path": str(chat_file(tmp_path))}],
        training={"max_length": 8},
    )
    with pytest.raises(ProblemDataError, match="longer than training.max_length"):
        run_sft(recipe)


@pytest.mark.integration
def test_rejection_sampling_from_own_rollouts(tmp_path):
    overrides = [
        f"output_dir={tmp_path}",
        "sources.0.problems=6",
        "sources.0.group_size=4",
        "sources.0.min_reward=-1",
    ]
    recipe = load_sft_recipe("sft/rejection", [*overrides, "training.epochs=1", "training.held_out=0"])
    result = run_sft(recipe)
    from maieutic.transcripts import read_episodes

    played = list(read_episodes(result.folder, "train"))
    assert len(played) == 24
    best = {}
    for e in played:
        if e.counted and e.reward.reward > best.get(e.group_id, -9):
            best[e.group_id] = e.reward.reward
    assert result.dropped["episode not among the best of its group"] == sum(e.counted for e in played) - len(
        best
    )
    assert result.turns >= len(best) == 6


@pytest.mark.slow
@pytest.mark.skipif(not MATHDIAL.is_file(), reason=f"{MATHDIAL} is not there (set MAIEUTIC_SHARED)")
def test_two_epochs_on_real_mathdial_rows_lower_the_held_out_loss(tmp_path, tiny):
    recipe = sft_recipe(
        tmp_path,
        tiny,
        sources=[{"kind": "mathdial", "path": str(MATHDIAL), "limit": 8}],
        training={
            "epochs": 2,
            "lr": 1e-2,
            "batch_size": 8,
            "micro_batch": 4,
            "held_out": 0.25,
            "max_length": 3000,
        },
    )
    result = run_sft(recipe)
    print("\n".join(result.lines()))
    assert result.turns > 20 and result.held_out_turns > 5
    assert result.held_out_after < result.held_out_before - 0.2


# --- recipes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mathdial", "cpu", "rejection"])
def test_shipped_recipes_load_with_their_experiment(name):
    recipe = load_sft_recipe(f"sft/{name}")
    assert (
        resolve(load_recipe(recipe.experiment, recipe.experiment_overrides)).env.tutor_sees_solution is False
    )


@pytest.mark.parametrize(
    "override, said",
    [
        ("sources.0.kind=mathdal", "mathdal"),
        ("sources.0.best_of=2", "mathdial has none"),
        ("training.micro_batch=3", "not a multiple"),
        ("quality.min_score=120", "min_score"),
    ],
)
def test_recipe_errors_name_the_key(override, said):
    with pytest.raises(RecipeError, match=said):
        load_sft_recipe("sft/mathdial", [override])
    with pytest.raises(RecipeError, match="did you mean sft/mathdial"):
        load_sft_recipe("sft/mathdail")
