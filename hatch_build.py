"""Build hook: an installed wheel carries the repository's top-level `envs/`, `recipes/` and `data/`.

Only a standard wheel gets the copies: an editable install reads the folders themselves, and copies of them in
site-packages would go stale.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SHARED_FOLDERS = ("envs", "recipes", "data")


class ShareFolders(BuildHookInterface):
    """Adds `<folder>` as `maieutic/_share/<folder>` to a standard wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version` is hatch's name of the build kind: `standard` or `editable`."""
        if version == "standard":
            build_data["force_include"].update({name: f"maieutic/_share/{name}" for name in SHARED_FOLDERS})
