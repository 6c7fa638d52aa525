"""Distillation end to end over real HTTP: planted faults, order, bounds, resumes, ablations, the command."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from typer.testing import CliRunner

from loopback import Loopback
from maieutic.cli import app
from maieutic.engines.usage import Ledger, Price
from maieutic.errors import EngineDownError, RecipeError, TranscriptError
from maieutic.reat.connect import connect_roles
from maieutic.reat.distil import DistilReport, distil
from maieutic.reat.distil_config import DistilRecipe, DistilSection, load_distil_recipe
from maieutic.reat.embeddings import PAPER_MODEL, HashingEmbedder
from maieutic.reat.leaks import find_leaks, surface
from maieutic.reat.repository import Repository
from maieutic.reat.rule_roles import Faults, RuleRoles
from maieutic.reat.schema import Admission, Experience
from maieutic.reat.turns import read_contexts
from reat_world import episode, write_transcripts

NONE = Faults()
FILES = ("experiences.jsonl", "reviews.jsonl")
FAULTS = Faults(malformed=0.1, out_of_range=0.06, contradiction=0.08, leak=0.15, seed=3)


class Notebook:
    """A sink that writes down what it is offered; idempotent by id."""

    def __init__(self) -> None:
        self.offered: list[tuple[Experience, float]] = []
        self.known: dict[str, Admission] = {}
        self.busy = False

    async def admit(self, experience: Experience, score: float) -> Admission:
        assert not self.busy, "two admissions at once"
        self.busy = True
        await asyncio.sleep(0.001)
        self.busy = False
        self.offered.append((experience, score))
        return self.known.setdefault(experience.id, "duplicate" if len(self.known) % 3 == 2 else "inserted")


def recipe(url: str, **more: Any) -> DistilRecipe:
    http = {"concurrency": more.pop("concurrency", 8), "backoff_s": 0.01, "backoff_max_s": 0.02} | more.pop(
        "http", {}
    )
    role = {"model": "rule-ocm", "engine": {"kind": "chat", "urls": [url], "http": http}}
    return DistilRecipe.model_validate({"name": "t", "roles": {"ocm": role}, "embedder": "hashing", **more})


async def play(
    made: DistilRecipe,
    run: Path,
    out: Path,
    sink: Any = None,
    *,
    in_flight: int = 8,
    retry_failed: bool = False,
) -> DistilReport:
    ledger = Ledger()
    async with connect_roles(made.roles, made.distil, seed=made.seed, ledger=ledger) as connected:
        return await distil(
            [run],
            connected.roles,
            sink,
            made.distil,
            out=out,
            ledger=ledger,
            in_flight=in_flight,
            retry_failed=retry_failed,
        )


def distilled(
    run: Path, out: Path, sink: Any = None, *, faults: Faults = NONE, in_flight: int = 8, **settings: Any
) -> tuple[DistilReport, RuleRoles]:
    async def go() -> tuple[DistilReport, RuleRoles]:
        server = RuleRoles(faults)
        async with server as url:
            return await play(recipe(url, distil=settings), run, out, sink, in_flight=in_flight), server

    return asyncio.run(go())


def rows(out: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_transcripts(tmp_path / "run", episodes=6, turns=4)


# ---- turns -----------------------------------------------------------------------------------------------------------


def test_every_tutor_turn_that_answers_a_student_is_reviewed(run: Path) -> None:
    skipped: Counter[str] = Counter()
    found = read_contexts([run], skipped)
    assert len(found) == 6 * 5 and not skipped
    first = found[0]
    assert (first.episode_id, first.turn, first.problem_id) == ("e-0", 1, "p-0")
    assert (
        first.student == episode(0).dialogue.turns[0].visible
        and first.response == episode(0).dialogue.turns[1].visible
    )
    assert [c.turn for c in found[:5]] == [1, 3, 5, 7, 9] and len(found[4].history) == 9
    assert first.solution.endswith(f"Answer: {episode(0).pair.source.answer}")


def test_missing_transcripts_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, words in ((tmp_path / "nothing", "no such file"), (tmp_path / "empty", "no transcript")):
        with pytest.raises(TranscriptError, match=words):
            read_contexts([path], Counter())


# ---- what comes out --------------------------------------------------------------------------------------------------


def test_a_clean_run_admits_in_order_what_passes_the_gate(run: Path, tmp_path: Path) -> None:
    sink = Notebook()
    report, server = distilled(run, tmp_path / "out", sink)
    reviews, kept = rows(tmp_path / "out", "reviews.jsonl"), rows(tmp_path / "out", "experiences.jsonl")
    assert report.turns == 30 == len(reviews) and report.experiences == len(kept) == len(sink.offered) > 5
    assert sum(report.dropped.values()) + report.experiences == report.turns
    assert sum(report.admissions.values()) == report.experiences and report.admissions["duplicate"] > 0
    assert report.dropped["not_meaningful"] == 6
    order = [r["key"] for r in reviews]
    offered = [
        f"{e.provenance.transcript}:{e.provenance.episode_id}:{e.provenance.turn}" for e, _ in sink.offered
    ]
    assert offered == [k for k in order if k in set(offered)], "in the order of the transcripts"
    for e, score in sink.offered:
        assert score >= 85 and score == e.utility == e.provenance.scores[-1]
        assert e.provenance.rounds == len(e.provenance.scores) - 1
        # with D = 0 the response was good at once; with D = 1 every earlier attempt failed the gate
        assert all(s < 85 for s in e.provenance.scores[1:-1])
        assert e.provenance.revised == (e.provenance.rounds > 0)
    assert {"0", "1", "2"} <= set(report.rounds), report.rounds
    assert report.roles["critic.capped"] > 0
    assert report.usage["ocm"]["requests"] == server.requests == report.asked
    assert sum(n for k, n in report.roles.items() if k.endswith(".requests")) == server.requests


def test_routing_and_gate_of_every_review_follow_the_equations(run: Path, tmp_path: Path) -> None:
    distilled(run, tmp_path / "out")
    for r in rows(tmp_path / "out", "reviews.jsonl"):
        if not r["scores"]:
            assert r["dropped"] == "not_meaningful"
        elif not r["routed"]:
            assert len(r["scores"]) == 1 and r["scores"][0] >= 80
            assert (r["dropped"] == "below_gate_unrevised") == (r["scores"][0] < 85)
        elif r["dropped"] == "below_gate":
            assert len(r["scores"]) == 4 and max(r["scores"][1:]) < 85


def test_every_planted_fault_is_counted_and_none_is_scored(tmp_path: Path) -> None:
    run = write_transcripts(tmp_path / "run", episodes=16, turns=4)
    sink = Notebook()
    report, server = distilled(run, tmp_path / "out", sink, faults=FAULTS, reasks=1)
    kinds = (".bad.", ".leak.")
    counted = {k: n for k, n in report.roles.items() if any(x in k for x in kinds)}
    assert counted == dict(server.planted)
    assert {k.rsplit(".", 1)[1] for k in counted} == {
        "malformed",
        "empty",
        "out_of_range",
        "unknown_tag",
        "contradiction",
        "contradictory",
        "number",
    }
    lost = {k: n for k, n in report.roles.items() if ".unknown." in k}
    by_role = Counter({k.split(".")[0]: 0 for k in report.dropped})
    for why, n in report.dropped.items():
        by_role[why.split(".")[0]] += n if "." in why else 0
    for role, names in (
        ("observer", ["observer"]),
        ("critic", ["critic", "inspection"]),
        ("mentor", ["mentor"]),
    ):
        gave_up = sum(n for k, n in lost.items() if k.startswith(role))
        leaks = report.dropped.get("mentor.leak", 0) if role == "mentor" else 0
        assert sum(by_role[n] for n in names) == gave_up + leaks, (role, report.dropped, lost)
    assert by_role["observer"] > 0 and by_role["critic"] + by_role["inspection"] > 0
    assert sum(report.dropped.values()) + report.experiences == report.turns
    surfaces = {c.key: surface(c.problem, c.solution, [c.response]) for c in read_contexts([run], Counter())}
    for e, _ in sink.offered:
        own = surfaces[f"{e.provenance.transcript}:{e.provenance.episode_id}:{e.provenance.turn}"]
        assert not [k for k in find_leaks(e.query, own, strict=True) if k.kind != "wording"], e.query
        assert not find_leaks(e.advice, own, strict=False), e.advice
        assert e.utility >= 85


def test_a_dead_role_drops_turns_and_scores_nothing(run: Path, tmp_path: Path) -> None:
    report, _ = distilled(run, tmp_path / "out", Notebook(), faults=Faults(malformed=1.0))
    assert report.experiences == 0 and report.turn_score is None and report.scored == 0
    assert (
        set(report.dropped) <= {"observer.malformed", "observer.empty"} and sum(report.dropped.values()) == 30
    )
    assert report.roles["observer.requests"] == 90, "three tries each"


# ---- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("in_flight", "slots"), [(3, 8), (20, 4), (1, 8)])
def test_concurrency_is_bounded_by_turns_and_by_slots(
    run: Path, tmp_path: Path, in_flight: int, slots: int
) -> None:
    async def go() -> RuleRoles:
        server = RuleRoles(latency_s=0.01)
        async with server as url:
            await play(recipe(url, concurrency=slots), run, tmp_path / "out", in_flight=in_flight)
        return server

    assert asyncio.run(go()).most_open == min(in_flight, slots)


def test_the_settings_bound_goes_before_the_callers(run: Path, tmp_path: Path) -> None:
    async def go() -> int:
        server = RuleRoles(latency_s=0.005)
        async with server as url:
            await play(recipe(url, distil={"in_flight": 2}), run, tmp_path / "out", in_flight=20)
        return server.most_open

    assert asyncio.run(go()) == 2


# ---- resume ----------------------------------------------------------------------------------------------------------


def test_a_journal_cut_anywhere_gives_the_same_files_and_repository(tmp_path: Path) -> None:
    run = write_transcripts(tmp_path / "run", episodes=3, turns=3)
    whole: dict[str, Any] = {}

    def state(out: Path, repository: Repository, report: DistilReport) -> dict[str, Any]:
        found: dict[str, Any] = {name: (out / name).read_bytes() for name in FILES}
        found["repository"] = sorted(repository.experiences(every=True), key=lambda e: e.id)
        found["report"] = (report.roles, report.dropped, report.admissions, report.rounds, report.turn_score)
        return found

    async def go() -> None:
        server = RuleRoles(FAULTS)
        async with server as url:
            made = recipe(url)

            async def once(out: Path, store: Path) -> tuple[dict[str, Any], DistilReport]:
                ledger = Ledger()
                async with connect_roles(made.roles, made.distil, seed=0, ledger=ledger) as connected:
                    with Repository.open(
                        store, embedder=HashingEmbedder(), merge=connected.roles.merge
                    ) as sink:
                        report = await distil(
                            [run], connected.roles, sink, made.distil, out=out, ledger=ledger, in_flight=5
                        )
                        return state(out, sink, report), report

            out = tmp_path / "out"
            calm, first = await once(out, tmp_path / "store")
            whole.update(calm)
            journal = (out / "journal.jsonl").read_bytes()
            assert first.asked == server.requests and first.admissions
            again, second = await once(out, tmp_path / "store")
            assert again == whole and second.asked == 0, (
                "nothing is left to ask, and nothing is admitted twice"
            )
            rng = random.Random(1)
            for number, cut in enumerate(sorted(rng.sample(range(len(journal)), 6))):
                (out / "journal.jsonl").write_bytes(journal[:cut])
                # half the time the repository, too, is one that a kill left behind: empty, or already complete
                store = tmp_path / f"store-{number}" if number % 2 else tmp_path / "store"
                found, report = await once(out, store)
                assert found == whole, cut
                kept = sum(b'"key"' in line for line in journal[:cut].split(b"\n")[:-1])
                merges = sum(b'"merger"' in line for line in journal[:cut].split(b"\n")[:-1])
                total = sum(b'"key"' in line for line in journal.split(b"\n")[:-1])
                unasked = 0 if number % 2 else sum(b'"merger"' in x for x in journal.split(b"\n")) - merges
                assert report.asked == total - kept - unasked, cut

    asyncio.run(go())


def test_usage_is_restored_for_these_roles_and_kept_for_all_others(run: Path, tmp_path: Path) -> None:
    async def go() -> None:
        async with RuleRoles() as url:
            made, ledger = recipe(url), Ledger()

            async def once(ledger: Ledger) -> DistilReport:
                async with connect_roles(made.roles, made.distil, seed=0, ledger=ledger) as connected:
                    return await distil(
                        [run],
                        connected.roles,
                        None,
                        made.distil,
                        out=tmp_path / "out",
                        ledger=ledger,
                        in_flight=8,
                    )

            ledger.add("tutor", Price(), prompt=3, completion=4)
            first = await once(ledger)
            spent = first.usage["ocm"]
            assert spent["requests"] == first.asked > 50
            ledger.add("tutor", Price(), prompt=3, completion=4)
            await once(ledger)  # the same process goes on: nothing is lost, nothing counted twice
            assert ledger.state()["ocm"] == spent and ledger.usage("tutor").requests == 2
            fresh = Ledger()  # another process goes on
            fresh.add("tutor", Price(), prompt=9, completion=9)
            again = await once(fresh)
            assert again.asked == 0 and again.usage["ocm"] == spent
            assert fresh.usage("tutor").requests == 1, "the journal's run had used others too"

    asyncio.run(go())


@pytest.mark.slow
@pytest.mark.integration
def test_kills_at_random_points_change_nothing(tmp_path: Path) -> None:
    run = write_transcripts(tmp_path / "run", episodes=12, turns=4)
    role = {"model": "rule-ocm", "engine": {"kind": "chat", "urls": ["loopback"], "http": {"concurrency": 2}}}
    faults = {"malformed": 0.1, "contradiction": 0.05, "leak": 0.1, "seed": 3}
    (tmp_path / "r.yaml").write_text(
        yaml.safe_dump({"name": "t", "roles": {"ocm": role, "faults": faults}, "embedder": "hashing"})
    )

    def command(name: str) -> list[str]:
        out = str(tmp_path / name)
        return [sys.executable, "-m", "maieutic", "reat", "distil", str(run), "-r", str(tmp_path / "r.yaml"), "-o", out,
                "--repository", f"{out}/store"]  # fmt: skip

    def lines(name: str) -> int:
        path = tmp_path / name / "journal.jsonl"
        return path.read_bytes().count(b'"key"') if path.is_file() else 0

    def result(name: str) -> Any:
        with Repository.open(tmp_path / name / "store", read_only=True) as store:
            kept = sorted(store.experiences(every=True), key=lambda e: e.id)
        return kept, [(tmp_path / name / f).read_bytes() for f in FILES]

    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command("calm"), check=True, **quiet)
    total, killed_at = lines("calm"), []
    for point in sorted(random.sample(range(3, int(total * 0.9)), 4)):
        process = subprocess.Popen(command("killed"), **quiet)
        while lines("killed") < point and process.poll() is None:
            time.sleep(0.002)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, f"ended before {point} of {total}"
        killed_at.append(lines("killed"))
    subprocess.run(command("killed"), check=True, **quiet)
    assert result("killed") == result("calm"), killed_at
    keys = [
        json.loads(x)["key"]
        for x in (tmp_path / "killed" / "journal.jsonl").read_bytes().splitlines()
        if b'"key"' in x
    ]
    assert len(keys) == len(set(keys)), "no answer is kept twice"


def test_requests_that_failed_for_good_are_asked_again_on_demand(run: Path, tmp_path: Path) -> None:
    async def go() -> None:
        rules, ill = RuleRoles(), True

        def fault(number: int, body: dict[str, Any]) -> Any:
            return (
                web.Response(status=400, text="no")
                if ill and body["messages"][0]["content"].startswith("You are a critic")
                else None
            )

        server = Loopback(lambda body: rules.reply(body, int(body["seed"])), fault)
        await server.start()
        made = recipe(server.url)
        first = await play(made, run, tmp_path / "out")
        assert first.dropped["critic.engine_failed"] == first.meaningful == 24 and first.experiences == 0
        ill = False
        same = await play(made, run, tmp_path / "out")
        assert same.asked == 0 and same.dropped == first.dropped, "a plain resume keeps what is known"
        healed = await play(made, run, tmp_path / "out", retry_failed=True)
        assert healed.experiences > 5 and "critic.engine_failed" not in healed.dropped
        await server.stop()

    asyncio.run(go())


def test_a_dead_server_stops_the_distillation_and_keeps_what_is_done(run: Path, tmp_path: Path) -> None:
    async def go() -> None:
        made = recipe("http://127.0.0.1:9", http={"outage_limit_s": 0.2})
        with pytest.raises(EngineDownError):
            await play(made, run, tmp_path / "out")
        assert not (tmp_path / "out" / "report.json").exists()

    asyncio.run(go())


# ---- ablations -------------------------------------------------------------------------------------------------------


def test_without_the_gate_everything_distilled_is_admitted(run: Path, tmp_path: Path) -> None:
    with_gate, _ = distilled(run, tmp_path / "a", Notebook())
    without, _ = distilled(run, tmp_path / "b", Notebook(), gate=False)
    assert without.experiences == without.meaningful > with_gate.experiences
    assert set(without.dropped) == {"not_meaningful"} and set(without.rounds) <= {"0", "1"}
    low = [r["score"] for r in rows(tmp_path / "b", "experiences.jsonl") if r["score"] < 85]
    assert low


def test_gate_unrevised_off_lets_unrevised_turns_below_gamma_through(run: Path, tmp_path: Path) -> None:
    settings = {"tau_rev": 60.0, "tau_min": 0, "gamma": 85.0}
    strict, _ = distilled(run, tmp_path / "a", **settings)
    loose, _ = distilled(run, tmp_path / "b", gate_unrevised=False, **settings)
    assert strict.dropped["below_gate_unrevised"] > 0 and "below_gate_unrevised" not in loose.dropped
    assert loose.experiences == strict.experiences + strict.dropped["below_gate_unrevised"]


def test_without_rewriting_the_query_is_the_diagnosis(run: Path, tmp_path: Path) -> None:
    report, _ = distilled(run, tmp_path / "out", rewrite=False)
    kept = [Experience.model_validate(r["experience"]) for r in rows(tmp_path / "out", "experiences.jsonl")]
    assert {e.provenance.rewrite for e in kept} == {"off"} and "rewriter.requests" not in report.roles
    assert any(c.isdigit() for e in kept for c in e.query), "the problem's numbers are still there"


def test_one_round_is_fewer_experiences_than_three(run: Path, tmp_path: Path) -> None:
    one, _ = distilled(run, tmp_path / "a", rounds=1)
    three, _ = distilled(run, tmp_path / "b", rounds=3)
    assert one.experiences < three.experiences and "2" in three.rounds and set(one.rounds) <= {"0", "1"}


def test_merged_roles_ask_once_a_turn(run: Path, tmp_path: Path) -> None:
    report, server = distilled(run, tmp_path / "out", Notebook(), merged_roles=True)
    assert report.roles["reflection.requests"] == 30
    assert server.requests == 30 + report.experiences, "one reflection a turn and one rewriting an experience"
    assert report.experiences > 0 and "observer.requests" not in report.roles
    apart, _ = distilled(run, tmp_path / "apart", Notebook())
    assert report.turn_score == apart.turn_score, "the rules are the same, asked at once or apart"


# ---- settings and command --------------------------------------------------------------------------------------------


def test_the_defaults_are_the_stated_ones() -> None:
    d = DistilSection()
    found = (d.tau_rev, d.tau_min, d.gamma, d.rounds)
    assert found == (80.0, 2, 85.0, 3)
    assert d.gate and d.gate_unrevised and d.rewrite and not d.merged_roles and d.fallback == "masked"


def write_recipe(path: Path, **more: Any) -> Path:
    role = {"model": "rule-ocm", "engine": {"kind": "chat", "urls": ["loopback"]}}
    path.write_text(yaml.safe_dump({"name": "t", "roles": {"ocm": role}, "embedder": "hashing", **more}))
    return path


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"distil": {"gama": 90.0}},
            r"r\.yaml:\d+: distil\.gama: unknown key .*did you mean 'distil\.gamma'",
        ),
        ({"distil": {"gamma": 101.0}}, r"distil\.gamma: 101\.0 is not valid: expected a number ≤ 100"),
        ({"distil": {"tau_min": 2.5}}, r"distil\.tau_min: 2\.5 is not valid"),
        ({"distil": {"fallback": "maskd"}}, r"did you mean 'masked'"),
        ({"roles": {}}, r"roles\.ocm: required, but not given"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_distil_recipe(write_recipe(tmp_path / "r.yaml", **more))


def test_faults_without_a_loopback_role_are_refused(tmp_path: Path) -> None:
    role = {"model": "m", "engine": {"kind": "chat", "urls": ["http://127.0.0.1:1"]}}
    with pytest.raises(RecipeError, match="nobody would plant them"):
        load_distil_recipe(write_recipe(tmp_path / "r.yaml", roles={"ocm": role, "faults": {"leak": 0.1}}))


@pytest.mark.integration
def test_the_command_distils_into_a_repository(run: Path, tmp_path: Path) -> None:
    path, out = write_recipe(tmp_path / "r.yaml"), tmp_path / "out"
    command = [sys.executable, "-m", "maieutic", "reat", "distil", str(run), "-r", str(path), "-o", str(out)]
    done = subprocess.run(
        [*command, "--repository", str(tmp_path / "store"), "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((out / "report.json").read_text()) and report["turns"] == 30
    assert "30 of 30 turns" in done.stderr and "ETA" in done.stderr
    with Repository.open(tmp_path / "store", read_only=True) as store:
        assert len(store.experiences()) == report["admissions"]["inserted"] > 3
    bad = subprocess.run([*command, "--set", "distil.gamma=high"], capture_output=True, text=True)
    assert (
        bad.returncode == 2 and "override 'distil.gamma=high'" in bad.stderr and "Traceback" not in bad.stderr
    )


def test_the_shipped_recipe_distils_into_a_repository_that_is_not_doubled(run: Path, tmp_path: Path) -> None:
    written = load_distil_recipe("reat/distil")
    assert written.roles.rewriter is not None and written.roles.rewriter.model == "gpt-5-mini"
    assert all(r.sampling.temperature == 0 for r in written.roles.given) and written.distil.rounds == 3
    assert written.embedder == PAPER_MODEL
    sizes = []
    for out in ("one", "two"):
        given = ["reat", "distil", str(run), "--recipe", "reat/distil-cpu", "--out", str(tmp_path / out)]
        result = CliRunner().invoke(app, [*given, "--repository", str(tmp_path / "repository"), "--json"])
        assert result.exit_code == 0, result.output
        with Repository.open(tmp_path / "repository", read_only=True) as repository:
            repository.verify()
            sizes.append([(e.id, e.utility, e.uses) for e in repository.experiences(every=True)])
    assert sizes[0] and sizes[0] == sizes[1]
    assert (tmp_path / "one" / "experiences.jsonl").read_bytes() == (
        tmp_path / "two" / "experiences.jsonl"
    ).read_bytes()
