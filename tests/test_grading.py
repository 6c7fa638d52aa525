"""Final-answer extraction, equivalence and the worker pool."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maieutic.errors import GraderError, ProblemDataError
from maieutic.grading import Grade, Grader, decide_plain, equivalent, extract_answer

MISBEHAVE = "grading_checks:misbehave"

CASES = [
    # boxes
    (r"So \boxed{12}.", "12", "right"),
    (r"So \boxed{13}.", "12", "wrong"),
    (r"First \boxed{12}, no: \boxed{13}", "13", "right"),
    (r"First \boxed{12}, no: \boxed{13}", "12", "wrong"),
    (r"\boxed{\frac{1}{2}}", "1/2", "right"),
    (r"\boxed{\frac{1}{\sqrt{4}}}", "1/2", "right"),
    (r"\boxed{\fbox{5}}", "5", "right"),
    (r"\fbox{5}", "5", "right"),
    (r"\boxed{x = \boxed{5}}", "5", "right"),
    (r"\boxed 5", "5", "right"),
    (r"The answer is 7. \boxed{}", "7", "right"),
    (r"12 and then \boxed{1", "12", "right"),
    (r"$\boxed{\$12}$", "12", "right"),
    # phrases
    ("The answer is 12.", "12", "right"),
    ("The answer is 12 because 3 + 9 = 12, not 13.", "12", "right"),
    ("**Answer:** 12", "12", "right"),
    ("Final answer: $x = 5$", "5", "right"),
    ("The answer is that she has 12 apples", "12", "right"),
    ("The final answer is 3 + 4 = 7", "7", "right"),
    ("Answer:\n42", "42", "right"),
    ("The answer is not 5. The answer is 6.", "6", "right"),
    ("The answer is yes.", "yes", "right"),
    ("The answer is no.", "yes", "wrong"),
    ("2 + 2\n#### 4", "4", "right"),
    ("#### 1,234", "1234", "right"),
    ("#### Step 1: add\nso we get 9", "9", "right"),
    ("She has 3 and 4, so 7 in all", "7", "right"),
    ("We get 3-5", "-5", "wrong"),
    ("The temperature is -5", "5", "wrong"),
    ("I do not know.", "5", "no_answer"),
    ("", "5", "no_answer"),
    ("   \n", "5", "no_answer"),
    # fractions and decimals
    (r"\boxed{\frac12}", "0.5", "right"),
    (r"\boxed{\dfrac{3}{4}}", "0.75", "right"),
    (r"\boxed{2/4}", "1/2", "right"),
    (r"\boxed{.5}", "1/2", "right"),
    (r"\boxed{-\frac{1}{2}}", "-0.5", "right"),
    (r"\boxed{\frac{-1}{2}}", r"-\frac12", "right"),
    (r"\boxed{12.}", "12", "right"),
    (r"\boxed{12.0}", "12", "right"),
    (r"\boxed{12.01}", "12", "wrong"),
    (r"\boxed{0.33}", "1/3", "wrong"),
    (r"\boxed{0.333333}", "1/3", "right"),
    (r"\boxed{0.666667}", "2/3", "right"),
    (r"\boxed{0.666666}", "2/3", "right"),
    (r"\boxed{0.666665}", "2/3", "wrong"),
    (r"\boxed{3.14}", r"\pi", "wrong"),
    (r"\boxed{1/0}", "1", "wrong"),
    # percent: the gold form decides
    (r"\boxed{50\%}", "50%", "right"),
    (r"\boxed{50}", "50%", "right"),
    (r"\boxed{0.5}", "50%", "right"),
    (r"\boxed{\frac{1}{2}}", r"50\%", "right"),
    (r"\boxed{1}", "100%", "wrong"),
    (r"\boxed{0.5\%}", "50%", "wrong"),
    (r"\boxed{50\%}", "0.5", "right"),
    (r"\boxed{50}", "0.5", "wrong"),
    (r"\boxed{0.5\%}", "0.5", "wrong"),
    (r"\boxed{50\%}", "50", "right"),
    (r"\boxed{0.5}", "50", "wrong"),
    (r"\boxed{5000\%}", "50", "wrong"),
    (r"\boxed{150\%}", "1.5", "right"),
    ("It is 25 percent", "25", "right"),
    # thousands separators
    (r"\boxed{1,234}", "1234", "right"),
    (r"\boxed{1{,}234{,}567}", "1234567", "right"),
    (r"\boxed{1\,234}", "1234", "right"),
    (r"\boxed{1,2}", "1200", "wrong"),
    (r"\boxed{1,2}", "12", "wrong"),
    (r"\boxed{1,2}", "1.2", "wrong"),
    (r"\boxed{1,200}", "1200", "right"),
    (r"\boxed{2,1}", "1,2", "right"),
    ("That makes 12,345.67 in all", "12345.67", "right"),
    # units
    (r"\boxed{12 apples}", "12", "right"),
    (r"\boxed{12}", "12 apples", "right"),
    (r"\boxed{12\text{ cm}}", "12 cm", "right"),
    (r"\boxed{12 cm}", "12", "right"),
    (r"\boxed{12cm}", "12 cm", "right"),
    (r"\boxed{12 m}", "12 cm", "wrong"),
    (r"\boxed{0.12 m}", "12 cm", "right"),
    (r"\boxed{12\text{ kg}}", "12 cm", "wrong"),
    (r"\boxed{12\ \mathrm{cm}^2}", "12 square centimeters", "right"),
    (r"\boxed{12 cm}", "12 cm^2", "wrong"),
    (r"\boxed{60 km/h}", "60 kilometers per hour", "right"),
    ("She pays $12", "12", "right"),
    ("She pays $12.50.", "12.5", "right"),
    (r"\boxed{12 dollars}", "$12", "right"),
    (r"\boxed{\$1.20}", "120 cents", "right"),
    (r"\boxed{12 cents}", "$12", "wrong"),
    (r"\boxed{90^\circ}", "90", "right"),
    (r"\boxed{3 \text{ million}}", "3,000,000", "right"),
    (r"\boxed{two dozen eggs}", "24", "right"),
    (r"\boxed{12x}", "12", "wrong"),
    (r"\boxed{12 \text{ or } 13}", "12", "wrong"),
    (r"\boxed{3 hours 20 minutes}", "3 hours 40 minutes", "wrong"),
    (r"\boxed{3 Hours 20 minutes}", "3 hours 20 minutes", "right"),
    # mixed numbers
    (r"\boxed{1 1/2}", "1.5", "right"),
    (r"\boxed{1\frac{1}{2}}", "3/2", "right"),
    (r"\boxed{-1 \frac12}", "-1.5", "right"),
    (r"\boxed{1\frac{1}{2}}", "1/2", "wrong"),
    ("It takes 2 1/2 hours", "2.5", "right"),
    # times, ratios, lists, sentences
    ("The answer is 3:30 PM.", "3:30 p.m.", "right"),
    ("The answer is 3:30 PM", "3:30 AM", "wrong"),
    ("They meet at 3:30", "3", "wrong"),
    (r"\boxed{12 pm}", "12 am", "wrong"),
    ("The ratio is 3:4", "3:4", "right"),
    ("The answers: 4 and 5", "4, 5", "right"),
    ("The answer is 4/5 of 20 = 16", "16", "right"),
    ("The answer is 5 because 2*5 = 10", "5", "right"),
    ("The answer is 5!", "5", "right"),
    (r"\boxed{5!}", "120", "right"),
    (r"\boxed{5!}", "5", "wrong"),
    (r"\boxed{33.333333\%}", "1/3", "right"),
    (r"\boxed{33.33\%}", "1/3", "wrong"),
    # choices
    (r"\boxed{A}", "A", "right"),
    (r"\boxed{(A)}", "A", "right"),
    (r"\boxed{\text{A}}", "(A)", "right"),
    (r"\boxed{A) 12}", "A", "right"),
    (r"\boxed{A) 12}", "12", "right"),
    (r"\boxed{a}", "A", "right"),
    (r"\boxed{B}", "A", "wrong"),
    (r"\boxed{12}", "A", "wrong"),
    (r"\boxed{B) 12}", "A) 12", "wrong"),
    (r"\boxed{12}", "A) 12", "right"),
    ("The answer is (C).", "C", "right"),
    ("The answer is C.", "C", "right"),
    ("Of the 4 options, it is option B", "B", "right"),
    ("Clearly (D)", "D", "right"),
    # signs
    (r"\boxed{-5}", "5", "wrong"),
    (r"\boxed{−5}", "-5", "right"),
    (r"\boxed{+5}", "5", "right"),
    (r"\boxed{-\$5}", "-5", "right"),
    (r"\boxed{$-5$}", "-5", "right"),
    # what is no number
    (r"\boxed{nan}", "5", "wrong"),
    (r"\boxed{inf}", "5", "wrong"),
    (r"\boxed{\infty}", r"\infty", "right"),
    (r"\boxed{-\infty}", r"\infty", "wrong"),
    (r"\boxed{5}", "", "error"),
    (r"\boxed{5}", "nan", "error"),
    # algebra
    (r"\boxed{2(x+1)}", "2x + 2", "right"),
    (r"\boxed{2x+1}", "2x + 2", "wrong"),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", "right"),
    (r"\boxed{[1, 3)}", "[1, 3]", "wrong"),
    (r"\boxed{(1,2)}", "(2,1)", "wrong"),
    (r"\boxed{x = 5 or x = 3}", "3", "wrong"),
    (r"\boxed{2^{10}}", "1024", "right"),
    (r"\boxed{1e3}", "1000", "right"),
    (r"\boxed{3 \times 10^4}", "30000", "right"),
    (r"\boxed{((((}", "1", "wrong"),
]


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(timeout_s=60, n_workers=2) as g:
        yield g


@pytest.fixture(scope="module")
def slow_grader() -> Iterator[Grader]:
    """Everything goes through a worker."""
    with Grader(timeout_s=60, n_workers=2, fast_path=False) as g:
        yield g


@pytest.fixture
def checks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.parametrize(("text", "gold", "verdict"), CASES)
def test_table(grader: Grader, slow_grader: Grader, text: str, gold: str, verdict: str) -> None:
    grade = grader.grade_sync(text, gold)
    assert grade.verdict == verdict, grade
    assert slow_grader.grade_sync(text, gold) == grade


@pytest.mark.parametrize(
    ("text", "extracted"),
    [
        (r"\boxed{\frac{1}{\sqrt{2}}} or so", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{5} and \boxed{", "5"),
        ("The answer is 10.\n#### 12", "10"),
        ("#### 12\nso 13", "12"),
        ("I ate 3 of 4", "4"),
        ("The answer is 3:30 P.M. sharp", "3:30 pm"),
        ("Paris", None),
        (r"\boxed{}", None),
    ],
)
def test_extraction_order(text: str, extracted: str | None) -> None:
    assert extract_answer(text) == extracted


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 20_000,
        r"\boxed{" * 20_000 + "1" + "}" * 20_000,
        "answer is " * 20_000,
        "1," * 50_000,
        "$" * 50_000,
        "#### " * 20_000,
        " " * 100_000 + "1",
    ],
)
def test_extraction_of_hostile_text_ends(text: str) -> None:
    # In a process of its own with a generous limit: quadratic behaviour would need minutes.
    code = (
        "import sys; from maieutic.grading.extraction import extract_answer; extract_answer(sys.stdin.read())"
    )
    subprocess.run([sys.executable, "-c", code], input=text.encode(), check=True, timeout=60, env=_env())


def test_every_gold_equals_itself() -> None:
    for _, gold, verdict in CASES:
        if verdict != "error":
            assert equivalent(gold, gold), gold


def test_bad_gold_raises() -> None:
    with pytest.raises(ProblemDataError, match="gold answer ''"):
        equivalent("1", "")
    with pytest.raises(ProblemDataError, match="without its solution"):
        equivalent("1", "1" * 2000)


def _decimal_text(units: int, places: int) -> str:
    sign, digits = "-" if units < 0 else "", str(abs(units)).rjust(places + 1, "0")
    return sign + digits[: len(digits) - places] + ("." + digits[len(digits) - places :] if places else "")


numbers = st.one_of(
    st.tuples(st.integers(-30, 30), st.integers(0, 2)),
    st.tuples(st.integers(-(10**12), 10**12), st.integers(0, 6)),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(a=numbers, b=numbers)
def test_fast_path_agrees_with_exact_arithmetic_and_math_verify(
    a: tuple[int, int], b: tuple[int, int]
) -> None:
    from math_verify import LatexExtractionConfig, parse, verify

    answer, gold = _decimal_text(*a), _decimal_text(*b)
    exact = Fraction(a[0], 10 ** a[1]) == Fraction(b[0], 10 ** b[1])
    assert decide_plain(answer, gold) is exact
    left, right = (
        parse(f"${t}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
        for t in (gold, answer)
    )
    assert verify(left, right, timeout_seconds=None) is exact


@settings(max_examples=60, deadline=None, derandomize=True)
@given(a=numbers, b=numbers)
def test_fast_path_agrees_with_the_worker(grader: Grader, slow_grader: Grader, a: object, b: object) -> None:
    text, gold = f"The answer is {_decimal_text(*a)}.", _decimal_text(*b)  # type: ignore[misc]
    assert grader.grade_sync(text, gold) == slow_grader.grade_sync(text, gold)


@given(value=st.integers(-(10**15), 10**15))
def test_thousands_separators_do_not_change_a_number(value: int) -> None:
    assert decide_plain(f"{value:,}", str(value)) is True
    assert decide_plain(f"{value:,}", str(value + 1)) is False


def test_plain_answers_start_no_process() -> None:
    with Grader() as grader:
        for text, gold, _ in CASES:
            if gold in ("", "nan") or decide_plain(extract_answer(text) or "0", gold) is not None:
                grader.grade_sync(text, gold)
        assert grader._workers == set()


# -- the pool: what goes wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize("expression", [r"10^{10^{10}}", r"9**{9**{9}}", r"9^{9^{9^{9}}}"])
def test_hanging_expression_is_an_error_and_the_pool_survives(expression: str) -> None:
    with Grader(timeout_s=1.5, n_workers=1) as grader:
        grade = grader.grade_sync(rf"\boxed{{{expression}}}", "7")
        assert grade.verdict == "error"
        assert grade.extracted == expression
        assert grade.detail
    with Grader(timeout_s=60, n_workers=1) as grader:
        assert grader.grade_sync(r"\boxed{x+1}", "1+x").verdict == "right"


def test_hanging_check_is_killed_and_others_are_graded(checks_on_path: None) -> None:
    texts = [rf"\boxed{{{word}}}" for word in ("ok", "hang", "ok", "no", "ok")]
    with Grader(timeout_s=2, n_workers=1, check=MISBEHAVE, fast_path=False) as grader:
        first = grader.grade_sync(r"\boxed{ok}", "ok")
        (worker,) = grader._workers
        grades = asyncio.run(grader.grade_many(texts, "ok"))
        assert not psutil.pid_exists(worker.pid)
    assert first == Grade("right", "ok")
    assert [g.verdict for g in grades] == ["right", "error", "right", "wrong", "right"]
    assert [g.extracted for g in grades] == ["ok", "hang", "ok", "no", "ok"]
    assert grades[1].detail == "no verdict within 2 s"


def test_dying_raising_and_printing_checks(checks_on_path: None) -> None:
    texts = [rf"\boxed{{{word}}}" for word in ("die", "raise", "chat", "ok")]
    with Grader(timeout_s=60, n_workers=1, check=MISBEHAVE, fast_path=False) as grader:
        die, raising, chat, ok = asyncio.run(grader.grade_many(texts, "ok"))
    assert (die.verdict, die.detail) == ("error", "the grading worker died (exit code 7)")
    assert (raising.verdict, raising.detail) == ("error", "RuntimeError: no idea")
    assert (chat.verdict, ok.verdict) == ("wrong", "right")


def test_worker_killed_while_idle_costs_nothing(checks_on_path: None) -> None:
    with Grader(timeout_s=60, n_workers=1, check=MISBEHAVE, fast_path=False) as grader:
        assert grader.grade_sync(r"\boxed{1}", "1").verdict == "right"
        (worker,) = grader._workers
        os.kill(worker.pid, signal.SIGKILL)
        worker._process.wait()
        assert grader.grade_sync(r"\boxed{2}", "2").verdict == "right"


def test_errors_are_asked_again_and_verdicts_are_cached(checks_on_path: None) -> None:
    with Grader(timeout_s=60, n_workers=1, cache_size=2, check=MISBEHAVE, fast_path=False) as grader:
        for word in ("raise", "a", "b", "c"):
            grader.grade_sync(rf"\boxed{{{word}}}", "c")
        assert list(grader._cache.items()) == [(("b", "c"), False), (("c", "c"), True)]


def test_unknown_check_is_a_named_error() -> None:
    with Grader(check="grading_checks_that_are_absent:f", fast_path=False) as grader:
        with pytest.raises(GraderError, match="grading_checks_that_are_absent"):
            grader.grade_sync(r"\boxed{1}", "1")


@pytest.mark.parametrize(
    "arguments", [{"timeout_s": 0}, {"n_workers": 0}, {"cache_size": -1}, {"check": "no_colon"}]
)
def test_bad_arguments(arguments: dict[str, object]) -> None:
    with pytest.raises(GraderError, match=next(iter(arguments))):
        Grader(**arguments)  # type: ignore[arg-type]


# -- the pool: threads, loops, order -----------------------------------------------------------------------------


def test_workers_do_not_import_torch(checks_on_path: None) -> None:
    with Grader(timeout_s=60, n_workers=1, check="grading_checks:torch_loaded", fast_path=False) as grader:
        assert grader.grade_sync(r"\boxed{1}", "1").verdict == "wrong"
    code = "import sys, maieutic.grading; print(sorted({'torch', 'sympy'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True, env=_env()
    )
    assert done.stdout.strip() == "[]"


def test_other_threads_and_two_loops(grader: Grader) -> None:
    results: list[object] = []

    def in_thread(n: int) -> None:
        async def go() -> list[Grade]:
            return await grader.grade_many([rf"\boxed{{{n}x + {k}}}" for k in range(3)], f"1 + {n}x")

        results.append([g.verdict for g in asyncio.run(go())])
        results.append(grader.grade_sync(rf"\boxed{{y+{n}}}", f"{n} + y").verdict)

    threads = [threading.Thread(target=in_thread, args=(n,)) for n in (2, 3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(map(str, results)) == sorted(["['wrong', 'right', 'wrong']", "right"] * 2)


def test_two_hundred_at_once_keep_their_order(grader: Grader) -> None:
    texts = [rf"\boxed{{{n % 50}t + 1}}" for n in range(200)]
    grades = asyncio.run(grader.grade_many(texts, "1 + 7t"))
    assert [g.extracted for g in grades] == [f"{n % 50}t + 1" for n in range(200)]
    assert [g.verdict for g in grades] == ["right" if n % 50 == 7 else "wrong" for n in range(200)]


def test_a_cancelled_caller_does_not_cancel_the_others(checks_on_path: None) -> None:
    async def go(grader: Grader) -> Grade:
        first = asyncio.create_task(grader.grade(r"\boxed{ok}", "ok"))
        second = asyncio.create_task(grader.grade(r"\boxed{ok}", "ok"))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    with Grader(timeout_s=60, n_workers=1, check=MISBEHAVE, fast_path=False) as grader:
        assert asyncio.run(go(grader)).verdict == "right"


# -- the pool: nothing is left behind ------------------------------------------------------------------------------


def test_close_leaves_no_process_and_fails_what_waits(checks_on_path: None) -> None:
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    grader = Grader(timeout_s=600, n_workers=2, check=MISBEHAVE, fast_path=False)
    outcomes: list[BaseException | Grade] = []

    def wait() -> None:
        try:
            outcomes.append(grader.grade_sync(r"\boxed{hang}", "ok"))
        except GraderError as e:
            outcomes.append(e)

    thread = threading.Thread(target=wait)
    grader.grade_sync(r"\boxed{ok}", "ok")
    thread.start()
    while not grader._in_flight:
        time.sleep(0.01)
    grader.close()
    thread.join()
    assert [str(o) for o in outcomes] == ["The grader was closed while an answer waited for its verdict."]
    assert {p.pid for p in psutil.Process().children(recursive=True)} == before
    grader.close()
    with pytest.raises(GraderError, match="closed"):
        grader.grade_sync(r"\boxed{1}", "1")


def _env() -> dict[str, str]:
    here = Path(__file__).parent
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent / "src"), str(here)])}


_PARENT = """
import sys, threading, time
from maieutic.grading import Grader
grader = Grader(timeout_s=1.0, n_workers=2, check="grading_checks:misbehave", fast_path=False)
assert grader.grade_sync(r"\\boxed{ok}", "ok").verdict == "right"
threading.Thread(target=lambda: grader._submit(r"\\boxed{hang}", "ok"), daemon=True).start()
while not grader._in_flight: time.sleep(0.01)
time.sleep(0.2)
print(*[w.pid for w in grader._workers], flush=True)
if sys.argv[1] == "busy": time.sleep(600)
"""


@pytest.mark.parametrize("end", ["exit", signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_its_parent(end: object) -> None:
    how = "exit" if end == "exit" else "busy"
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, how], stdout=subprocess.PIPE, text=True, env=_env()
    )
    assert parent.stdout is not None
    workers = [
        psutil.Process(int(pid)) for pid in parent.stdout.readline().split() if psutil.pid_exists(int(pid))
    ]
    if isinstance(end, signal.Signals):
        assert workers
        parent.send_signal(end)
    parent.wait(timeout=60)
    parent.stdout.close()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
