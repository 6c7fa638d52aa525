"""Building a set end to end against servers that err in known ways: every fault is found, named and counted."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

import data_world as world
from maieutic.engines.usage import Ledger
from maieutic.errors import SpendingLimitError
from maieutic.problems import ProblemPair, read_pairs
from maieutic.problems.build.pipeline import BuildProgress, BuildReport, build_dataset
from maieutic.problems.build.recipe import load_data_recipe

ROWS = 200


def head(path: Path, n: int, to: Path) -> Path:
    to.write_text("".join(path.read_text().splitlines(keepends=True)[:n]))
    return to


def golds(path: Path) -> dict[str, str]:
    return {p.source.text: p.source.answer for p in read_pairs(str(path))}


def run(data: dict[str, Any], path: Path, **options: Any) -> BuildReport:
    path.write_text(yaml.safe_dump(data, allow_unicode=True))
    return build_dataset(load_data_recipe(path), **options)


def rejections(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rejections.jsonl").read_text().splitlines()]


@pytest.mark.integration
def test_gsm8k_against_servers_that_err(tmp_path: Path, shared_data_dir: Path) -> None:
    source = head(shared_data_dir / "gsm8k-train-300.jsonl", ROWS, tmp_path / "gsm8k.jsonl")
    texts = golds(source)
    broken = frozenset(list(texts)[5:8])
    # what a "duplicate" rewrite repeats: a problem of the evaluation set, which no row may resemble
    other = read_pairs(str(shared_data_dir / "gsm8k-train-300.jsonl"))[250].source.text
    held = tmp_path / "eval.jsonl"
    held.write_text(json.dumps({"question": other, "answer": "#### 1"}) + "\n")
    rewriter, solver = world.Rewriter(other_text=other), world.Solver()
    student = world.StudentServer(texts, broken)
    with world.in_thread(rewriter, solver, student):
        data = world.recipe(tmp_path, str(source), rewriter.url, solver.url, student.url)
        data["dedup"] = {"against": [{"source": str(held)}]}
        report = run(data, tmp_path / "r.yaml")

    folder = tmp_path / "world"
    planted = Counter(rewriter.planted.values())
    assert set(planted) == set(world.FAULTS), "the world must plant every kind of fault at this size"
    expected = {
        f"{world.STAGE.get(k, 'rewrite')}.{'evaluation_set' if k == 'duplicate' else k}": n
        for k, n in planted.items()
    }
    found = {
        k: n
        for k, n in report.rejections.items()
        if not k.startswith("gate.") and k != "prior.student_failed"
    }
    assert found == expected
    assert report.rejections["prior.student_failed"] == len(broken) == 3
    assert report.samples["failed"] == 3 * 16 and report.samples["ungraded"] == 0
    rows = rejections(folder)
    assert Counter(f"{r['stage']}.{r['reason']}" for r in rows) == Counter(report.rejections)

    pairs = read_pairs(str(folder))
    assert report.read == ROWS and report.rows == len(pairs) == ROWS - len(broken)
    assert [p.id for p in pairs] == [f"row-{i}" for i in range(ROWS) if i not in (5, 6, 7)]
    with_variant = [p for p in pairs if p.transfer is not None]
    assert report.status["passed"] + report.status.get("flagged", 0) == len(with_variant) > 150
    for pair in with_variant:
        check_row(
            pair, report.student, {r["attempt"] for r in rows if r["row"] == pair.id and r["stage"] != "gate"}
        )
    # transient 503s cost a retry each, and nothing else
    assert rewriter.transient and report.usage["rewriter"]["retries"] >= len(rewriter.transient)
    assert report.usage["student"]["failures"] == 3
    parquet = read_pairs(str(folder / "pairs.parquet"))
    assert [(p.source.rates, p.transfer and p.transfer.rates) for p in parquet] == [
        (p.source.rates, p.transfer and p.transfer.rates) for p in pairs
    ]


def check_row(pair: ProblemPair, student: str, bad_attempts: set[int]) -> None:
    assert pair.transfer is not None
    made = pair.provenance["build"]
    assert int(pair.transfer.answer) == world.truth(pair.transfer.text), "only right answers get in"
    assert made["attempt"] not in bad_attempts
    assert made["votes"]["right"] in (2, 3)
    source, transfer = pair.source.rates[student], pair.transfer.rates[student]
    assert source.n == transfer.n == made["samples"]["transfer"]["graded"] == 16
    gap = abs(transfer.rate - source.rate)
    passes = transfer.rate <= 0.75 and gap <= 0.375
    assert passes == (made["flags"] == []), "a flagged row is one that misses the gate"


def test_work_of_days_shows_all_its_hours() -> None:
    state = BuildProgress(101, Ledger(None), done=1, fresh=1, started=time.monotonic() - 1_000)
    assert state.eta_s == pytest.approx(100_000, rel=1e-3)
    assert state.line().startswith("1 of 101 rows, 0 with a variant, 0 attempts rejected; 0 requests")
    assert " ETA 27:4" in state.line()


def small(tmp_path: Path, shared_data_dir: Path, n: int) -> Path:
    return head(shared_data_dir / "gsm8k-train-300.jsonl", n, tmp_path / "gsm8k.jsonl")


@pytest.mark.integration
def test_a_second_start_asks_nothing_and_a_new_gate_reuses_the_answers(
    tmp_path: Path, shared_data_dir: Path
) -> None:
    source = small(tmp_path, shared_data_dir, 12)
    servers = world.Rewriter(share=0.2), world.Solver(), world.StudentServer(golds(source))
    with world.in_thread(*servers):
        data = world.recipe(tmp_path, str(source), *(s.url for s in servers))
        told: list[str] = []
        first = run(data, tmp_path / "r.yaml", progress=lambda state: told.append(state.line()))
        files = {f: (tmp_path / "world" / f).read_bytes() for f in ("pairs.jsonl", "rejections.jsonl")}
        asked = sum(len(s.bodies) for s in servers)
        again = run(data, tmp_path / "r.yaml")
        assert sum(len(s.bodies) for s in servers) == asked and again.asked == 0 < first.asked
        assert again.usage == first.usage, "what it cost is remembered"
        for name, content in files.items():
            assert (tmp_path / "world" / name).read_bytes() == content
        data["gate"] = {"ceiling": 1.0, "gap": 1.0}
        loose = run(data, tmp_path / "r.yaml")
    assert told[0].startswith("0 of 12 rows, 0 with a variant") and told[0].endswith("ETA ?")
    assert told[-1].startswith("12 of 12 rows") and told[-1].endswith("ETA 0:00:00")
    requests = sum(int(u["requests"]) for u in first.usage.values())
    assert f"{requests} requests" in told[-1] and " tokens, $0.00" in told[-1]
    assert loose.asked == 0, "a looser gate needs no new request: the first verified variant passes now"
    assert "flagged" not in loose.status and loose.attempts <= first.attempts


@pytest.mark.integration
def test_requests_that_failed_for_good_are_asked_again_on_demand(
    tmp_path: Path, shared_data_dir: Path
) -> None:
    source = small(tmp_path, shared_data_dir, 4)
    texts = golds(source)
    servers = (
        world.Rewriter(share=0),
        world.Solver(),
        world.StudentServer(texts, frozenset([next(iter(texts))])),
    )
    with world.in_thread(*servers):
        data = world.recipe(tmp_path, str(source), *(s.url for s in servers))
        first = run(data, tmp_path / "r.yaml")
        servers[2].broken = frozenset()
        second = run(data, tmp_path / "r.yaml")
        third = run(data, tmp_path / "r.yaml", retry_failed=True)
    assert first.status["unmeasured"] == second.status["unmeasured"] == 1 and second.asked == 0
    assert "unmeasured" not in third.status and third.rows == 4 and third.asked >= 2


@pytest.mark.integration
def test_feedback_names_the_fault_and_the_best_variant_is_kept_with_its_flags(
    tmp_path: Path, shared_data_dir: Path
) -> None:
    source = small(tmp_path, shared_data_dir, 3)
    texts = golds(source)
    rates = {text: 0.0 for text in texts}

    class Hard(world.StudentServer):
        def rate(self, text: str) -> float:
            return rates.get(text, 1.0)

    servers = world.Rewriter(share=0), world.Solver(), Hard(texts)
    with world.in_thread(*servers):
        data = world.recipe(tmp_path, str(source), *(s.url for s in servers))
        report = run(data, tmp_path / "r.yaml")
        dropped = run(data | {"gate": {"on_failure": "drop"}}, tmp_path / "r2.yaml")
    assert report.status == {"flagged": 3} and report.attempts == 9
    assert report.rejections == {"gate.too_easy": 9}
    assert dropped.status == {"no_variant": 3}
    pairs = read_pairs(str(tmp_path / "world" / "pairs.jsonl"))
    assert all(p.transfer is None and p.provenance["build"]["flags"] == ["no_variant"] for p in pairs)
    # a planted 503 makes a request come twice
    said = list({b["seed"]: b["messages"][-1]["content"] for b in servers[0].bodies}.values())
    assert sum("students solve it 16 times in 16: it is too easy" in s for s in said) == 6
    assert sum("much easier than the original" in s for s in said) == 6


@pytest.mark.integration
def test_a_templated_source_needs_no_rewriter_and_keeps_its_misconceptions(tmp_path: Path) -> None:
    from maieutic.problems.generate import generate

    options = {"size": 12, "seed": 3, "misconceptions": True}
    texts = {p.source.text: p.source.answer for p in generate("structures", options)}

    class Fair(world.StudentServer):
        def rate(self, text: str) -> float:
            return 0.3

    student = Fair(texts)
    with world.in_thread(student):
        data = world.recipe(tmp_path, "generate:structures", "http://x", "http://x", student.url)
        data |= {"rewriter": "template", "solver": None, "verify": {"solves": 0}}
        data["sources"] = [{"source": "generate:structures", "options": options}]
        report = run(data, tmp_path / "r.yaml")
    assert report.rows == 12 and set(report.usage) == {"student"}
    pairs = read_pairs(str(tmp_path / "world"))
    for pair in pairs:
        assert pair.transfer is not None and pair.transfer.solution is not None
        assert pair.transfer.solution.splitlines()[-1].endswith(pair.transfer.answer)
        for side, problem in (("source", pair.source), ("transfer", pair.transfer)):
            for wrong in pair.provenance["misconceptions"][side]:
                assert wrong["answer"] != problem.answer and wrong["kind"] and wrong["why"]


@pytest.mark.integration
def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    import asyncio

    from maieutic.engines.usage import Ledger
    from maieutic.errors import ProblemDataError
    from maieutic.problems.build.checkpoint import Journal

    async def go() -> None:
        async with Journal(tmp_path / "j.jsonl", Ledger()):
            with pytest.raises(ProblemDataError, match="another build"):
                async with Journal(tmp_path / "j.jsonl", Ledger()):
                    pass

    asyncio.run(go())


@pytest.mark.integration
def test_a_spending_limit_stops_the_build_and_a_higher_one_goes_on(
    tmp_path: Path, shared_data_dir: Path
) -> None:
    source = small(tmp_path, shared_data_dir, 12)
    servers = world.Rewriter(share=0), world.Solver(), world.StudentServer(golds(source))
    with world.in_thread(*servers):
        data = world.recipe(tmp_path, str(source), *(s.url for s in servers))
        # 200 tokens in, 80 out for a rewrite: $0.001
        data["rewriter"]["engine"]["price"] = {"input": 1.0, "output": 10.0}
        data |= {"spending_limit_usd": 0.006, "rows_in_flight": 2}
        with pytest.raises(SpendingLimitError, match=r"\$0\.01 of \$0\.01|spending limit reached"):
            run(data, tmp_path / "r.yaml")
        stopped = len(servers[0].bodies)
        report = run(data | {"spending_limit_usd": 10.0}, tmp_path / "r.yaml")
    assert 6 <= stopped <= 9 and report.rows == 12
    assert report.usage["rewriter"]["usd"] == pytest.approx(0.001 * report.usage["rewriter"]["requests"])
    assert report.usage["rewriter"]["requests"] >= stopped


@pytest.mark.integration
def test_a_student_in_this_process(tmp_path: Path, tiny_model_dir: Path) -> None:
    data = world.recipe(tmp_path, "generate:structures", "http://x", "http://x", "http://x")
    data |= {
        "rewriter": "template",
        "solver": None,
        "verify": {"solves": 0},
        "prior": {"k": 2},
        "attempts": 1,
    }
    data["sources"] = [{"source": "generate:structures", "options": {"size": 2}}]
    data |= {"student": {"model": str(tiny_model_dir)}, "env": {"post_test_max_tokens": 8}}
    report = run(data, tmp_path / "r.yaml")
    assert report.rows == 2 and report.student.startswith(f"{tiny_model_dir}|")
    assert report.samples == {"graded": 8, "failed": 0, "ungraded": 0}
