"""The micro world: its problems, its corpora, its tokenizer."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from maieutic.dialogue import HIDDEN
from maieutic.micro.corpus import (
    first_document,
    first_tutor_document,
    mending_document,
    prompts,
    student_document,
    tutor_document,
    vocabulary,
)
from maieutic.micro.models import Encoder, tokenizer
from maieutic.micro.pairs import make_pairs
from maieutic.micro.scripts import STUDENTS, Move, StudentScript, Traits, diagnosis, solve
from maieutic.micro.speech import (
    CONFIRMS,
    CUES,
    END_TOKEN,
    FLAGS,
    HINT_COUNT,
    HINT_LEFT,
    HINT_NEEDED,
    UNKNOWN,
    VERBS,
)
from maieutic.micro.world import (
    ENDINGS,
    FAMILIES,
    OPENINGS,
    OPS,
    MicroProblem,
    apply,
    held_out,
    make_problem,
    other,
)
from maieutic.tokens import Renderer

SURE = Traits(cue=1, restate=1, switch=1, slip=0, extra=0, stop=0, mend=1, parrot=1)


def test_answers_by_hand() -> None:
    p = MicroProblem("t", a=3, b=4, c=5, d=0, op1="x", op2="+", family="three", story=(0, 0))
    assert p.results("x", "+") == [12, 17, 34]
    assert p.results("+", "-", stop=True) == [7, 2]
    assert p.solution == "first 3 x 4 = 12 . then 12 + 5 = 17 . last twice 17 = 34 ."
    assert (apply("x", 3, 4), apply("+", 3, 4), apply("-", 3, 4)) == (12, 7, -1)
    assert other(1, "x") == "+" and other(2, "+") == "-"


def test_every_method_gives_another_answer_and_no_result_stands_in_the_text() -> None:
    rng = random.Random(1)
    seen: Counter[str] = Counter()
    for _ in range(400):
        p = make_problem(rng)
        seen[p.family] += 1
        answers = {p.results(x, y)[-1] for x in OPS[1] for y in OPS[2]}
        assert len(answers) == 4 and min(answers) >= 0
        assert not set(p.results(p.op1, p.op2)) & {int(w) for w in p.text.split() if w.isdigit()}
        assert OPENINGS[p.story[0]][0] == p.op1 and ENDINGS[p.story[1]][0] == p.op2
    assert set(seen) == set(FAMILIES) and min(seen.values()) > 60


def test_held_out_stories_are_new_combinations_of_known_phrases() -> None:
    combinations = [(i, j) for i in range(len(OPENINGS)) for j in range(len(ENDINGS))]
    test = [c for c in combinations if held_out(*c)]
    train = [c for c in combinations if not held_out(*c)]
    assert len(test) == len(combinations) // 4
    assert {i for i, _ in train} == set(range(len(OPENINGS))) == {i for i, _ in test}
    assert {j for _, j in train} == set(range(len(ENDINGS))) == {j for _, j in test}


def test_pairs_share_family_and_method_but_no_number() -> None:
    train, test = make_pairs(60, 3, test=False), make_pairs(40, 3, test=True)
    texts = [q.text for p in train + test for q in (p.source, p.transfer) if q]
    assert len(set(texts)) == 200
    for pair, is_test in [(p, False) for p in train] + [(p, True) for p in test]:
        assert pair.transfer is not None
        assert all(held_out(*s) == is_test for s in pair.provenance["stories"])
        ops = [[w for w in (q.solution or "").split() if w in "x+-"] for q in (pair.source, pair.transfer)]
        assert ops[0] == ops[1] == pair.provenance["method"]
        assert pair.source.answer == (pair.source.solution or "").split()[-2]
    assert [p.source.text for p in make_pairs(60, 3, test=False)] == [p.source.text for p in train]


def test_an_untaught_student_is_right_one_time_in_four_by_construction() -> None:
    rng, right, n = random.Random(0), 0, 4000
    for _ in range(n):
        p = make_problem(rng)
        text = solve(p, rng.choice(OPS[1]), rng.choice(OPS[2]), rng, SURE)
        right += text.endswith(f"\\boxed{{ {p.answer} }}")
    assert right / n == pytest.approx(0.25, abs=0.03)


def problem(**changes: object) -> MicroProblem:
    values = dict(text="t", a=3, b=4, c=5, d=9, op1="x", op2="+", family="two", story=(0, 0)) | changes
    return MicroProblem(**values)  # type: ignore[arg-type]


def cue(step: int, op: str) -> Move:
    return Move("cue", CUES[step, op][0], step, op)  # type: ignore[index, arg-type]


def test_a_student_follows_words_and_not_the_story() -> None:
    student = StudentScript(problem(op1="x"), random.Random(0), SURE)
    assert student.reply(cue(1, "+")) == "first 3 + 4 = 7 ."
    assert diagnosis(student.p, student) == "op"
    assert student.reply(Move("flag", FLAGS[0])) == "first 3 x 4 = 12 ."
    assert student.reply(cue(2, "+")) == "then 12 + 5 = 17 ."
    assert diagnosis(student.p, student) == "right"
    # The transfer follows its own words (nine times in ten each).
    q = problem(a=2, b=6, c=3)
    rng_answers = Counter(student.answer(q, same=False, hidden=True) for _ in range(300))
    assert rng_answers.most_common(1)[0][0] == "first 2 x 6 = 12 . then 12 + 3 = 15 . \\boxed{ 15 }"


def test_a_cue_in_view_answers_for_the_student_in_the_post_test() -> None:
    student = StudentScript(problem(op1="x"), random.Random(0), Traits(cue=0.0, slip=0.0))
    assert student.reply(cue(1, "x")) == "first 3 + 4 = 7 ."  # hears it, and does otherwise
    assert student.reply(cue(2, "+")) == "then 7 - 5 = 2 ."
    q = problem(a=2, b=6, c=9)
    seen, hidden = (
        Counter(student.answer(q, same=False, hidden=h) for _ in range(300)) for h in (False, True)
    )
    assert seen.most_common(1)[0][0] == "first 2 x 6 = 12 . then 12 + 9 = 21 . \\boxed{ 21 }"
    assert hidden.most_common(1)[0][0].startswith("first 2 + 6 = 8 . then 8 - 9")


def test_misconceptions_and_their_cures() -> None:
    extra = StudentScript(problem(family="extra"), random.Random(0), Traits(cue=1, slip=0, extra=1, mend=1))
    assert extra.reply(cue(1, "x")) == "first 9 x 4 = 36 ."
    assert diagnosis(extra.p, extra) == "needed"
    assert extra.reply(Move("needed", "")) == "first 3 x 4 = 12 ."
    slip = StudentScript(problem(), random.Random(0), Traits(cue=1, slip=1, mend=1))
    assert slip.reply(cue(1, "x")) == "first 3 x 4 = 13 ."
    assert diagnosis(slip.p, slip) == "count"
    assert slip.reply(Move("count", "")) == "first 3 x 4 = 12 ."
    stop = StudentScript(problem(family="three"), random.Random(0), Traits(cue=1, slip=0, stop=1, mend=1))
    stop.reply(cue(1, "x"))
    assert stop.reply(cue(2, "+")) == "then 12 + 5 = 17 ."
    assert diagnosis(stop.p, stop) == "left"
    assert stop.reply(Move("left", "")) == "last twice 17 = 34 ."


def test_a_told_answer_is_parroted_on_the_same_problem_only() -> None:
    student = StudentScript(problem(), random.Random(0), SURE)
    assert student.reply(Move("tell", "", 0, "x", "+")) == "ok . the answer is 17 ."
    same = Counter(student.answer(student.p, same=True, hidden=True) for _ in range(200))
    assert same["\\boxed{ 17 }"] > 150
    q = problem(a=2, b=6, c=3)
    new = [student.answer(q, same=False, hidden=True) for _ in range(400)]
    assert 0.15 < sum(t.endswith("\\boxed{ 15 }") for t in new) / 400 < 0.35
    seen = [student.answer(q, same=False, hidden=False) for _ in range(400)]
    assert sum(t.endswith("\\boxed{ 15 }") for t in seen) / 400 > 0.8


@pytest.mark.parametrize("thinking", [False, True])
def test_documents_have_the_ids_of_the_general_renderer(thinking: bool) -> None:
    renderer = Renderer(tokenizer(thinking=thinking))
    assert renderer.append_problem is None and renderer.mode == ("open" if thinking else "none")
    rng, encode = random.Random(5), Encoder()
    for n in range(60):
        document = tutor_document(rng) if n % 2 else student_document(rng, STUDENTS["student-b"])
        ids, learned = encode(document)
        assert ids == renderer.prompt([s.message for s in document])[: len(ids)]
        assert len(ids) == len(learned) and any(learned)
        assert vocabulary().index(UNKNOWN) not in ids


def test_a_thinking_turn_is_split_where_the_template_says() -> None:
    renderer = Renderer(tokenizer(thinking=True))
    document = tutor_document(random.Random(0), thinking=True)
    ids, learned = Encoder(thinking=True)(document)
    begin = learned.index(True)
    end = learned.index(False, begin)
    split = renderer.split(ids[begin:end], keep=[END_TOKEN])
    said = next(s.message.content for s in document if s.learn)
    assert f"{split.thinking} </think> {split.visible}" == said
    assert split.well_formed and split.thinking and split.visible


def test_the_student_learns_from_cold_hidden_visible_and_talking_documents() -> None:
    t, _ = prompts()
    rng, kinds = random.Random(0), Counter[str]()
    heads = [text.split(" {")[0] for text in (t.post_test, t.post_test_same)]
    for _ in range(800):
        users = [
            s.message.content for s in student_document(rng, STUDENTS["student"]) if s.message.role == "user"
        ]
        tested = bool(users) and users[-1].startswith(tuple(heads))
        cold = bool(users) and users[0].startswith("no lesson")
        kinds["cold" if cold else "hidden" if HIDDEN in users else "visible" if tested else "talk"] += 1
    assert min(kinds[k] for k in ("cold", "hidden", "visible", "talk")) > 30


def test_the_first_documents_answer_with_the_operations_of_the_words() -> None:
    rng, kinds = random.Random(0), Counter[str]()
    cued = {q: op for (_, op), questions in CUES.items() for q in questions}
    for _ in range(300):
        document = first_document(rng)
        users = [s.message.content for s in document if s.message.role == "user"]
        learned = " ".join(s.message.content for s in document if s.learn)
        ops = [w for w in learned.split() if w in "x+-"]
        if "\\boxed{" not in learned:
            kinds["cues"] += 1
            assert ops == [cued[u] for u in users]
            continue
        hidden = HIDDEN in users
        kinds["hidden" if hidden else "visible"] += 1
        assert all(s.learn == (s is document[-1]) for s in document)
        if users[0] in cued:  # cues in view count for more than the own words beside them
            kinds["cues in view"] += 1
            assert ops == [cued[u] for u in users[:-1]]
            continue
        words = " ".join(s.message.content for s in document[2:-2])
        for op, verb in VERBS.items():
            words = words.replace(verb, op)
        assert [w for w in words.split() if w in "x+-"] == ops
    assert min(kinds[k] for k in ("cues", "hidden", "visible", "cues in view")) > 30


def test_the_tutors_first_documents_judge_steps_and_tell_nothing() -> None:
    rng, said = random.Random(0), Counter[str]()
    for _ in range(100):
        said.update(s.message.content for s in first_tutor_document(rng) if s.learn)
    judged = sum(said[text] for text in (*FLAGS, *CONFIRMS, HINT_COUNT, HINT_NEEDED, HINT_LEFT))
    assert judged > 0.3 * said.total()
    assert not [text for text in said if "=" in text or set(text.split()) & set(VERBS.values())]


def test_hasty_dialogues_teach_only_how_to_mend() -> None:
    rng, learned = random.Random(0), Counter[str]()
    heard = {*FLAGS, HINT_COUNT, HINT_NEEDED, HINT_LEFT}
    for _ in range(100):
        document = mending_document(rng, STUDENTS["student"])
        assert any(s.learn for s in document)
        for said, reply in pairwise(document):
            if reply.learn:
                assert said.message.content in heard
                learned[said.message.content] += 1
    assert learned[HINT_NEEDED] > 20 and learned[HINT_COUNT] > 10
