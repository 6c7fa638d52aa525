"""The chat: the environment's own dialogue with a person, thinking on demand, the post-test, and a terminal that is not steered."""

import json

import pytest
from typer.testing import CliRunner

from env_fakes import FakeGrader, FakeTutor, environment, pair, run
from maieutic.chat import HELP, Person, converse, printable
from maieutic.cli import app
from maieutic.dialogue import Turn


def talk(*said, tutor=None, test=False, thinking=False, **env):
    lines, shown = iter(said), []

    def read(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    person = Person(read, shown.append, thinking)
    made = environment(end_after=0, **env)
    episode = run(converse(made, tutor or FakeTutor(), pair(), person, FakeGrader(), seed=1, test=test))
    return episode, shown


def test_a_dialogue_to_its_end_and_the_post_test():
    tutor = FakeTutor(["What do you know?", Turn("tutor", "Well done.", end_token=True)])
    episode, shown = talk("3 and 4", "9", tutor=tutor, test=True)
    assert [(t.speaker, t.visible) for t in episode.dialogue.turns[1:]] == [
        ("tutor", "What do you know?"), ("student", "3 and 4"), ("tutor", "Well done.")
    ]  # fmt: skip
    assert (
        episode.dialogue.end == "end_token"
        and shown[1] == "tutor> What do you know?"
        and shown[2] == "tutor> Well done."
    )
    # The transfer problem is posed, and one answer is graded.
    assert (
        "variant" in shown[4]
        and episode.post_test.grades == ["right"]
        and shown[5] == "right (the answer is 9)"
    )


def test_the_turn_limit_is_the_environments():
    episode, shown = talk("a", "b", "c", max_turns=4)
    assert (len(episode.dialogue.turns), episode.dialogue.end, episode.post_test) == (4, "max_turns", None)
    assert shown[-1] == "(the dialogue has ended: max_turns)"


@pytest.mark.parametrize("command, tested", [("/test", True), ("/quit", False)])
def test_leaving(command, tested):
    episode, _ = talk("hm", command, "8", test=False)
    assert (episode.post_test is not None) == tested and episode.dialogue.end is None
    if tested:
        assert episode.post_test.grades == ["wrong"]


def test_end_of_input_ends_the_dialogue():
    episode, _ = talk("hm", test=True)
    assert episode.post_test is None and len(episode.dialogue.by("student")) == 2


def test_thinking_is_shown_on_demand_only():
    tutor = FakeTutor([Turn("tutor", "Why?", thinking="Ask for reasons.")])
    _, shown = talk("/think", "", "/what", "/quit", tutor=tutor)
    assert shown[1:] == ["tutor> Why?", "Ask for reasons.", HELP]
    _, shown = talk("/quit", tutor=FakeTutor([Turn("tutor", "Why?", thinking="Ask.")]), thinking=True)
    assert shown[1:] == ["  (thinks) Ask.", "tutor> Why?"]
    _, shown = talk("/think", "/quit")
    assert shown[-1] == "(this turn has no private thinking)"


def test_models_do_not_steer_the_terminal():
    assert printable("a\x1b[2J\u202eb\r\nc\td") == "a[U+001B][2J[U+202E]b\nc\td"
    _, shown = talk("/quit", tutor=FakeTutor(["\x1b]0;x\x07hi"]))
    assert shown[1] == "tutor> [U+001B]]0;x[U+0007]hi"


@pytest.mark.integration
def test_the_command_with_a_real_micro_tutor(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "name: t\nexperiment: micro/full\narms: {tutor: {model: micro/tutor, dtype: float32}}\noffline: true\n"
    )
    arguments = [
        "chat",
        "tutor",
        "--recipe",
        str(recipe),
        "--save",
        str(tmp_path / "t.jsonl"),
        "--problem",
        "3",
    ]
    done = CliRunner().invoke(app, arguments, input="i do not know\n/test\n12\n")
    assert done.exit_code == 0, done.output
    assert done.output.count("tutor> ") == 2 and "Test, without the tutor" in done.output
    (line,) = [json.loads(x) for x in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert (
        line["arm"] == "tutor"
        and len(line["dialogue"]["turns"]) == 4
        and len(line["post_test"]["grades"]) == 1
    )
    assert line["dialogue"]["turns"][1]["visible_tokens"] > 0
    done = CliRunner().invoke(app, [*arguments[:-1], "99999"])
    assert done.exit_code == 2 and "no held-out problem 99999" in done.output + str(done.stderr)
    unwritable = [*arguments[:5], str(tmp_path / "no" / "t.jsonl")]
    done = CliRunner().invoke(app, unwritable, input="never read\n")
    assert done.exit_code == 1 and "the transcript cannot be written" in done.output + str(done.stderr)
    assert "tutor> " not in done.output, "known before the talk, not after it"
