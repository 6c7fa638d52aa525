"""A build that is killed goes on where it was: same files as an uninterrupted one, no answered request asked again."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

import data_world as world
from loopback import Loopback
from maieutic.engines.usage import Ledger
from maieutic.errors import EngineDownError, ProblemDataError
from maieutic.problems.build.checkpoint import Journal, step_key
from maieutic.problems.build.pipeline import build_dataset
from maieutic.problems.build.recipe import load_data_recipe
from test_data_build import golds, head

FILES = ("pairs.jsonl", "rejections.jsonl")
KILLS = 5


class Slow:
    """Adds latency to a server, so that kills fall between requests."""

    def __init__(self, server: Loopback, seconds: float) -> None:
        inner = server.fault

        async def late(number: int, body: dict[str, Any]) -> Any:
            await asyncio.sleep(seconds)
            return inner(number, body)

        server.fault = late


def write(path: Path, data: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(data, allow_unicode=True))
    return path


def servers_for(source: Path) -> tuple[world.Rewriter, world.Solver, world.StudentServer]:
    return world.Rewriter(share=0.3), world.Solver(), world.StudentServer(golds(source))


def outputs(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def journal_lines(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "journal.jsonl").read_bytes().splitlines()
    return [row for row in map(json.loads, lines) if "key" in row]


@pytest.mark.slow
@pytest.mark.integration
def test_five_kills_at_random_points_change_nothing(tmp_path: Path, shared_data_dir: Path) -> None:
    source = head(shared_data_dir / "gsm8k-train-300.jsonl", 60, tmp_path / "gsm8k.jsonl")
    calm = servers_for(source)
    with world.in_thread(*calm):
        data = world.recipe(tmp_path / "calm", str(source), *(s.url for s in calm))
        reference = build_dataset(load_data_recipe(write(tmp_path / "calm.yaml", data)))
    asked = sum(len(s.bodies) for s in calm)

    servers = servers_for(source)
    for server in servers:
        Slow(server, 0.03)
    rng, killed_at = random.Random(os.urandom(8)), []
    points = sorted(rng.sample(range(5, int(asked * 0.9)), KILLS))
    with world.in_thread(*servers):
        data = world.recipe(tmp_path / "killed", str(source), *(s.url for s in servers))
        data["rows_in_flight"] = 12
        path = write(tmp_path / "killed.yaml", data)
        command = [sys.executable, "-m", "maieutic", "data", "build", str(path)]
        for point in points:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while sum(len(s.bodies) for s in servers) < point and process.poll() is None:
                time.sleep(0.002)
            assert process.poll() is None, (
                f"ended with {process.returncode} before kill point {point} of {points}"
            )
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            killed_at.append(len(journal_lines_or_none(tmp_path / "killed" / "world")))
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    assert outputs(tmp_path / "killed" / "world") == outputs(tmp_path / "calm" / "world"), (points, killed_at)
    keys = [row["key"] for row in journal_lines(tmp_path / "killed" / "world")]
    assert len(keys) == len(set(keys)) == reference.asked
    rows = [
        json.loads(x)["id"] for x in (tmp_path / "killed" / "world" / "pairs.jsonl").read_text().splitlines()
    ]
    assert len(rows) == len(set(rows)) == 60
    # only what was in flight at a kill may be asked a second time
    in_flight = KILLS * 12
    twice = Counter(json.dumps(b, sort_keys=True) for s in servers for b in s.bodies)
    before = Counter(json.dumps(b, sort_keys=True) for s in calm for b in s.bodies)
    assert set(twice) == set(before)
    assert sum((twice - before).values()) <= in_flight


def journal_lines_or_none(folder: Path) -> list[bytes]:
    path = folder / "journal.jsonl"
    return path.read_bytes().splitlines() if path.is_file() else []


@pytest.mark.integration
def test_a_journal_cut_anywhere_gives_the_same_files(tmp_path: Path, shared_data_dir: Path) -> None:
    source = head(shared_data_dir / "gsm8k-train-300.jsonl", 8, tmp_path / "gsm8k.jsonl")
    servers = servers_for(source)
    with world.in_thread(*servers):
        data = world.recipe(tmp_path, str(source), *(s.url for s in servers))
        recipe = load_data_recipe(write(tmp_path / "r.yaml", data | {"parquet": False}))
        build_dataset(recipe)
        folder = tmp_path / "world"
        whole, journal = outputs(folder), (folder / "journal.jsonl").read_bytes()
        rng = random.Random(1)
        for cut in sorted(rng.sample(range(len(journal)), 12)):
            (folder / "journal.jsonl").write_bytes(journal[:cut])
            for name in FILES:
                (folder / name).unlink()
            report = build_dataset(recipe)
            assert outputs(folder) == whole, cut
            kept = sum(b'"key"' in line for line in journal[:cut].split(b"\n")[:-1])
            assert report.asked == len(set(keys_of(journal))) - kept, cut


def keys_of(journal: bytes) -> list[str]:
    return [row["key"] for row in map(json.loads, journal.splitlines()) if "key" in row]


def test_journal_keeps_what_landed_and_drops_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"

    async def fill() -> list[Any]:
        async with Journal(path, Ledger()) as journal:

            async def ask(i: int) -> dict[str, Any]:
                return {"text": f"α{i}\n"}

            return await asyncio.gather(
                *(
                    journal.step(step_key("s", i % 5), "rewrite", f"r{i}", lambda i=i: ask(i % 5))
                    for i in range(10)
                )
            )

    values = asyncio.run(fill())
    assert [v["text"] for v in values] == [f"α{i % 5}\n" for i in range(10)]
    assert sorted(keys_of(path.read_bytes())) == sorted(step_key("s", i) for i in range(5)), (
        "asked twice, kept once"
    )
    data = path.read_bytes()

    async def read() -> dict[str, Any]:
        async with Journal(path, Ledger()) as journal:
            return dict(journal.done)

    last = data.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last, len(data)):
        path.write_bytes(data[:cut])
        asyncio.run(read())
        assert path.read_bytes() == data[:last], "the torn line is gone, what is before it stays"
    path.write_bytes(b'{"half": \n' + data)
    with pytest.raises(ProblemDataError, match=r"j\.jsonl:1: not a line of a build's journal"):
        asyncio.run(read())


def test_a_full_disk_stops_the_build_and_names_the_journal(tmp_path: Path) -> None:
    async def go() -> None:
        async with Journal(tmp_path / "j.jsonl", Ledger()) as journal:

            def full(data: bytes) -> None:
                raise OSError(28, "No space left on device")

            journal._write = full  # type: ignore[method-assign]

            async def ask() -> dict[str, Any]:
                return {}

            with pytest.raises(
                ProblemDataError, match=r"j\.jsonl: the journal cannot be written: .*No space left"
            ):
                await journal.step("k", "rewrite", "r", ask)

    asyncio.run(go())


def test_step_keys_differ_with_every_part() -> None:
    keys = {
        step_key("a", 1),
        step_key("a", "1"),
        step_key("a", 1, None),
        step_key(["a", 1]),
        step_key("b", 1),
    }
    assert len(keys) == 5 and all(len(k) == 32 for k in keys)


@pytest.mark.integration
def test_an_interrupt_says_how_to_go_on(tmp_path: Path, shared_data_dir: Path) -> None:
    source = head(shared_data_dir / "gsm8k-train-300.jsonl", 20, tmp_path / "gsm8k.jsonl")
    servers = servers_for(source)
    for server in servers:
        Slow(server, 0.1)
    with world.in_thread(*servers):
        data = world.recipe(tmp_path, str(source), *(s.url for s in servers)) | {"rows_in_flight": 3}
        command = [sys.executable, "-m", "maieutic", "data", "build", str(write(tmp_path / "r.yaml", data))]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A suite that runs in the background of a shell inherits an ignored SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        while sum(len(s.bodies) for s in servers) < 12 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
        assert process.returncode == 130, told
        assert "the same command goes on from here" in told and "Traceback" not in told
        kept = len(journal_lines(tmp_path / "world"))
        report = build_dataset(load_data_recipe(tmp_path / "r.yaml"))
    assert kept >= 9 and report.rows == 20
    assert report.asked + kept == len(journal_lines(tmp_path / "world"))


@pytest.mark.integration
def test_a_dead_endpoint_stops_the_build_and_it_goes_on_later(tmp_path: Path, shared_data_dir: Path) -> None:
    source = head(shared_data_dir / "gsm8k-train-300.jsonl", 6, tmp_path / "gsm8k.jsonl")
    servers = servers_for(source)
    with world.in_thread(*servers):
        data = world.recipe(tmp_path, str(source), *(s.url for s in servers))
        dead = json.loads(json.dumps(data))
        dead["solver"]["engine"] |= {
            "urls": ["http://127.0.0.1:9"],
            "http": {"outage_limit_s": 0.5, "backoff_s": 0.05},
        }
        with pytest.raises(EngineDownError, match=r"solver: none of http://127\.0\.0\.1:9 has answered"):
            build_dataset(load_data_recipe(write(tmp_path / "dead.yaml", dead)))
        before = len(journal_lines(tmp_path / "world"))
        report = build_dataset(load_data_recipe(write(tmp_path / "r.yaml", data)))
    assert before >= 6 and report.rows == 6
    assert not any(why.endswith("failed") and "solver" in why for why in report.rejections)
    assert report.asked == len(journal_lines(tmp_path / "world")) - before


def test_a_full_disk_is_one_named_error_and_frees_the_journal(tmp_path: Path) -> None:
    """Closing tries once more to write what did not fit: that must not hide the error, nor keep the lock."""

    async def fill() -> None:
        async with Journal(tmp_path / "j.jsonl", Ledger()) as journal:
            await journal.step("first", "s", "r", answer)
            # A file may not grow beyond this: what a full disk does, for this process alone.
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
            await journal.step("second", "s", "r", answer)

    async def answer() -> dict[str, str]:
        return {"text": "x" * 5000}

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(ProblemDataError, match="the journal cannot be written"):
            asyncio.run(fill())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)

    async def again() -> set[str]:
        async with Journal(tmp_path / "j.jsonl", Ledger()) as journal:
            return set(journal.done)

    assert "first" in asyncio.run(again())
