"""The micro student on a real vLLM server on the CPU: the distribution is that of the in-process engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch

from maieutic.check import resolve
from maieutic.config import Recipe
from maieutic.dialogue import Dialogue, Message, Turn, student_view
from maieutic.engines.base import Sampling
from maieutic.engines.connect import connect_vllm
from maieutic.engines.hf import HfEngine
from maieutic.engines.usage import Ledger
from maieutic.env.prompts import load_env
from maieutic.micro.shipped import shipped_model
from maieutic.problems import ProblemPair, read_pairs
from maieutic.recipe import load_recipe
from maieutic.resources import share_dir
from maieutic.runtime import build_students
from maieutic.seeds import derive
from maieutic.serve import Server, plan
from maieutic.tokens import Renderer
from maieutic.training.policy import load_model, load_tokenizer
from vllm_marks import PYTHON, VLLM

pytestmark = VLLM
K = 256
"""Answers a situation and engine."""
SITUATIONS = 6


def recipe_of(address: str | None, *overrides: str) -> Recipe:
    """``micro/full`` with its student in process, or on the server whose address file is named."""
    served = [f"students.0.engine={{kind: vllm, urls: ['file:{address}']}}"] if address else []
    return resolve(load_recipe("micro/full", [*served, *overrides]))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address file of the micro student's server, started as ``maieutic serve`` does."""
    folder = tmp_path_factory.mktemp("micro-student")
    what = plan(recipe_of(None), "student", model_dir=str(shipped_model("student")), python=str(PYTHON))
    what.env["VLLM_CPU_KVCACHE_SPACE"] = "1"
    with Server(what, folder / "student.json", folder / "student.log", timeout_s=400.0):
        yield str(folder / "student.json")


def pairs() -> list[ProblemPair]:
    return read_pairs(str(share_dir("data") / "micro-test" / "pairs.jsonl"))[:SITUATIONS]


def lesson(pair: ProblemPair) -> Dialogue:
    """The student hears the source problem's solution and says it in its own turn."""
    made = Dialogue(pair.id, pair.source.text)
    made.add(Turn("student", load_env("micro").opening(pair.source.text), scripted=True))
    made.add(Turn("tutor", "what do we need first ?"))
    made.add(Turn("student", pair.source.solution or ""))
    return made


async def answers(recipe: Recipe) -> list[Counter[str]]:
    """How often the student gives each answer: cold on one problem, after a lesson on the next, and so on."""
    (student,) = build_students(recipe)
    await student.start()  # type: ignore[attr-defined]
    try:
        out = []
        for number, pair in enumerate(pairs()):
            dialogue = lesson(pair) if number % 2 else None
            assert pair.transfer is not None
            said = await student.attempt(pair.transfer, k=K, seed=derive(7, number), dialogue=dialogue)
            out.append(Counter(said))
        return out
    finally:
        await student.close()  # type: ignore[attr-defined]


def p_of_equality(left: Sequence[Counter[str]], right: Sequence[Counter[str]]) -> float:
    """The p-value of "both draw from one distribution in every situation": two-sample chi-square statistics, added up.

    Answers that were given fewer than 10 times together are one cell.
    """
    from scipy.stats import chi2

    statistic, freedom = 0.0, 0
    for a, b in zip(left, right, strict=True):
        common = [x for x in a | b if a[x] + b[x] >= 10]
        cells = [(a[x], b[x]) for x in common]
        rest = (a.total() - sum(c[0] for c in cells), b.total() - sum(c[1] for c in cells))
        cells += [rest] if sum(rest) else []
        assert a.total() == b.total() == K
        statistic += sum((x - y) ** 2 / (x + y) for x, y in cells)
        freedom += len(cells) - 1
    assert freedom >= SITUATIONS, "the answers hardly vary: nothing would be compared"
    return float(chi2.sf(statistic, freedom))


def test_the_log_probs_of_the_same_tokens_are_the_same(address: str) -> None:
    recipe = recipe_of(address)
    spec = recipe.students[0]
    tokenizer = load_tokenizer(spec, offline=True)
    model = load_model(spec.model, torch.float32, torch.device("cpu"), revision=None, offline=True).eval()
    renderer = Renderer(tokenizer)
    templates = load_env("micro")
    prompts = []
    for pair in pairs():
        view = student_view(lesson(pair), templates.student_system(pair.source.text))
        question = templates.question(pair.transfer.text if pair.transfer else "", same=False)
        prompts += [renderer.prompt(view[:-1]), renderer.prompt([*view, Message("user", question)])]

    async def both() -> tuple[float, float, int]:
        hf = HfEngine(model, pad_id=tokenizer.pad_token_id)
        vllm = connect_vllm(spec.engine, role="student", ledger=Ledger())
        try:
            await vllm.start()
            scored = drawn = 0.0
            tokens = 0
            for number, prompt in enumerate(prompts):
                # Drawn by hf at T = 1, scored by the server.
                (ours,) = await hf.generate(
                    prompt, Sampling(1.0, 1.0, 30), seed=number, stop_ids=renderer.stop_ids
                )
                theirs = await vllm.score_at(vllm.pool.urls[0], [*prompt, *ours.ids])
                scored = max(scored, furthest(ours.logprobs, theirs[-len(ours.ids) :]))
                # Drawn by the server at the student's own temperature, scored by a plain forward.
                (served,) = await vllm.generate(
                    prompt, Sampling(0.6, 1.0, 30), seed=number, stop_ids=renderer.stop_ids
                )
                drawn = max(drawn, furthest(served.logprobs, plain(model, prompt, served.ids, 0.6)))
                tokens += len(ours.ids) + len(served.ids)
            return scored, drawn, tokens
        finally:
            await vllm.close()
            await hf.close()

    scored, drawn, tokens = asyncio.run(both())
    print(f"{tokens} tokens: |difference| <= {scored:.2g} (T = 1), {drawn:.2g} (T = 0.6)")
    assert tokens >= 200 and scored <= 1e-4 and drawn <= 1e-4


def furthest(left: Sequence[float], right: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


@torch.no_grad()
def plain(model: torch.nn.Module, prompt: list[int], ids: list[int], temperature: float) -> list[float]:
    """Log-probs of ``ids`` after ``prompt`` by the model's own forward pass."""
    logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return [float(row[i]) for row, i in zip(logprobs, ids, strict=True)]


def test_both_engines_draw_the_same_answers(address: str) -> None:
    here = asyncio.run(answers(recipe_of(None)))
    served = asyncio.run(answers(recipe_of(address)))
    p = p_of_equality(here, served)
    warmer = asyncio.run(answers(recipe_of(address, "students.0.sampling.temperature=1.0")))
    p_warmer = p_of_equality(here, warmer)
    print(
        f"p = {p:.3g} at T = 0.6, {p_warmer:.3g} against T = 1.0; {[len(c) for c in here]} distinct answers"
    )
    # Seeds are fixed: the numbers move with the models only, and a false alarm is one build in a thousand.
    assert p >= 1e-3
    assert p_warmer < 1e-6, "the comparison would not notice another temperature"
