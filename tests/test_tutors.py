"""Tutors on language models: what they say, what they record, and when they stop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from maieutic.config import EnvSpec
from maieutic.dialogue import Dialogue, Message, Turn
from maieutic.engines.base import ChatModel, Completion, Sample, Sampling
from maieutic.engines.hf import HfEngine
from maieutic.engines.local_chat import LocalChat
from maieutic.env.base import Episode, RewardBreakdown, Tutor
from maieutic.env.prompts import load_env
from maieutic.errors import EngineError, TemplateError
from maieutic.problems.schema import Problem, ProblemPair
from maieutic.tiny import tiny_tokenizer
from maieutic.tokens import Renderer
from maieutic.tutors import ChatTutor, PolicyTutor

TEMPLATES = load_env("near_transfer")
END = "<end_of_conversation>"
PAIR = ProblemPair(id="p", source=Problem(text="What is {3} + 4?", answer="7"))


class ScriptedEngine:
    """Says given texts and remembers the prompts; a text that ends in ``…`` was cut by the cap."""

    policy_version = 0
    context_limit = 4096

    def __init__(self, renderer: Renderer, texts: Sequence[str]) -> None:
        self.renderer, self.texts, self.calls = renderer, list(texts), []
        self.sampled: list[Sample] = []

    async def generate(self, prompt: Sequence[int], sampling: Sampling, **options: Any) -> list[Sample]:
        self.calls.append((list(prompt), sampling, options))
        text = self.texts.pop(0)
        if text == "fail":
            raise EngineError("down")
        cut = text.endswith("…")
        ids = self.renderer.tokenizer.encode(text.removesuffix("…"), add_special_tokens=False)
        ids += [] if cut else [self.renderer.end_of_turn]
        out = Sample(
            ids, [-0.25 * (i + 1) for i in range(len(ids))], "length" if cut else "stop", len(self.calls)
        )
        self.sampled.append(out)
        return [out]

    async def new_step(self, policy_version: int) -> None:
        self.steps = [policy_version]

    async def close(self) -> None: ...


def classroom(texts: Sequence[str], template: str = "plain", history: str = "keep", **env: Any) -> Any:
    renderer = Renderer(tiny_tokenizer(template))  # type: ignore[arg-type]
    engine = ScriptedEngine(renderer, texts)
    spec = EnvSpec(**env)
    tutor = PolicyTutor(engine, renderer, TEMPLATES, spec, Sampling(1.15, 1.0, 3), thinking_history=history)  # type: ignore[arg-type]
    dialogue = Dialogue("d", PAIR.source.text, turns=[Turn("student", "Help me.", scripted=True)])
    return renderer, engine, tutor, dialogue


def play(tutor: Any, dialogue: Dialogue, replies: Sequence[str]) -> list[Turn | None]:
    async def main() -> list[Turn | None]:
        turns = [await tutor.reply(dialogue, seed=1)]
        for reply in replies:
            dialogue.add(turns[-1])
            dialogue.add(Turn("student", reply))
            turns.append(await tutor.reply(dialogue, seed=2))
        return turns

    return asyncio.run(main())


def episode(dialogue: Dialogue, **fields: Any) -> Episode:
    return Episode("e", "g", PAIR, "train", 0, 0, 0, "s", dialogue, **fields)


REWARD = RewardBreakdown(0.5, False, 0.0, 0.5, 0.5)


def test_turns_carry_what_the_environment_needs() -> None:
    _, engine, tutor, dialogue = classroom(
        ["plan</think>Count on.", "long plan…", f"</think>Bye. {END}", "a</think>cut…"], "thinking"
    )
    assert isinstance(tutor, Tutor)
    one, two, three, four = play(tutor, dialogue, ["7?", "8?", "9?"])
    assert (one.visible, one.thinking, one.truncated, one.well_formed, one.end_token) == (
        "Count on.", "plan", False, True, False,
    )  # fmt: skip
    assert (two.visible, two.thinking, two.truncated, two.well_formed) == ("", "long plan", True, False)
    assert two.blank and two.visible_tokens == 0 and two.thinking_tokens == len(engine.sampled[1].ids)
    assert (three.visible, three.end_token, three.well_formed) == ("Bye.", True, True)
    assert (four.visible, four.truncated, four.well_formed) == ("cut", True, True)
    assert (
        one.thinking_tokens + one.visible_tokens == len(engine.sampled[0].ids) - 1
    )  # the end of turn counts for neither


def test_sampling_cap_stops_seed_and_session() -> None:
    renderer, engine, tutor, dialogue = classroom(["a"], visible_budget=20, thinking_budget=5)
    play(tutor, dialogue, [])
    prompt, sampling, options = engine.calls[0]
    assert sampling == Sampling(1.15, 1.0, 25)
    assert options == {"seed": 1, "stop_ids": renderer.stop_ids, "session": "tutor:d"}
    text = renderer.tokenizer.decode(prompt)
    system = TEMPLATES.tutor_system(EnvSpec(), PAIR.source.text)
    assert (
        text
        == f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nHelp me.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tutor.prompt_ids(dialogue)[: len(prompt)] == prompt


def test_the_solution_reaches_the_prompt_only_where_the_dialogue_carries_it() -> None:
    renderer, engine, tutor, dialogue = classroom(["a", "b"])
    play(tutor, dialogue, [])
    other = Dialogue("e", dialogue.problem, solution="It is {7}.", turns=list(dialogue.turns))
    play(tutor, other, [])
    without, with_ = (renderer.tokenizer.decode(call[0]) for call in engine.calls)
    assert "It is {7}." in with_ and "It is {7}." not in without


@pytest.mark.parametrize("history", ["keep", "strip"])
def test_the_trajectory_is_what_was_sampled(history: str) -> None:
    renderer, engine, tutor, dialogue = classroom(
        ["p</think>One", "Two…", "q</think>Three"], "thinking", history
    )
    play(tutor, dialogue, ["r1", "r2 <|im_end|>"])
    trajectory = tutor.trajectory(episode(dialogue, reward=REWARD))
    trajectory.validate(sum(len(s.ids) for s in engine.sampled))
    assert (trajectory.reward, trajectory.temperature, trajectory.excluded) == (0.5, 1.15, False)
    if history == "keep":
        (segment,) = trajectory.segments
        calls = [call[0] for call in engine.calls]
        for call, sample in zip(calls, engine.sampled, strict=True):
            assert segment.ids[: len(call)] == call  # each prompt is a prefix: nothing was ever re-tokenised
            assert segment.ids[len(call) : len(call) + len(sample.ids)] == sample.ids
            assert segment.logprobs[len(call) : len(call) + len(sample.ids)] == sample.logprobs
        assert len(segment) == len(calls[-1]) + len(engine.sampled[-1].ids)
        assert segment.policy_version == 1  # the oldest of the versions 1, 2, 3
    else:
        assert len(trajectory.segments) == 3
        for segment, (prompt, _, _), sample in zip(
            trajectory.segments, engine.calls, engine.sampled, strict=True
        ):
            assert segment.ids == prompt + sample.ids
        assert [s.policy_version for s in trajectory.segments] == [1, 2, 3]
        assert "p</think>" not in renderer.tokenizer.decode(engine.calls[2][0])


def test_excluded_and_empty_episodes() -> None:
    _, _, tutor, dialogue = classroom(["a"])
    assert tutor.trajectory(episode(dialogue)) is None
    play(tutor, dialogue, [])
    lost = tutor.trajectory(episode(dialogue, exclusion="student_failed"))
    assert lost.excluded and math.isnan(lost.reward)
    lost.validate()


def test_limits_end_the_dialogue_and_leave_the_record_alone() -> None:
    long = "x" * 100
    _, engine, tutor, dialogue = classroom(
        ["a", "b"], visible_budget=20, thinking_budget=0, conversation_limit=100
    )
    first, second = play(tutor, dialogue, [long])
    assert first is not None and second is None
    assert len(engine.calls) == 1
    trajectory = tutor.trajectory(episode(dialogue, reward=REWARD))
    trajectory.validate(len(engine.sampled[0].ids))
    assert long[:5] not in tiny_tokenizer().decode(trajectory.segments[0].ids)

    _, engine, tutor, dialogue = classroom(["a"], prompt_limit=50)
    assert play(tutor, dialogue, []) == [None]
    _, engine, tutor, dialogue = classroom(["a"])
    engine.context_limit = len(tutor.prompt_ids(dialogue)) + EnvSpec().tutor_cap - 1
    assert play(tutor, dialogue, []) == [None]
    engine.context_limit += 1
    assert play(tutor, dialogue, [])[0].visible == "a"


def test_exactly_fitting_turns_are_allowed() -> None:
    _, _, tutor, dialogue = classroom(["a", "b"], visible_budget=20, thinking_budget=0)
    (first,) = play(tutor, dialogue, [])
    dialogue.add(first)
    dialogue.add(Turn("student", "yes"))
    need = len(dialogue.record.next_ids("yes")) - dialogue.record.prompt_tokens + 20
    for limit, fits in ((need - 1, False), (need, True)):
        tutor._env = EnvSpec(visible_budget=20, thinking_budget=0, conversation_limit=limit)
        assert (asyncio.run(tutor.reply(dialogue, seed=0)) is not None) == fits


def test_a_failed_call_can_be_repeated() -> None:
    _, engine, tutor, dialogue = classroom(["a", "fail", "b"])
    with pytest.raises(EngineError, match="down"):
        play(tutor, dialogue, ["r"])
    turn = asyncio.run(tutor.reply(dialogue, seed=5))
    assert turn.visible == "b" and engine.calls[1][0] == engine.calls[2][0]
    with pytest.raises(ValueError, match="not the tutor's turn"):
        dialogue.add(turn)
        asyncio.run(tutor.reply(dialogue, seed=5))


def test_a_dialogue_that_starts_in_the_middle() -> None:
    renderer, engine, tutor, dialogue = classroom(["c"])
    dialogue.add(Turn("tutor", "Earlier words."))
    dialogue.add(Turn("student", "And then?", note="Advice: ask."))
    play(tutor, dialogue, [])
    text = renderer.tokenizer.decode(engine.calls[0][0])
    assert "assistant\nEarlier words.<|im_end|>" in text and "And then?\n\nAdvice: ask." in text
    trajectory = tutor.trajectory(episode(dialogue, reward=REWARD))
    assert trajectory.n_trained == len(engine.sampled[0].ids)
    assert dialogue.record.prompt_tokens < len(engine.calls[0][0])


def test_notes_are_read_with_the_students_turn() -> None:
    renderer, engine, tutor, dialogue = classroom(["a", "b"])
    (first,) = play(tutor, dialogue, [])
    dialogue.add(first)
    dialogue.add(Turn("student", "Hm.", note="Advice: wait."))
    asyncio.run(tutor.reply(dialogue, seed=0))
    assert "user\nHm.\n\nAdvice: wait.<|im_end|>" in renderer.tokenizer.decode(engine.calls[1][0])


def test_an_end_token_that_is_a_special_token_is_seen() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [END]})
    renderer = Renderer(tokenizer)
    engine = ScriptedEngine(renderer, [f"Bye{END}"])
    tutor = PolicyTutor(engine, renderer, TEMPLATES, EnvSpec(), Sampling(1.0))
    dialogue = Dialogue("d", "p", turns=[Turn("student", "Hi")])
    (turn,) = play(tutor, dialogue, [])
    assert (turn.visible, turn.end_token) == ("Bye", True)


def test_templates_that_cannot_grow_are_refused_when_the_tutor_is_built() -> None:
    tokenizer = tiny_tokenizer()
    moving = tokenizer.chat_template.replace(
        "message.content +", "message.content + messages | length | string +"
    )
    renderer = Renderer(tokenizer, chat_template=moving)
    with pytest.raises(TemplateError, match="append-only"):
        PolicyTutor(ScriptedEngine(renderer, []), renderer, TEMPLATES, EnvSpec(), Sampling())


def test_prompted_tutors() -> None:
    class Chat:
        name = "chat"

        async def complete(
            self, messages: Sequence[Message], sampling: Sampling, **options: Any
        ) -> list[Completion]:
            self.seen = (list(messages), sampling, options)
            return [Completion(f"Well. {END}", "length", 9)]

        async def close(self) -> None: ...

    chat = Chat()
    tutor = ChatTutor(chat, TEMPLATES, EnvSpec(visible_budget=30, thinking_budget=2), Sampling(0.7, 0.9))
    assert isinstance(tutor, Tutor)
    dialogue = Dialogue("d", "p", turns=[Turn("student", "Hi")])
    turn = asyncio.run(tutor.reply(dialogue, seed=3))
    assert (turn.visible, turn.end_token, turn.truncated, turn.visible_tokens) == ("Well.", True, True, 9)
    messages, sampling, options = chat.seen
    assert [m.role for m in messages] == ["system", "user"] and sampling == Sampling(0.7, 0.9, 32)
    assert options == {"seed": 3, "session": "tutor:d"} and dialogue.record is None


def test_local_chat_cuts_thinking() -> None:
    renderer = Renderer(tiny_tokenizer("thinking"))
    engine = ScriptedEngine(renderer, ["secret</think>\n\nHello", "secret…"])
    chat = LocalChat(engine, renderer, "m")
    assert isinstance(chat, ChatModel) and chat.name == "m"
    for text, reason in (("Hello", "stop"), ("", "length")):
        (out,) = asyncio.run(chat.complete([Message("user", "hi")], Sampling(), seed=0))
        assert (out.text, out.finish_reason) == (text, reason)
        assert out.tokens == len(engine.sampled[-1].ids)
    assert engine.calls[0][0] == renderer.prompt([Message("user", "hi")])
    asyncio.run(chat.new_step(4))
    assert engine.steps == [4]


@pytest.mark.parametrize("template", ["plain", "thinking", "hybrid"])
def test_on_a_real_model_trained_log_probs_equal_sampled_ones(tmp_path: Path, template: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from maieutic.tiny import make_tiny_model

    model = AutoModelForCausalLM.from_pretrained(
        make_tiny_model(tmp_path / "m", template), dtype=torch.float32
    )  # type: ignore[arg-type]
    renderer = Renderer(tiny_tokenizer(template))  # type: ignore[arg-type]
    tutor_engine, student_engine = HfEngine(model, pad_id=0), HfEngine(model, pad_id=0)
    env = EnvSpec(visible_budget=12, thinking_budget=6, end_after=1)
    tutor = PolicyTutor(tutor_engine, renderer, TEMPLATES, env, Sampling(1.15))
    chat = LocalChat(student_engine, renderer, "tiny")
    dialogues = [Dialogue(f"d{i}", "x" * i, turns=[Turn("student", "Help" + "!" * 7 * i)]) for i in range(4)]

    async def talk(i: int, dialogue: Dialogue) -> None:
        for turn in range(3):
            said = await tutor.reply(dialogue, seed=10 * i + turn)
            assert said is not None
            dialogue.add(said)
            (heard,) = await chat.complete(
                [Message("user", said.visible or "?")], Sampling(0.6, 1.0, 5 + i), seed=i, session=dialogue.id
            )
            dialogue.add(Turn("student", heard.text))

    async def main() -> None:
        await asyncio.gather(*[talk(i, d) for i, d in enumerate(dialogues)])

    asyncio.run(main())
    for dialogue in dialogues:
        trajectory = tutor.trajectory(episode(dialogue, reward=REWARD))
        trajectory.validate(dialogue.record.n_sampled)
        (segment,) = trajectory.segments
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([segment.ids])).logits[0, :-1] / 1.15
        logp = torch.log_softmax(logits, -1).gather(1, torch.tensor(segment.ids)[1:, None])[:, 0]
        mask = torch.tensor(segment.mask)[1:]
        assert torch.allclose(logp[mask], torch.tensor(segment.logprobs)[1:][mask], atol=1e-4)
