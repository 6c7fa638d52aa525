"""What ``maieutic reat distil`` itself costs: throughput against the ideal of its endpoint, and CPU a request.

One endpoint with a known mean latency runs in a process of its own (its CPU is not counted); its roles answer by rule. Latencies
differ a little, as real ones do. A turn needs 1 to 9 requests in a row, so the ideal time is that of the busy endpoint, requests ×
latency ÷ concurrency; what is lost is the start, the tail (the last turns run out one by one), and the harness. A repository in
memory takes what passes. The last line is JSON.

    python benchmarks/reat_distil.py [--episodes 300] [--latency 2.0] [--concurrency 32]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from maieutic.engines.usage import Ledger
from maieutic.reat.connect import connect_roles
from maieutic.reat.distil import DistilProgress, DistilReport, distil
from maieutic.reat.distil_config import DistilRecipe
from maieutic.reat.rule_roles import RuleRoles
from maieutic.reat.schema import Admission, Experience
from reat_world import write_transcripts


def serve(latency: float, jitter: float, out: Connection) -> None:
    """All roles on one port."""

    async def run() -> None:
        async with RuleRoles(latency_s=latency, jitter=jitter) as url:
            out.send(url)
            await asyncio.Event().wait()

    asyncio.run(run())


class Memory:
    """A repository that keeps ids."""

    def __init__(self) -> None:
        self.known: dict[str, Admission] = {}

    async def admit(self, experience: Experience, score: float) -> Admission:
        return self.known.setdefault(experience.id, "inserted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=300)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--latency", type=float, default=2.0)
    parser.add_argument("--jitter", type=float, default=0.2, help="latencies are uniform within ± this share")
    parser.add_argument("--concurrency", type=int, default=32)
    given = parser.parse_args()
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(given.latency, given.jitter, there), daemon=True
    )
    server.start()
    http = {"concurrency": given.concurrency}
    engine = {"kind": "chat", "urls": [here.recv()], "http": http}
    recipe = DistilRecipe.model_validate(
        {"name": "bench", "roles": {"ocm": {"model": "rule-ocm", "engine": engine}}}
    )
    first: list[float] = []

    def note(state: DistilProgress) -> None:
        if not first:  # transcripts are read: the first request goes out
            first.append(time.perf_counter())

    async def run(folder: Path) -> DistilReport:
        ledger = Ledger()
        async with connect_roles(recipe.roles, recipe.distil, seed=0, ledger=ledger) as connected:
            return await distil(
                [folder / "run"],
                connected.roles,
                Memory(),
                recipe.distil,
                out=folder / "out",
                ledger=ledger,
                in_flight=2 * connected.capacity,
                progress=note,
            )

    with tempfile.TemporaryDirectory() as name:
        write_transcripts(Path(name) / "run", given.episodes, given.turns)
        cpu = _cpu()
        report = asyncio.run(run(Path(name)))
        seconds, cpu = time.perf_counter() - first[0], _cpu() - cpu
    server.terminate()
    server.join()
    ideal = report.asked * given.latency / given.concurrency
    print(
        json.dumps(
            {
                "benchmark": "reat_distil",
                "turns": report.turns,
                "experiences": report.experiences,
                "requests": report.asked,
                "latency_s": given.latency,
                "jitter": given.jitter,
                "concurrency": given.concurrency,
                "ideal_s": round(ideal, 3),
                "seconds": round(seconds, 3),
                "throughput_of_ideal": round(ideal / seconds, 4),
                "cpu_ms_per_request": round(1000 * cpu / report.asked, 2),
                "load_average": round(os.getloadavg()[0], 1),
            }
        )
    )


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
