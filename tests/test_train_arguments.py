"""The command line of a training run: where recipe, overrides and the checkpoint may stand."""

from __future__ import annotations

import pytest

from maieutic.errors import RecipeError
from maieutic.train import parse


@pytest.mark.parametrize(
    "argv",
    [
        ["r.yaml", "a=1", "b=2", "--resume", "auto"],
        ["r.yaml", "--resume", "auto", "a=1", "b=2"],
        ["--resume=auto", "r.yaml", "a=1", "b=2"],
        ["r.yaml", "a=1", "--resume", "auto", "b=2"],
        ["r.yaml", "a=1", "resume=auto", "b=2"],
    ],
)
def test_options_may_stand_anywhere(argv: list[str]) -> None:
    assert parse(argv) == ("r.yaml", ["a=1", "b=2"], "auto")


def test_resume_twice_or_empty_is_refused() -> None:
    assert parse(["r.yaml"]) == ("r.yaml", [], None)
    assert parse(["r.yaml", "resume=auto", "--resume", "auto"]) == ("r.yaml", [], "auto")
    with pytest.raises(RecipeError, match="resume is given twice: 'auto' and 'x'"):
        parse(["r.yaml", "--resume", "auto", "resume=x"])
    with pytest.raises(RecipeError, match="names no checkpoint"):
        parse(["r.yaml", "resume="])
