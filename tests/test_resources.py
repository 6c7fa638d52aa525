"""Shipped folders: found in a checkout and in an installed wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from maieutic import resources
from maieutic.errors import MaieuticError, RecipeError

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up installed package with two recipes and one environment."""
    package = tmp_path / "site-packages" / "maieutic"
    for name in [
        "envs/near_transfer/env.yaml",
        "recipes/smollm2/dppo.yaml",
        "recipes/smollm2/README.md",
        "recipes/top.yaml",
        "recipes/accelerate/ddp.yaml",
        "data/pairs.jsonl",
    ]:
        file = package / "_share" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(resources, "_PACKAGE", package)
    return package / "_share"


@pytest.mark.parametrize("kind", resources.KINDS)
def test_checkout_uses_its_own_folders(kind: resources.Kind) -> None:
    assert resources.share_dir(kind) == REPO / kind


def test_installed_package_uses_its_copies(shipped: Path) -> None:
    assert resources.share_dir("recipes") == shipped / "recipes"
    assert resources.list_recipes() == ["smollm2/dppo", "top"]
    with pytest.raises(MaieuticError, match="no shared folder 'papers'"):
        resources.share_dir("papers")  # type: ignore[arg-type]


def test_package_without_folders_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path / "maieutic")
    with pytest.raises(MaieuticError, match="came without its 'envs' folder"):
        resources.share_dir("envs")


@pytest.mark.parametrize(
    "name", ["smollm2/dppo", "smollm2/dppo.yaml", "recipes/smollm2/dppo.yaml", "./recipes/smollm2/dppo"]
)
def test_recipe_by_name(shipped: Path, name: str) -> None:
    assert resources.find_recipe(name) == shipped / "recipes" / "smollm2" / "dppo.yaml"


def test_own_file_wins_over_a_shipped_recipe(shipped: Path) -> None:
    own = Path("recipes/smollm2/dppo.yaml").absolute()
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    assert resources.find_recipe("recipes/smollm2/dppo.yaml") == own


@pytest.mark.parametrize("name", ["smollm2/dpo", "../data/pairs.jsonl", "smollm2", "smollm2/README.md", ""])
def test_missing_recipe_is_a_named_error(shipped: Path, name: str) -> None:
    with pytest.raises(RecipeError, match="no recipe"):
        resources.find_recipe(name)
    with pytest.raises(RecipeError, match="did you mean 'smollm2/dppo'"):
        resources.find_recipe("smollm2/dpo")


def test_environment_by_name_or_folder(shipped: Path, tmp_path: Path) -> None:
    assert resources.find_env("near_transfer") == shipped / "envs" / "near_transfer"
    own = tmp_path / "my_env"
    own.mkdir()
    (own / "env.yaml").write_text("")
    assert resources.find_env(own) == own
    with pytest.raises(RecipeError, match="did you mean 'near_transfer'"):
        resources.find_env("near-transfer")


def test_copied_recipes_are_complete_and_safe(shipped: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    written = resources.copy_recipes(target)
    names = ["accelerate/ddp.yaml", "smollm2/README.md", "smollm2/dppo.yaml", "top.yaml"]
    assert sorted(file.relative_to(target).as_posix() for file in written) == names
    assert (target / "smollm2" / "dppo.yaml").read_text() == "recipes/smollm2/dppo.yaml"
    (target / "top.yaml").write_text("edited")
    with pytest.raises(MaieuticError, match="exists already"):
        resources.copy_recipes(target)
    assert (target / "top.yaml").read_text() == "edited"
    resources.copy_recipes(target, replace=True)
    assert (target / "top.yaml").read_text() == "recipes/top.yaml"


@pytest.mark.integration
def test_wheel_carries_the_folders(tmp_path: Path) -> None:
    """Builds a wheel and imports the package from it, far from the checkout."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(tmp_path),
        str(REPO),
    ]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode and "hatchling" in done.stderr:
        pytest.skip(f"the package index has no hatchling to build with: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("maieutic-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    assert "maieutic/py.typed" in names
    tracked = subprocess.check_output(
        ["git", "-C", str(REPO), "ls-files", *resources.KINDS], text=True
    ).split()
    present = [name for name in tracked if (REPO / name).is_file()]
    assert present and {f"maieutic/_share/{name}" for name in present} <= names
    code = "from maieutic.resources import *; print(*(share_dir(kind) for kind in KINDS), sep='\\n')"
    path = os.pathsep.join(
        [str(tmp_path / "site"), *(entry for entry in sys.path if "site-packages" in entry)]
    )
    out = subprocess.check_output(
        [sys.executable, "-c", code], text=True, cwd=tmp_path, env={"PYTHONPATH": path}
    )
    assert out.splitlines() == [
        str(tmp_path / "site" / "maieutic" / "_share" / kind) for kind in resources.KINDS
    ]
