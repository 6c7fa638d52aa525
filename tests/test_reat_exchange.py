"""Export and import of a repository, and the commands that look at one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from maieutic.reat.cli import app
from maieutic.reat.embeddings import make_embedder
from maieutic.reat.exchange import export_file, import_file
from maieutic.reat.records import RepositoryError, RepositoryVersionError
from maieutic.reat.repository import Repository
from maieutic.reat.schema import Experience
from reat_support import GROUP, admit, bits, check_whole, experience, needs_faiss, open_bits, write_story

needs_faiss()


def everything(repository: Repository) -> list:
    """All rows and histories but the vectors, the time and the event of the import."""
    with repository.database.reading():
        select = repository.database.select
        return [
            select(
                "SELECT seq, id, content, utility, uses, trial, status, reason, replaced_by FROM experiences"
            ),
            select("SELECT id, outcome, target, similarity, score, content, note, at FROM admissions"),
            select(
                "SELECT experience, kind, score, before, after, source, at FROM events WHERE kind <> 'imported' "
                "ORDER BY experience, n"
            ),
        ]


@pytest.fixture
def full(tmp_path: Path):
    with open_bits(tmp_path / "full") as repository:
        write_story(repository, 20)
        (first, *_) = repository.experiences()
        repository.disable(first.id, "by hand")
        assert min(check_whole(repository).values()) > 0
        yield repository


def test_what_was_exported_comes_back(tmp_path: Path, full: Repository) -> None:
    rows = export_file(full.database, tmp_path / "e.jsonl")
    with open_bits(tmp_path / "new") as new:
        done = import_file(new, tmp_path / "e.jsonl")
        assert (done.added, done.present, done.admissions) == (rows, 0, 20)
        assert everything(new) == everything(full)
        assert {e.id: e for e in new.experiences(every=True)} == {
            e.id: e for e in full.experiences(every=True)
        }
        check_whole(new)
        again = import_file(new, tmp_path / "e.jsonl")
        assert (again.added, again.present, again.admissions) == (0, rows, 0)
        before = everything(new)
        write_story(new, 20)  # a distillation that is resumed on the copy doubles nothing
        assert everything(new) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e.jsonl", "full", "new"]


def test_into_a_repository_that_has_some_of_it(tmp_path: Path, full: Repository) -> None:
    with open_bits(tmp_path / "new") as new:
        own = experience(bits(0xFFFF), GROUP[2], 999)
        admit(new, own, 77)
        export_file(new.database, tmp_path / "own.jsonl")
        export_file(full.database, tmp_path / "e.jsonl")
        import_file(new, tmp_path / "e.jsonl")
        assert new.get(own.id).utility == 77
        assert len(new.experiences(every=True)) == 1 + len(full.experiences(every=True))
        check_whole(new)
        assert import_file(full, tmp_path / "own.jsonl").added == 1


def test_with_another_embedder(tmp_path: Path, full: Repository) -> None:
    export_file(full.database, tmp_path / "e.jsonl")
    with Repository.open(tmp_path / "new", embedder=make_embedder("hashing-64")) as new:
        import_file(new, tmp_path / "e.jsonl")
        new.verify()
        text = full.experiences()[-1]
        assert text.id in [t.experience.id for t in new.retrieve(text.tags, text.query).taken]


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda ls: ['{"a": 1}', *ls[1:]], "not an export"),
        (lambda ls: [ls[0], "{", *ls[1:]], "line 2: not JSON"),
        (
            lambda ls: [ls[0], ls[1].replace('"utility"', '"usefulness"', 1), *ls[2:]],
            "line 2: not an exported",
        ),
        (
            lambda ls: [ls[0], ls[1].replace("ask first", "tell first", 1), *ls[2:]],
            "(?s)line 2.*does not belong",
        ),
        (lambda ls: [], "not an export"),
    ],
)
def test_a_spoilt_file_changes_nothing(tmp_path: Path, full: Repository, spoil, message: str) -> None:
    file = tmp_path / "e.jsonl"
    export_file(full.database, file)
    lines = spoil(file.read_text().splitlines())
    file.write_text("\n".join(lines) + "\n" if lines else "")
    with open_bits(tmp_path / "new") as new:
        with pytest.raises(RepositoryError, match=message):
            import_file(new, file)
        assert len(new) == 0


def test_a_file_of_a_newer_release_is_refused_by_name(tmp_path: Path, full: Repository) -> None:
    file = tmp_path / "e.jsonl"
    export_file(full.database, file)
    file.write_text(file.read_text().replace('"schema": 1', '"schema": 9', 1))
    with open_bits(tmp_path / "new") as new:
        with pytest.raises(RepositoryVersionError, match="schema 9"):
            import_file(new, file)


# ---- commands


def call(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, Experience]:
    e = experience("mixes up rate and total", GROUP[0])
    with Repository.open(tmp_path / "r", embedder=make_embedder("hashing"), merge=None) as repository:
        repository.settings = repository.settings.model_copy(update={"no_merging": True, "min_uses": 1})
        admit(repository, e, 70)
        repository.update_utility(e.id, 0, source="e/1")
    return tmp_path / "r", e


def test_inspect_says_what_is_there(folder: tuple[Path, Experience]) -> None:
    where, e = folder
    found = json.loads(call("inspect", where, "--verify"))
    assert found["experiences"] == {"enabled": 0, "disabled": 1, "replaced": 0}
    assert (found["pruned"], found["admissions"], found["scored_uses"]) == (1, {"inserted": 1}, 1)
    assert (found["embedder"], found["utility"], found["states"]) == ("hashing-384", None, {})
    one = json.loads(call("inspect", where, "--id", e.id))
    assert (one["status"], one["reason"], one["experience"]["utility"]) == ("disabled", "pruned", 56)
    assert [x["kind"] for x in one["events"]] == ["inserted", "utility", "disabled"]
    listed = json.loads(call("inspect", where, "--disabled"))
    assert (listed["id"], listed["reason"], listed["advice"]) == (e.id, "pruned", "ask first")
    assert "no experience 'x'" in call("inspect", where, "--id", "x", code=2)
    assert "no experience repository" in call("inspect", where.parent, code=2)


def test_enable_export_and_import(folder: tuple[Path, Experience], tmp_path: Path) -> None:
    where, e = folder
    assert call("enable", where, e.id) == f"{e.id} enabled\n"
    assert call("enable", where, e.id) == f"{e.id} was enabled already\n"
    assert json.loads(call("inspect", where))["states"] == {e.tags.key(): 1}
    file = tmp_path / "e.jsonl"
    assert call("export", where, file) == f"1 experiences in {file}\n"
    assert call("import", tmp_path / "copy", file) == "1 added, 0 there already, 1 admissions\n"
    assert json.loads(call("inspect", tmp_path / "copy"))["embedder"] == "hashing-384"
    call("import", tmp_path / "small", file, "--embedder", "hashing-32")
    assert json.loads(call("inspect", tmp_path / "small"))["embedder"] == "hashing-32"
    assert "cannot be read" in call("import", tmp_path / "c", tmp_path / "none", code=2)


def test_a_damaged_export_adds_nothing_and_is_named(tmp_path: Path, full: Repository) -> None:
    file = tmp_path / "e.jsonl"
    export_file(full.database, file)
    head, first, *_, last = file.read_text().splitlines()
    entry, admission = json.loads(first), json.loads(last)

    def changed(record: dict, kind: str, **more: object) -> str:
        return json.dumps({kind: record[kind] | more})

    bad = [
        (b"\x7fELF\xd0\n", "line 1: not JSON"),
        (b"[" * 50_000, "line 1: not JSON"),
        (json.dumps({"format": "maieutic-experiences"}).encode(), "line 1: schema is to be a number"),
        (head.replace('"schema": 1', '"schema": "x"').encode(), "line 1: schema is to be a number"),
        *(
            (f"{head}\n{line}\n".encode(), "line 2: not an exported record")
            for line in (
                changed(entry, "experience", status="gone"),
                changed(entry, "experience", events=[]),
                changed(entry, "experience", events=[{"kindx": "inserted"}]),
                changed(entry, "experience", trial="x"),
                changed(entry, "experience", replaced_by=[1]),
                changed(entry, "experience", utility=float("nan")),
                changed(admission, "admission", outcome="lost"),
                changed(admission, "admission", at="yesterday"),
                json.dumps({"experience": 3}),
                "{}",
            )
        ),
    ]
    with open_bits(tmp_path / "new") as new:
        for data, message in bad:
            file.write_bytes(data)
            with pytest.raises(RepositoryError, match=message):
                import_file(new, file)
            assert not new.experiences(every=True), data
        for place in (tmp_path / "no" / "e.jsonl", tmp_path):
            with pytest.raises(RepositoryError, match="cannot be written"):
                export_file(full.database, place)
    with pytest.raises(RepositoryError, match="cannot be made"):
        open_bits(file / "new")
