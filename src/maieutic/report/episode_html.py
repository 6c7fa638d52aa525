"""One episode as HTML for the report: problem, dialogue with the judge's quotes marked, verdicts, post-test, reward."""

from __future__ import annotations

from typing import Any

from maieutic.report.measures import written
from maieutic.report.page import esc

_LIMIT = 20_000
"""Characters of one text that a report shows; the viewer has all of it."""
_GRADES = {"right": "✓ right", "wrong": "✗ wrong", "no_answer": "∅ no answer", "error": "! not graded"}
_KINDS = {"ok": "good", "reject": "bad", "unknown": "warn"}


def _text(text: str, quotes: tuple[str, ...] = ()) -> str:
    """Escaped text with the quotes that occur in it marked, cut at a limit that is named."""
    cut = text[:_LIMIT]
    spans = sorted({(at, at + len(q)) for q in quotes if q and (at := cut.find(q)) >= 0})
    out, done = [], 0
    for start, end in spans:
        if start >= done:
            out.append(f"{esc(cut[done:start])}<mark>{esc(cut[start:end])}</mark>")
            done = end
    out.append(esc(cut[done:]))
    if len(text) > _LIMIT:
        out.append(f" <span class='chip warn'>… {len(text) - _LIMIT:,} more characters</span>")
    return f"<div class='text' dir='auto'>{''.join(out)}</div>"


def episode_html(title: str, line: dict[str, Any]) -> str:
    """A folded block: ``title`` (Best, Median, Worst), the reward, and the whole episode of a transcript line."""
    chips = [
        _reward_chip(line),
        f"<span class='chip'>{esc(line['pair']['id'])}</span>",
        f"<span class='chip'>{len(line['dialogue']['turns'])} turns, {esc(line['dialogue']['end'] or 'unfinished')}</span>",
    ]
    chips += [
        f"<span class='chip {_KINDS[v['decision']]}'>{esc(gate)} {esc(v['decision'])}</span>"
        for gate, v in line["verdicts"].items()
        if v["decision"] != "ok"
    ]
    opened = " open" if title == "Best" else ""
    body = [_problems(line), *_turns(line), *_verdicts(line), _post_test(line), _terms(line)]
    return (
        f"<details class='card episode' data-episode='{esc(line['id'])}'{opened}>"
        f"<summary><h3>{esc(title)}</h3>{''.join(chips)}</summary>"
        f"{''.join(body)}</details>"
    )


def _reward_chip(line: dict[str, Any]) -> str:
    reward = line["reward"]["reward"]
    kind = "good" if reward > 0 else "bad" if reward < 0 else ""
    return f"<span class='chip {kind}'>reward {written('reward', reward)}</span>"


def dialogue_html(line: dict[str, Any]) -> str:
    """Reward, turns, verdicts and post-test without the problems: one column of a comparison."""
    return "".join([_reward_chip(line), *_turns(line), *_verdicts(line), _post_test(line), _terms(line)])


def _problems(line: dict[str, Any]) -> str:
    out = []
    for side, name in (("source", "Source problem (tutored)"), ("transfer", "Transfer problem (tested)")):
        problem = line["pair"][side]
        if problem:
            out.append(
                f"<div class='problem'><b>{name}, answer {esc(problem['answer'])}</b>{_text(problem['text'])}</div>"
            )
    return "".join(out)


def _turns(line: dict[str, Any]) -> list[str]:
    quotes = {
        n: tuple(v["quote"] for v in line["verdicts"].values() if v["turn"] == n)
        for n in range(len(line["dialogue"]["turns"]))
    }
    out = []
    for n, turn in enumerate(line["dialogue"]["turns"]):
        flags = [name for name in ("scripted", "truncated") if turn[name]]
        if not turn["visible"].strip():
            flags.append("blank")
        chips = "".join(f"<span class='chip'>{flag}</span>" for flag in flags)
        thought = (
            f"<details><summary>Thinking, {turn['thinking_tokens']} tokens</summary>"
            f"<div class='thought'>{_text(turn['thinking'])}</div></details>"
            if turn["thinking"]
            else ""
        )
        speaker = "tutor" if turn["speaker"] == "tutor" else "student"
        out.append(
            f"<div class='said {speaker}'><b>{speaker.capitalize()}</b>{chips}{thought}{_text(turn['visible'], quotes[n])}</div>"
        )
    return out


def _verdicts(line: dict[str, Any]) -> list[str]:
    out = []
    for gate, v in line["verdicts"].items():
        criterion = f" ({esc(v['criterion'])})" if v["criterion"] else ""
        quote = f", turn {v['turn']}: “{esc(v['quote'][:500])}”" if v["quote"] else ""
        out.append(
            f"<p class='verdict'><span class='chip {_KINDS[v['decision']]}'>{esc(gate)}: {esc(v['decision'])}</span>"
            f"{criterion}{quote}</p>"
        )
    return out


def _post_test(line: dict[str, Any]) -> str:
    post = line["post_test"]
    if not post:
        return "<p class='muted'>No post-test was taken.</p>"
    answers = "".join(
        f"<details><summary>{esc(_GRADES.get(grade, grade))}</summary>{_text(answer)}</details>"
        for answer, grade in zip(post["answers"], post["grades"], strict=True)
    )
    return (
        f"<p class='muted'>Post-test on the {esc(post['problem'])} problem: "
        f"{post['right']} of {post['graded']} graded answers are right.</p>"
        f"<details><summary>{len(post['answers'])} answers</summary>{answers}</details>"
    )


def _terms(line: dict[str, Any]) -> str:
    r = line["reward"]
    terms = [f"before {written('pre', _number(r['pre']))}", f"after {written('post', _number(r['post']))}"]
    terms.append(f"gain {written('transfer_gain', _number(r['gain']))}")
    if r["gated"]:
        terms.append("gated")
    if r["penalty"]:
        terms.append(f"penalty {r['penalty']}")
    return f"<p class='muted'>Reward: {esc(', '.join(terms))}.</p>"


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
