"""Generated near-transfer pairs: same template, other numbers, answers that follow from the worked solution."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from maieutic.errors import ProblemDataError, RecipeError
from maieutic.problems import ProblemPair, read_pairs
from maieutic.problems.generate import generate, numbers

GYM = {"size": 120, "seed": 3}


def digest(pairs: list[ProblemPair]) -> str:
    return hashlib.sha256(json.dumps([p.model_dump(mode="json") for p in pairs]).encode()).hexdigest()


@pytest.fixture(scope="module")
def gym() -> list[ProblemPair]:
    return generate("gsm_symbolic", GYM)


@pytest.mark.parametrize("name", ["gsm_symbolic", "one_step"])
def test_pairs_are_near_transfer(name: str) -> None:
    pairs = generate(name, {"size": 60})
    assert len(pairs) == 60
    texts = [q.text for p in pairs for q in (p.source, p.transfer) if q is not None]
    assert len(set(texts)) == 120
    for p in pairs:
        assert p.transfer is not None
        assert p.source.answer != p.transfer.answer
        assert numbers(p.source.text) != numbers(p.transfer.text)
        for q in (p.source, p.transfer):
            assert q.answer.isdigit()
            assert int(q.answer) > 0
            assert q.solution is not None
            assert q.answer in numbers(q.solution.splitlines()[-1])


def test_one_step_answers_are_right() -> None:
    for p in generate("one_step", {"size": 100, "seed": 5}):
        for q in (p.source, p.transfer):
            assert q is not None
            assert q.solution is not None
            left, _, right = q.solution.partition(" = ")
            assert eval(left.replace("×", "*")) == int(right) == int(q.answer)
            assert sorted(numbers(left)) == sorted(numbers(q.text))


def test_provenance_says_how_to_make_the_pair_again(gym: list[ProblemPair]) -> None:
    p = gym[0]
    assert p.provenance["generator"] == "gsm_symbolic"
    assert p.provenance["package"].startswith("reasoning-gym 0.1.")
    assert p.provenance["seed"] == 3
    assert p.provenance["source_seed"] != p.provenance["transfer_seed"]
    assert p.id == f"gsm_symbolic-3-{p.provenance['template']}-0"


def test_seeds_decide(gym: list[ProblemPair]) -> None:
    assert generate("gsm_symbolic", GYM) == gym
    other = generate("gsm_symbolic", {**GYM, "seed": 4})
    # templates with few variables may draw the same text twice
    assert len({p.source.text for p in other} & {p.source.text for p in gym}) < 12


@pytest.mark.integration
def test_the_same_in_another_interpreter(gym: list[ProblemPair]) -> None:
    code = (
        "import hashlib, json; from maieutic.problems.generate import generate;"
        f"ps = generate('gsm_symbolic', {GYM!r});"
        "print(hashlib.sha256(json.dumps([p.model_dump(mode='json') for p in ps]).encode()).hexdigest())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == digest(gym)


def test_options_bound_the_pairs() -> None:
    for p in generate("gsm_symbolic", {"size": 40, "easy": True}):
        for q in (p.source, p.transfer):
            assert q is not None
            assert len(q.text.split()) <= 40
            assert max(float(n) for n in numbers(q.text)) <= 100
            assert int(q.answer) <= 100
            assert len((q.solution or "").splitlines()) <= 2
    three = generate("gsm_symbolic", {"size": 10, "steps": 3})
    assert {p.provenance["steps"] for p in three} == {3}
    chosen = generate("gsm_symbolic", {"size": 6, "templates": [43, 6]})
    assert [p.provenance["template"] for p in chosen] == ["43", "6"] * 3


def test_a_generator_is_a_source() -> None:
    assert len(read_pairs("generate:one_step", options={"size": 7})) == 7


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("gsm_symbolik", {}, RecipeError, "did you mean 'gsm_symbolic'"),
        ("one_step", {"sise": 3}, RecipeError, r"problems\.options\.sise.*did you mean 'size'"),
        ("one_step", {"size": 0}, RecipeError, r"problems\.options\.size: 0"),
        ("one_step", {"templates": ["bag"]}, RecipeError, r"'bag' is no template.*bags"),
        (
            "one_step",
            {"size": 5000, "max_number": 4},
            ProblemDataError,
            r"only [1-9]\d* of 5000 different pairs",
        ),
        ("one_step", {"steps": 2}, ProblemDataError, "only 0 of 200"),
        ("gsm_symbolic", {"templates": [0], "max_number": 3}, ProblemDataError, "template '0' gave no pair"),
    ],
)
def test_impossible_wishes_are_named(
    name: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        generate(name, options)


def test_generated_pairs_pass_the_checks_of_a_build() -> None:
    """Near-copies among the draws are drawn again (seed 1 has one with these options)."""
    from maieutic.problems.build.checks import check_variant
    from maieutic.problems.build.recipe import ChecksSpec

    for pair in generate("gsm_symbolic", {"size": 30, "steps": [2, 3], "seed": 1}):
        assert pair.transfer is not None
        assert check_variant(pair.source, pair.transfer.text, pair.transfer.answer, ChecksSpec()) is None
