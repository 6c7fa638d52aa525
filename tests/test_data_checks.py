"""What is checked without a model: replies, answer forms, changed numbers, near-copies, votes, the gate, recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from maieutic.errors import RecipeError
from maieutic.problems import Problem
from maieutic.problems.build.checks import (
    Finding,
    answer_form,
    changed_share,
    check_variant,
    quantities,
    same_answer,
    similarity,
)
from maieutic.problems.build.gate import Measured, best, gate
from maieutic.problems.build.recipe import ChecksSpec, DataRecipe, GateSpec, load_data_recipe
from maieutic.problems.build.rewrite import Candidate, Rejected, load_prompts, read_rewrite
from maieutic.problems.build.rows import judge_solves
from maieutic.problems.measure import Tally

SOURCE = Problem(text="Ana has 12 pens and buys 7 more pens at the shop. How many pens has she?", answer="19")


def reason(text: str, answer: str, source: Problem = SOURCE, **spec: object) -> str | None:
    found = check_variant(source, text, answer, ChecksSpec(**spec))  # type: ignore[arg-type]
    return found.reason if found else None


@pytest.mark.parametrize(
    ("text", "answer", "wanted"),
    [
        ("Ben has 30 nuts and finds 5 more nuts in the wood. How many nuts has he?", "35", None),
        ("Ana has 13 pens and buys 8 more pens at the shop. How many pens has she?", "21", None),
        ("ana has 12 pens  and buys 7 more pens at the shop. how many pens has she?", "20", "copy"),
        ("Cem owns 7 cups; then 12 cups come. How many cups?", "19", "same_numbers"),
        ("Ana has 12 pens and buys 8 more pens at the shop. How many pens has she?", "20", None),
        ("Ana has 11 pens and buys 8 more pens at the shop. How many pens has she?", "19", "same_answer"),
        ("Ana has 11 pens and buys 8 more pens at the shop. How many pens has she?", "19.0", "same_answer"),
        ("Ana has 11 pens and buys 8.5 more pens at the shop. How many pens?", "19.5", "answer_form"),
        ("Ana has 11 pens and buys 9 more. The answer is 20. How many pens?", "20", "states_answer"),
        ("Ana has 11 pens and buys 9 more. How many?", "nan", "unusable_answer"),
    ],
)
def test_the_first_fault_of_a_variant(text: str, answer: str, wanted: str | None) -> None:
    assert reason(text, answer) == wanted


def test_a_near_copy_changes_few_numbers_and_no_words() -> None:
    source = Problem(text="A box holds 3 rows of 4 jars, 5 lids and 6 tins. How many things?", answer="23")
    near = "A box holds 3 rows of 4 jars, 5 lids and 7 tins. How many things?"
    assert reason(near, "24", source) == "near_copy"
    assert reason(near, "24", source, min_changed=0.2) is None
    assert reason("On 3 shelves 4 cats, 5 dogs, 7 birds sleep. How many animals?", "24", source) is None, (
        "new story"
    )
    bare = Problem(text="Is every square that we can draw a rectangle in every case?", answer="yes")
    assert (
        reason("So is every square that we can draw a rectangle in every case?", "no", bare) == "near_copy"
    ), "no number to change"


def test_quantities_read_words_and_separators() -> None:
    assert dict(quantities("Twice 1,200 is 2400.0, half a dozen, 3 and three")) == {
        "2": 1, "1200": 1, "2400": 1, "1/2": 1, "12": 1, "3": 2}  # fmt: skip
    assert changed_share("2 and 3 and 3", "3 and 9 and 9") == pytest.approx(2 / 3)
    assert changed_share("no number", "7") is None
    assert similarity("5 red cats", "77 red cats") == 1 and similarity("a b", "c d") == 0
    assert (
        changed_share("小明有12个苹果", "小红有15个苹果") == 1
        and 0.7 < similarity("小明有12个苹果", "小红有15个苹果") < 1
    )


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ("12", "integer"), ("1,200", "integer"), ("-3", "integer"), ("12.0", "integer"), ("2.5", "decimal"), ("1/3", "fraction"),
        (r"\frac{2}{5}", "fraction"), ("1 1/2", "fraction"), ("50%", "percent"), ("$12", "integer of usd"),
        ("12 cm", "integer of length"),
        ("B", "choice"), ("(C)", "choice"), ("(1, 2)", "interval"), ("1, 2", "list"), ("3 and 4", "list"), ("x = 5y", "equation"),
        ("x^2+1", "expression"), ("a blue bird", "text"),
    ],
)  # fmt: skip
def test_answer_forms(answer: str, form: str) -> None:
    assert answer_form(answer) == form


def test_choices_may_share_their_letter_but_numbers_no_value() -> None:
    source = Problem(text="Which is 2 + 2? A) 4 B) 5", answer="A")
    assert reason("Which is 3 + 6? A) 9 B) 7", "A", source) is None
    assert reason("Which is 3 + 6? A) 9 B) 7", "9", source) == "answer_form"
    assert same_answer("0.5", "1/2") and not same_answer("5", "6")


GOOD = "PROBLEM: Ben has 3 nuts.\nHow many?\nSOLUTION: Count.\nANSWER: 3"


def test_replies_are_read() -> None:
    assert read_rewrite(GOOD) == Candidate("Ben has 3 nuts.\nHow many?", "3", "Count.")
    assert read_rewrite("<think>PROBLEM: no\nANSWER: 1</think>\n" + GOOD) == read_rewrite(GOOD)
    marked = read_rewrite("Sure!\n\n**PROBLEM:** Ben has 3 nuts.\n**ANSWER:** 3\nHope it helps")
    assert marked == Candidate("Ben has 3 nuts.", "3", None)


@pytest.mark.parametrize(
    ("reply", "truncated", "wanted"),
    [
        ("", False, "empty"),
        ("<think>hm</think>  ", False, "empty"),
        ("I'm sorry, but I cannot help with that.", False, "refused"),
        ("I can’t write this.", False, "refused"),
        ("A nice variant is this one.", False, "unparsable"),
        ("PROBLEM: x", False, "unparsable"),
        ("PROBLEM: \nANSWER: 3", False, "unparsable"),
        (GOOD + "\n" + GOOD, False, "unparsable"),
        ("PROBLEM: x and", True, "truncated"),
        (GOOD, True, "truncated"),
        ("PROBLEM: I'm sorry", False, "unparsable"),
    ],
)
def test_replies_that_are_no_variant(reply: str, truncated: bool, wanted: str) -> None:
    found = read_rewrite(reply, truncated=truncated)
    assert isinstance(found, Finding) and found.reason == wanted


def votes(*verdicts: str) -> dict[str, object]:
    return {"verdicts": list(verdicts), "answers": ["9"] * len(verdicts), "texts": [""] * len(verdicts)}


@pytest.mark.parametrize(
    ("verdicts", "majority", "wanted"),
    [
        (("right",), 0.5, None),
        (("wrong",), 0.5, "wrong_answer"),
        (("right", "right", "wrong"), 0.5, None),
        (("right", "wrong"), 0.5, "wrong_answer"),
        (("right", "right", "wrong"), 0.67, "wrong_answer"),
        (("right", "no_answer", "no_answer"), 0.5, "wrong_answer"),
        (("no_answer", "no_answer"), 0.5, "unsolved"),
        (("right", "error", "error"), 0.5, None),
        (("error", "error"), 0.5, "ungradable"),
    ],
)
def test_the_majority_rule(verdicts: tuple[str, ...], majority: float, wanted: str | None) -> None:
    found, counts = judge_solves(votes(*verdicts), Candidate("t", "3"), majority)
    assert (found.reason if found else None) == wanted and sum(counts.values()) == len(verdicts)


@pytest.mark.parametrize(
    ("source", "variant", "wanted"),
    [
        (8, 8, []), (8, 12, []), (8, 13, ["too_easy"]), (6, 12, []), (5, 12, ["gap_easier"]), (2, 13, ["too_easy", "gap_easier"]),
        (8, 2, []), (8, 1, ["gap_harder"]), (16, 12, []), (16, 9, ["gap_harder"]), (16, 10, []),
    ],
)  # fmt: skip
def test_the_gate_has_the_published_limits(source: int, variant: int, wanted: list[str]) -> None:
    """16 samples: the ceiling 0.75 is 12, the gap 0.375 is 6; both may be met exactly."""
    assert [f.reason for f in gate(Tally(source, 16), Tally(variant, 16), GateSpec())] == wanted


def test_the_best_is_nearest_and_earliest() -> None:
    tries = [
        Measured(i, Candidate("t", "1"), Tally(right, 16), None, {}) for i, right in enumerate((15, 2, 6))
    ]
    assert best(Tally(4, 16), tries) is tries[1], "2 and 6 are equally far from 4: the earlier one"
    assert best(Tally(4, 16), []) is None


def test_feedback_blames_the_variant_for_its_own_faults_alone() -> None:
    prompts = load_prompts()
    plain = prompts.rewriting(SOURCE, None)[1].content
    assert (
        "Ana has 12 pens" in plain and "Answer of the original: 19" in plain and "not accepted" not in plain
    )
    fault = Rejected(1, "check", "same_answer", "it has the source's answer", "Old text {x}", "19")
    told = prompts.rewriting(SOURCE, fault)[1].content
    assert "not accepted: it has the source's answer" in told and "Old text {x}" in told
    lost = Rejected(1, "verify", "solver_failed", "no answer", "Old text", "19")
    assert prompts.rewriting(SOURCE, lost)[1].content == plain
    assert "19" not in "".join(m.content for m in prompts.solving("Ben has 3 nuts.")), "the solver is blind"


def test_own_prompts_need_their_placeholders(tmp_path: Path) -> None:
    (tmp_path / "solve.txt").write_text("Solve it")
    with pytest.raises(RecipeError, match=r"solve\.txt: placeholder \{problem\} is missing"):
        load_prompts(str(tmp_path))
    (tmp_path / "solve.txt").write_text("Bitte lösen: {problem}\n")
    assert load_prompts(str(tmp_path)).solving("x")[1].content == "Bitte lösen: x"
    with pytest.raises(RecipeError, match="no folder"):
        load_prompts(str(tmp_path / "none"))


RECIPE = """
name: mine
sources: [{source: a.jsonl}]
rewriter: {model: m, engine: {kind: chat, urls: ["http://h:1"]}}
student: {model: s, engine: {kind: chat, urls: ["http://h:2"]}}
"""


def write(tmp_path: Path, more: str = "", base: str = RECIPE) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(base + more)
    return path


def test_defaults_are_the_published_procedure(tmp_path: Path) -> None:
    recipe = load_data_recipe(write(tmp_path), ["gate.gap=0.5"])
    assert (recipe.attempts, recipe.prior.k, recipe.gate.ceiling, recipe.gate.gap) == (3, 16, 0.75, 0.5)
    assert (recipe.verify.solves, recipe.solver, recipe.gate.on_failure) == (1, None, "keep_best")
    (tmp_path / "a.jsonl").write_text("")
    assert load_data_recipe(write(tmp_path)).sources[0].source == str(tmp_path / "a.jsonl"), (
        "beside the recipe"
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("gates: {}\n", r"r\.yaml:6: gates: unknown key; did you mean 'gate'"),
        ("gate: {ceilng: 1}\n", r"gate\.ceilng: unknown key; did you mean 'ceiling'"),
        ("attempts: 0\n", r"r\.yaml:6: attempts: 0: .*greater than or equal to 1"),
        ("attempts: many\n", "attempts: 'many'"),
        ("gate: {gap: 2}\n", r"gate\.gap: 2.*less than or equal to 1"),
        ("verify: {solves: 0}\n", "need blind solves"),
        ("solver: {model: m, engine: {kind: vllm, urls: [u]}}\n", "engine.kind must be chat, not vllm"),
    ],
)
def test_recipe_errors_name_file_line_and_key(tmp_path: Path, more: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_data_recipe(write(tmp_path, more))


def test_template_rewriters_need_templates(tmp_path: Path) -> None:
    base = RECIPE.replace('{model: m, engine: {kind: chat, urls: ["http://h:1"]}}', "template")
    with pytest.raises(RecipeError, match="has no templates"):
        load_data_recipe(write(tmp_path, base=base))
    base = base.replace("a.jsonl", "generate:structures")
    with pytest.raises(RecipeError, match=r"verify\.solves: 0, or name a solver"):
        load_data_recipe(write(tmp_path, base=base))
    assert load_data_recipe(write(tmp_path, "verify: {solves: 0}\n", base)).rewriter == "template"


def test_shipped_data_recipes_load_by_name() -> None:
    from maieutic.resources import list_recipes, share_dir

    names = sorted(p.stem for p in (share_dir("recipes") / "data").glob("*.yaml"))
    assert len(names) >= 3 and not any(n.startswith("data/") for n in list_recipes())
    for name in names:
        recipe = load_data_recipe(f"data/{name}")
        assert isinstance(recipe, DataRecipe) and recipe.name == name
    with pytest.raises(RecipeError, match=r"did you mean data/gsm8k-vllm"):
        load_data_recipe("data/gsm8k-vlm")
