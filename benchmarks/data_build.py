"""What ``maieutic data build`` itself costs: CPU a row, and throughput against the ideal of its slowest endpoint.

Three endpoints with a known mean latency run in a process of their own (their CPU is not counted). Their latencies differ a
little, as real ones do: with equal ones all requests would end, and want the CPU, at the same moment. Every row passes at its first
attempt: 2 student requests, 1 rewrite, 1 verification. The ideal time is that of the busiest endpoint alone, requests × latency ÷
concurrency; what is lost is start and end of the pipeline, and the harness. The last line is JSON.

    python benchmarks/data_build.py [--rows 600] [--latency 1.0] [--concurrency 16]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import resource
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from aiohttp import web

from maieutic.problems.build.pipeline import build_dataset
from maieutic.problems.build.recipe import DataRecipe

K = 16


def value(text: str) -> int:
    """The endpoints' arithmetic: a number that a text stands for."""
    return 1000 + sum(map(ord, text)) * 31 % 9000


def serve(latency: float, jitter: float, out: Connection) -> None:
    """Rewriter, solver and student on one port, told apart by the model's name."""
    rng = random.Random(0)

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        await asyncio.sleep(latency * rng.uniform(1 - jitter, 1 + jitter))
        text, n = body["messages"][-1]["content"].replace("\u2060", ""), body.get("n", 1)
        if body["model"] == "rewriter":
            source = text.split("Original problem:", 1)[1].split("Answer of the original:", 1)[0].strip()
            variant = re.sub(r"\d+", lambda m: str(int(m[0]) * 7 + 3), source)
            replies = [f"PROBLEM: {variant}\nSOLUTION: one step\nANSWER: {value(variant)}"]
        elif body["model"] == "solver":
            replies = [f"\\boxed{{{value(text.strip())}}}"] * n
        else:
            problem = text.split("Problem:", 1)[1].split("\n\nWork it out", 1)[0].strip()
            replies = [f"I get \\boxed{{{value(problem) if i % 4 == 0 else 1}}}" for i in range(n)]
        choices = [
            {"index": i, "message": {"role": "assistant", "content": t}, "finish_reason": "stop"}
            for i, t in enumerate(replies)
        ]
        return web.json_response(
            {"choices": choices, "usage": {"prompt_tokens": 100, "completion_tokens": 100}}
        )

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", chat)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        out.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


def sources(path: Path, rows: int) -> None:
    names = (
        "rows of seats",
        "boxes of pens",
        "trays of eggs",
        "bags of salt",
        "reels of wire",
        "crates of tea",
    )
    with path.open("w") as f:
        for i in range(rows):
            # words that differ from row to row, as real problems' do
            words = " ".join(f"w{(i * 7919 + j * 104729) % 99991}x" for j in range(12))
            text = f"A store has {i + 2} {names[i % 6]} with {i * 3 + 5} in each. {words} How many are there in all?"
            f.write(json.dumps({"problem": text, "answer": str(value(text))}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--latency", type=float, default=1.0)
    parser.add_argument("--jitter", type=float, default=0.2, help="latencies are uniform within ± this share")
    parser.add_argument("--concurrency", type=int, default=16)
    given = parser.parse_args()
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(given.latency, given.jitter, there), daemon=True
    )
    server.start()
    url = f"http://127.0.0.1:{here.recv()}"

    def role(name: str) -> dict[str, Any]:
        http = {"concurrency": given.concurrency, "timeout_s": 120.0}
        return {"model": name, "engine": {"kind": "chat", "urls": [url], "http": http}}

    with tempfile.TemporaryDirectory() as folder:
        sources(Path(folder) / "p.jsonl", given.rows)
        recipe = DataRecipe.model_validate(
            {
                "name": "bench",
                "output_dir": folder,
                "sources": [{"source": f"{folder}/p.jsonl"}],
                "rewriter": role("rewriter"),
                "solver": role("solver"),
                "student": role("student"),
                "prior": {"k": K},
                "parquet": False,
            }
        )
        first: list[float] = []

        def note(state: Any) -> None:
            if not first:  # sources are read, the grader's imports are done: the first request goes out
                first.append(time.perf_counter())

        cpu, begun = _cpu(), time.perf_counter()
        report = build_dataset(recipe, progress=note)
        seconds, cpu = time.perf_counter() - first[0], _cpu() - cpu
        begun_after = first[0] - begun
    server.terminate()
    server.join()
    assert report.status == {"passed": given.rows}, report.status
    ideal = 2 * given.rows * given.latency / given.concurrency
    print(
        json.dumps(
            {
                "benchmark": "data_build",
                "rows": given.rows,
                "requests": report.asked,
                "student_samples": report.samples["graded"],
                "latency_s": given.latency,
                "jitter": given.jitter,
                "concurrency": given.concurrency,
                "ideal_s": round(ideal, 3),
                "seconds": round(seconds, 3),
                "throughput_of_ideal": round(ideal / seconds, 4),
                "start_s": round(begun_after, 3),
                "cpu_ms_per_row": round(1000 * cpu / given.rows, 2),
                "load_average": round(os.getloadavg()[0], 1),
            }
        )
    )


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
