"""A loopback server that plays tutor, student and judge (every answer a function of its request), and recipes on it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from loopback import Loopback

MOMENT = {
    "id": "m{n}",
    "context": [
        {"turn_number": 3, "role": "tutor", "text": "What is 3 times 4?"},
        {"turn_number": 4, "role": "student", "text": "Seven."},
        {"turn_number": 6, "role": "student", "text": "Or maybe not."},
    ],
    "dimension": "scaffolding",
    "student": {
        "context": "Multiplying {n} by 4.",
        "trait": {"persona": "shy"},
        "reference": "TUTOR: Look again.",
    },
    "rubric": {},
    "provenance": {"cut_turn": 6},
}


def _draw(body: dict[str, Any], salt: object = "") -> int:
    text = json.dumps([body["messages"], body.get("seed"), str(salt)], sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def answer(body: dict[str, Any]) -> list[str]:
    """One text a choice. The role is the model's name."""
    n, last, role = body.get("n", 1), body["messages"][-1]["content"], body["model"]
    if role == "judge":
        return [_judge(last, _draw(body, i)) for i in range(n)]
    if role == "student":
        if "\\boxed" in last:
            return [f"I count. \\boxed{{{_draw(body, i) % 3 + 10}}}" for i in range(n)]
        return [f"I think it is {_draw(body) % 50}."]
    end = " <end_of_conversation>" if _draw(body, "end") % 4 == 0 else ""
    return [
        f"Why do you think so? ({_draw(body, i) % 1000}) Final Answer: {_draw(body, i) % 3 + 10}{end}"
        for i in range(n)
    ]


def _judge(prompt: str, draw: int) -> str:
    if "Label the tutor turns numbered" in prompt:
        numbers = prompt.split("Label the tutor turns numbered")[1].split(":")[0]
        turns = [{"n": int(n), "moves": ["G" if draw % 2 else "A", "K"]} for n in numbers.split(",")]
        return json.dumps({"turns": turns})
    if "You rate how a tutor teaches" in prompt:
        return json.dumps({"reasoning": "r", "pedagogy": draw % 5 + 1, "factual": 5})
    if "You read how a tutor went on" in prompt:
        over = draw % 4 == 0
        return json.dumps(
            {"reasoning": "r", "scaffolded": True, "pushed_rigour": draw % 2 == 0, "over_helped": over}
        )
    return json.dumps({"reasoning": "fine", "verdict": "OK", "criterion": "", "quote": ""})


def server() -> Loopback:
    return Loopback(answer)


def pairs(n: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "id": f"p{i}",
            "source": {"text": f"There are {i} cups and 4 more. How many?", "answer": str(i % 3 + 10)},
            "transfer": {
                "text": f"There are {i} pens and 5 more. How many?",
                "answer": str((i + 1) % 3 + 10),
            },
        }
        for i in range(start, start + n)
    ]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def engine(url: str) -> dict[str, Any]:
    return {
        "kind": "chat",
        "urls": [url],
        "price": {"input": 1.0, "output": 10.0},
        "http": {"retries": 0, "outage_limit_s": 3.0},
    }


def write_recipe(
    folder: Path, url: str, reward_model: Path | None = None, problems: int = 12, **changes: Any
) -> Path:
    """An evaluation recipe with every suite on the server at ``url``, and the experiment's recipe beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    train, held = (
        write_lines(folder / "train.jsonl", pairs(1, 90)),
        write_lines(folder / "held.jsonl", pairs(problems)),
    )
    experiment = {
        "name": "small",
        "offline": True,
        "tutor": {"model": "tutor"},
        "students": [
            {"model": "student", "engine": engine(url), "sampling": {"temperature": 0.6, "max_tokens": 50}}
        ],
        "judge": {"kind": "llm", "model": "judge", "engine": engine(url), "votes": 1},
        "env": {"max_turns": 6, "end_after": 1, "post_test_samples": 4},
        "problems": {"source": str(train), "eval_source": str(held)},
    }
    (folder / "experiment.yaml").write_text(json.dumps(experiment))
    moments = []
    for n in range(3):
        moment = json.loads(json.dumps(MOMENT).replace("{n}", str(n)))
        moments.append(moment | {"dimension": ["scaffolding", "rigor"][n % 2]})
    dialogue = "Teacher: (generic)Hi|EOM|Student: I got 4.|EOM|Teacher: (focus)Look again?|EOM|Student: Oh.|EOM|Teacher: Good."
    dial = [{"qid": i, "question": f"Q{i}?", "ground_truth": "S", "conversation": dialogue} for i in range(3)]
    recipe: dict[str, Any] = {
        "name": "world",
        "offline": True,
        "concurrency": 3,
        "experiment": str(folder / "experiment.yaml"),
        "arms": {"api": {"kind": "chat", "model": "tutor", "engine": engine(url)}},
        "judge": {"model": "judge", "engine": engine(url)},
        "student": {"model": "student", "engine": engine(url)},
        "environment": {"samples": 2, "remeasure": 4},
        "middle_turn": {
            "sets": [{"format": "mathdial", "source": str(write_lines(folder / "dial.jsonl", dial))}],
            "reward": reward_model is not None,
        },
        "replay": {"source": str(write_lines(folder / "moments.jsonl", moments)), "max_turns": 4},
        "retention": {"sources": [str(held)], "limit": 3},
    }
    if reward_model is not None:
        recipe["reward_model"] = {"model": str(reward_model), "dtype": "float32"}
    path = folder / "evaluation.yaml"
    path.write_text(json.dumps(recipe | changes))
    return path


def make_reward_model(folder: Path) -> Path:
    """A tiny random reward model with a tokenizer and a chat template."""
    import torch
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    from maieutic.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForSequenceClassification(
            Qwen2Config(
                vocab_size=len(tokenizer),
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                initializer_range=0.3,
                num_labels=1,
                pad_token_id=tokenizer.pad_token_id,
            )
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
