"""Tutor turns to learn from: sources, REAT's quality filter, and their token ids with a loss mask on the turn alone.

An :class:`Example` is one tutor turn with everything that was said before it. REAT's rule: predict the turn from the problem, the
history and the student's utterance. Turns that were cut off or are blank are never learned from
(a bare end token is a turn: it ends the conversation); what is left out is counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from maieutic.config import EnvSpec
from maieutic.dialogue import Dialogue, Message, Turn, tutor_view
from maieutic.env.prompts import EnvTemplates
from maieutic.errors import ProblemDataError
from maieutic.seeds import BITS, derive
from maieutic.tokens import Renderer
from maieutic.training.sft_config import QualitySpec, SourceSpec

IGNORED = -100
"""Label of a token that is not learned."""


@dataclass(frozen=True, slots=True)
class Example:
    """One tutor turn. ``problem`` groups the turns that must stay on one side of the held-out split."""

    dialogue: str
    turn: int
    """Index into the dialogue's turns (or messages)."""
    problem: str
    prompt: tuple[Message, ...]
    visible: str
    thinking: str = ""
    end_token: bool = False
    """The turn ends the conversation: the environment's end token follows it."""
    score: float | None = None


@dataclass(slots=True)
class Examples:
    """What a source gave, and how many turns or dialogues were left out by reason."""

    kept: list[Example] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)

    def add(self, other: Examples) -> None:
        self.kept += other.kept
        self.dropped.update(other.dropped)


# ---- sources ---------------------------------------------------------------------------------------------------------


def from_dialogue(
    dialogue: Dialogue, problem: str, templates: EnvTemplates, env: EnvSpec, *, scripted: bool = False
) -> Examples:
    """Every tutor turn of a dialogue under the environment's own tutor prompt. ``scripted``: learn scripted turns too."""
    out = Examples()
    system = templates.tutor_system(env, dialogue.problem, dialogue.solution)
    for n, turn in dialogue.numbered():
        if turn.speaker != "tutor":
            continue
        reason = None
        if turn.truncated:
            reason = "truncated turn"
        elif turn.blank and not turn.end_token:
            reason = "blank turn"
        elif turn.scripted and not scripted:
            reason = "scripted turn"
        if reason:
            out.dropped[reason] += 1
            continue
        before = replace_turns(dialogue, dialogue.turns[:n])
        out.kept.append(
            Example(
                dialogue.id,
                n,
                problem,
                tuple(tutor_view(before, system)),
                turn.visible,
                turn.thinking,
                turn.end_token,
            )
        )
    return out


def replace_turns(dialogue: Dialogue, turns: Sequence[Turn]) -> Dialogue:
    """The dialogue with other turns, still open."""
    return Dialogue(dialogue.id, dialogue.problem, dialogue.solution, list(turns))


def from_transcripts(spec: SourceSpec, run: Path, templates: EnvTemplates, env: EnvSpec) -> Examples:
    """Tutor turns of the episodes of a run. Episodes that do not count are left out; ``best_of`` keeps the best of each group by
    reward (ties: the lower index), ``min_reward`` those that earned enough."""
    from maieutic.transcripts import read_episodes

    out = Examples()
    groups = defaultdict(list)
    for number, episode in enumerate(read_episodes(run, None if spec.phase == "all" else spec.phase)):
        if spec.limit is not None and number >= spec.limit:
            break
        if not episode.counted or episode.reward is None:
            out.dropped["excluded episode"] += 1
        elif spec.min_reward is not None and episode.reward.reward < spec.min_reward:
            out.dropped["episode below min_reward"] += 1
        else:
            groups[(episode.phase, episode.step, episode.group_id)].append(episode)
    for group in groups.values():
        ranked = sorted(group, key=lambda e: (-(e.reward.reward if e.reward else 0.0), e.index))
        best = ranked[: spec.best_of]
        if len(ranked) > len(best):
            out.dropped["episode not among the best of its group"] += len(ranked) - len(best)
        for episode in best:
            dialogue = Dialogue(
                f"{episode.phase}-{episode.step}:{episode.id}",
                episode.dialogue.problem,
                episode.dialogue.solution if env.tutor_sees_solution else None,
                episode.dialogue.turns,
            )
            out.add(from_dialogue(dialogue, episode.pair.id, templates, env))
    return out


def from_mathdial(spec: SourceSpec, templates: EnvTemplates, env: EnvSpec, *, offline: bool) -> Examples:
    """Teacher turns of MathDial rows, behind the environment's scripted opening that states the problem."""
    from maieutic.evaluation.conversations import merged, parse_mathdial, rows_of

    assert spec.path is not None
    out = Examples()
    for number, (where, row) in enumerate(rows_of(spec.path, split=spec.split, offline=offline)):
        if spec.limit is not None and number >= spec.limit:
            break
        human = parse_mathdial(where, row)
        said = merged(human.turns)
        opening = templates.opening(human.problem)
        if said and said[0].speaker == "student":
            opening = f"{opening}\n\n{said.pop(0).text}"
        solution = human.solution or None
        dialogue = Dialogue(human.id, human.problem, solution if env.tutor_sees_solution else None)
        dialogue.add(Turn("student", opening, scripted=True))
        for s in said:
            dialogue.add(Turn(s.speaker, s.text))
        out.add(from_dialogue(dialogue, human.problem, templates, env))
    return out


def from_chat(spec: SourceSpec, templates: EnvTemplates, env: EnvSpec) -> Examples:
    """Assistant messages of chat rows: ``messages`` (role, content, perhaps ``score``), perhaps ``id``, ``problem``, ``score``.

    A row with a system message is learned under it; one without needs ``problem`` for the environment's tutor prompt.
    Raises :class:`ProblemDataError` naming file, line and field.
    """
    assert spec.path is not None
    out = Examples()
    for number, (where, row) in enumerate(_jsonl(spec.path)):
        if spec.limit is not None and number >= spec.limit:
            break
        messages = row.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ProblemDataError(f"{where}: field 'messages': a list of messages is expected")
        history: list[Message] = []
        problem = row.get("problem")
        for n, message in enumerate(messages):
            role, content = _message(message, f"{where}, message {n}")
            if not history and role != "system":
                if not isinstance(problem, str):
                    raise ProblemDataError(
                        f"{where}: neither a system message nor a field 'problem': the tutor's prompt is not known"
                    )
                history.append(Message("system", templates.tutor_system(env, problem)))
            if role == "assistant" and not content.strip():
                out.dropped["blank turn"] += 1
            elif role == "assistant":
                text, ended = _without(content, env.end_token)
                score = message.get("score", row.get("score"))
                name = str(row.get("id", where))
                out.kept.append(
                    Example(
                        name, n, str(problem or name), tuple(history), text, "", ended, _score(score, where)
                    )
                )
            history.append(Message(role, content))
    return out


def _message(message: Any, where: str) -> tuple[Any, str]:
    if not isinstance(message, dict) or message.get("role") not in ("system", "user", "assistant"):
        raise ProblemDataError(f"{where}: a message has a role (system, user or assistant) and a content")
    if not isinstance(message.get("content"), str):
        raise ProblemDataError(
            f"{where}: field 'content': text is expected, not {message.get('content')!r:.60}"
        )
    return message["role"], message["content"]


def _without(text: str, end_token: str) -> tuple[str, bool]:
    found = bool(end_token) and end_token in text
    return text.replace(end_token, " ").strip() if found else text.strip(), found


def _jsonl(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    from maieutic.problems.loaders import _jsonl_rows

    return _jsonl_rows(Path(path))


# ---- quality ---------------------------------------------------------------------------------------------------------


def _score(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 100:
        raise ProblemDataError(f"{where}: field 'score': a number from 0 to 100 is expected, not {value!r}")
    return float(value)


def with_scores(examples: Iterable[Example], path: str) -> list[Example]:
    """Scores of a JSONL put in: of the turn where there is one, else of its dialogue; other examples keep what they have."""
    scores: dict[tuple[str, int | None], float] = {}
    for where, row in _jsonl(path):
        score = _score(row.get("score"), where)
        turn = row.get("turn")
        if "id" not in row or score is None or not (turn is None or isinstance(turn, int)):
            raise ProblemDataError(f"{where}: a line has id, score and perhaps turn (a number)")
        scores[str(row["id"]), turn] = score
    return [
        replace(e, score=scores.get((e.dialogue, e.turn), scores.get((e.dialogue, None), e.score)))
        for e in examples
    ]


def filter_quality(examples: Examples, spec: QualitySpec) -> Examples:
    """Keep turns with score ≥ γ. Raises :class:`ProblemDataError` for a turn without score where that is an error."""
    if spec.min_score is None:
        return examples
    out = Examples(dropped=Counter(examples.dropped))
    for e in examples.kept:
        if e.score is None and spec.unscored == "error":
            raise ProblemDataError(
                f"quality.min_score is {spec.min_score:g}, but turn {e.turn} of dialogue {e.dialogue!r} has no score: give the "
                "source a file of scores, or set quality.unscored to drop or keep"
            )
        if e.score is None and spec.unscored == "drop":
            out.dropped["turn without score"] += 1
        elif e.score is not None and e.score < spec.min_score:
            out.dropped["turn below min_score"] += 1
        else:
            out.kept.append(e)
    return out


def split_by_problem(
    examples: Sequence[Example], share: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """(train, held out): whole problems, chosen by a hash of (seed, problem); about ``share`` of them, at least one if on."""
    problems = sorted({e.problem for e in examples}, key=lambda p: derive(seed, "sft held out", p) / 2**BITS)
    n = min(max(1, round(share * len(problems))), len(problems) - 1) if share > 0 else 0
    out = set(problems[:n])
    return [e for e in examples if e.problem not in out], [e for e in examples if e.problem in out]


# ---- tokens ----------------------------------------------------------------------------------------------------------


def tokenise(renderer: Renderer, example: Example, end_token: str) -> tuple[list[int], list[int]]:
    """(input ids, labels): the prompt as the tutor is given it in the environment, the turn as it would sample it, and the end
    of turn. Labels are the ids of turn and end of turn; every other position is :data:`IGNORED`."""
    prompt = renderer.prompt(example.prompt)
    plain = renderer._plain  # the one encoder that keeps control-token strings of content plain text
    opening, closing = ([*plain.parse(tag)] for tag in (renderer.open_tag, renderer.close_tag))
    parts: list[int | str] = []
    if renderer.mode == "open":
        parts += [example.thinking, "\n", *closing, "\n\n"]
    elif example.thinking and renderer.mode == "none":
        parts += [*opening, "\n", example.thinking, "\n", *closing, "\n\n"]
    parts.append(example.visible)
    if example.end_token:
        parts += [" " if example.visible.strip() else "", *plain.parse(end_token)]
    turn = plain.join([p for p in parts if p != ""], first=False, after=prompt[-1])
    end = renderer.end_of_turn if renderer.end_of_turn is not None else renderer.tokenizer.eos_token_id
    completion = [*turn, end]
    return prompt + completion, [IGNORED] * len(prompt) + completion
