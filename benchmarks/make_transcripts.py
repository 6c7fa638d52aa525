"""Make the transcripts that benchmarks/training_step.py learns from: real tutoring dialogues of MathDial, as token records.

    python benchmarks/make_transcripts.py MATHDIAL.jsonl [--groups 4] [--group-size 8] [--out benchmarks/data/transcripts.json.gz]

Teachers are people and students are a language model (MathDial, CC BY-SA 4.0). Ids are SmolLM2's under its chat template; teacher
turns with their end of turn are the sampled tokens. The first dialogues of the file are taken in its order, whole, none left out;
their lengths are as they are. Episodes of a GRPO group share a prompt, so each group has the system prompt and the opening (of the
environment ``near_transfer``) of its first dialogue: with prompts of their own TRL would pad more.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from maieutic.env.prompts import load_env
from maieutic.evaluation.conversations import merged, parse_mathdial, rows_of
from maieutic.models import resolve_model
from maieutic.recipe import load_recipe
from maieutic.training.trajectory import Segment, Trajectory

SOURCE = "MathDial test split (CC BY-SA 4.0), teacher turns as tutor turns, ids of SmolLM2-135M-Instruct"


def token_record(tokenizer: Any, system: str, opening: str, turns: list[Any]) -> Segment:
    """ChatML as SmolLM2's template writes it; the log-probs are of no model (the benchmark computes them)."""
    ids: list[int] = []
    mask: list[bool] = []

    def add(text: str, sampled: bool = False) -> None:
        new = tokenizer(text, add_special_tokens=False).input_ids
        ids.extend(new)
        mask.extend([sampled] * len(new))

    add(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{opening}<|im_end|>\n")
    for turn in turns:
        tutor = turn.speaker == "tutor"
        add(f"<|im_start|>{'assistant' if tutor else 'user'}\n")
        add(f"{turn.text}<|im_end|>", sampled=tutor)
        add("\n")
    return Segment(ids, mask, [0.0] * len(ids))


def main() -> None:
    """Read, tokenise, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data" / "transcripts.json.gz")
    given = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2-135m"))
    templates = load_env("near_transfer")
    env = load_recipe("smollm2/grpo").env
    made: list[Trajectory] = []
    system = opening = ""
    for number, (where, row) in enumerate(rows_of(given.file, split=None, offline=True)):
        group, index = divmod(number, given.group_size)
        if group == given.groups:
            break
        human = parse_mathdial(where, row)
        said = merged(human.turns)
        if said[0].speaker == "student":
            said.pop(0)  # in the opening that the group shares
        if index == 0:
            system, opening = templates.tutor_system(env, human.problem), templates.opening(human.problem)
        segment = token_record(tokenizer, system, opening, said)
        made.append(Trajectory(f"mathdial-{number}", f"group-{group}", [segment], 0.0, 0.8))
    text = json.dumps({"source": SOURCE, "trajectories": [t.to_json() for t in made]}, separators=(",", ":"))
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    lengths = [t.n_tokens for t in made]
    print(
        f"{len(made)} dialogues, {sum(lengths)} tokens ({sum(t.n_trained for t in made)} sampled), lengths {lengths}"
    )


if __name__ == "__main__":
    main()
