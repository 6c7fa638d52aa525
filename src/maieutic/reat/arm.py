"""REAT around a tutor by plain options: as an arm of an evaluation, and as an environment of training.

In a recipe of ``maieutic evaluate``::

    arms:
      reat:        {kind: "maieutic.reat.arm:ReatArm", inner: {kind: chat, …}, options: {repository: …, observer: {…}}}
      prompt_only: {kind: "maieutic.reat.arm:ReatArm", inner: {kind: chat, …}, options: {}}

Without a repository the experience fields stay empty: the controlled comparison of the two needs both arms made this way.
``observer`` is ``{model: …, engine: {kind: chat, urls: […]}}``, with ``rewriter`` of the same form for the paper's two calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from maieutic.config import EnvSpec, RewardSpec
from maieutic.dialogue import Dialogue, Turn
from maieutic.engines.base import Sampling
from maieutic.engines.connect import connect_chat
from maieutic.engines.usage import Ledger
from maieutic.env.base import Episode, Student, Tutor
from maieutic.env.play import Environment
from maieutic.env.prompts import EnvTemplates
from maieutic.errors import RecipeError
from maieutic.reat.distil_config import OcmRole
from maieutic.reat.embeddings import PAPER_MODEL, make_embedder
from maieutic.reat.fields import Fields, load_fields
from maieutic.reat.live import LiveObserver
from maieutic.reat.persona import PersonaEnvironment
from maieutic.reat.repository import Repository
from maieutic.reat.retrieval import RetrievalSettings
from maieutic.reat.roles import RoleChat
from maieutic.reat.sources import RepositorySource
from maieutic.reat.tutor import ReatTutor


class Experience:
    """What fills the fields: a repository, read only, and the live Observer's models.

    Args:
        repository: folder; None: nothing does, the fields stay empty.
        observer, rewriter: ``{model, engine, sampling, structured}``; ``rewriter`` makes it the paper's two calls.
        retrieval: settings of :class:`~maieutic.reat.retrieval.RetrievalSettings`.
        env: the environment whose ``experience.txt`` words the fields.

    Raises :class:`RecipeError` for options that do not fit together or are not valid.
    """

    def __init__(
        self,
        *,
        repository: str | None = None,
        observer: Mapping[str, Any] | None = None,
        rewriter: Mapping[str, Any] | None = None,
        embedder: str = PAPER_MODEL,
        offline: bool = False,
        retrieval: Mapping[str, Any] | None = None,
        env: str = "persona",
    ) -> None:
        self.fields: Fields = load_fields(env)
        self.ledger = Ledger()
        self.observer: LiveObserver | None = None
        self.source: RepositorySource | None = None
        if repository is None:
            if observer or rewriter or retrieval:
                raise RecipeError(
                    "observer, rewriter and retrieval are given but no repository to retrieve from"
                )
            return
        if observer is None:
            raise RecipeError(f"repository {repository} is given but no observer to read the student's state")
        try:
            settings = RetrievalSettings.model_validate(dict(retrieval or {}))
            roles = [OcmRole.model_validate(dict(o)) for o in (observer, rewriter) if o is not None]
        except ValidationError as error:
            item = error.errors(include_url=False)[0]
            key = ".".join(str(p) for p in item["loc"])
            raise RecipeError(f"options of REAT: {key}: {item['input']!r}: {item['msg']}") from error
        chats = [
            self._connect(name, role) for name, role in zip(("observer", "rewriter"), roles, strict=False)
        ]
        self.observer = LiveObserver(chats[0], chats[1] if len(chats) > 1 else None)
        opened = Repository.open(
            repository, embedder=make_embedder(embedder, offline=offline), read_only=True
        )
        self.source = RepositorySource(opened, settings)

    def _connect(self, name: str, role: OcmRole) -> RoleChat:
        chat = connect_chat(role.engine, role.model, role=f"live_{name}", ledger=self.ledger)
        s = role.sampling
        return RoleChat(
            name, chat, Sampling(s.temperature, s.top_p, s.max_tokens), structured=role.structured
        )

    def around(self, tutor: Tutor) -> ReatTutor:
        """The tutor with the fields, filled where there is a repository."""
        return ReatTutor(tutor, self.fields, self.observer, self.source)

    async def close(self) -> None:
        """Close models and repository."""
        if self.observer is not None:
            await self.observer.close()
        if self.source is not None:
            self.source.repository.close()


class ReatArm:
    """A :class:`~maieutic.env.base.Tutor` for ``maieutic evaluate``; options as for :class:`Experience`."""

    def __init__(self, inner: Tutor, **options: Any) -> None:
        self._experience = Experience(**options)
        self._tutor = self._experience.around(inner)

    async def reply(self, dialogue: Dialogue, *, seed: int) -> Turn | None:
        return await self._tutor.reply(dialogue, seed=seed)

    async def start(self) -> None:
        """Start the wrapped tutor."""
        await self._tutor.start()

    async def close(self) -> None:
        """Close what this arm has opened; the wrapped tutor too."""
        close = getattr(self._tutor.inner, "close", None)
        if close is not None:
            await close()
        await self._experience.close()

    @staticmethod
    def identity(options: Mapping[str, Any]) -> dict[str, Any]:
        """What decides the arm's words beyond its options: which repository this is, and how far it has come."""
        folder = options.get("repository")
        if folder is None:
            return {}
        with Repository.open(Path(folder), read_only=True) as repository:
            return {"repository": repository.database.uuid, "generation": repository.database.generation}


class _Experienced(Environment):
    """Mixed in before an environment: every tutor that plays in it gets the fields."""

    experience: Experience

    async def play(self, tutor: Tutor, student: Student, *args: Any, **kwargs: Any) -> Episode:
        """As the environment below, with the tutor's fields filled. The token record stays the policy's own."""
        return await super().play(self.experience.around(tutor), student, *args, **kwargs)

    async def close(self) -> None:
        """Close the Observer's models and the repository."""
        await self.experience.close()


class ExperiencedTutoring(_Experienced):
    """Near-transfer tutoring whose tutor reads experience (``env.kind``); all of ``env.options`` is for :class:`Experience`."""

    def __init__(self, env: EnvSpec, reward: RewardSpec, templates: EnvTemplates, **options: Any) -> None:
        super().__init__(env, reward, templates)
        self.experience = Experience(**{"env": env.name, **options})


class ExperiencedPersona(_Experienced, PersonaEnvironment):
    """The persona environment whose tutor reads experience (``env.kind``).

    ``env.options.experience`` is for :class:`Experience`, the rest for :class:`~maieutic.reat.persona.PersonaEnvironment`.
    """

    def __init__(
        self,
        env: EnvSpec,
        reward: RewardSpec,
        templates: EnvTemplates,
        *,
        experience: Mapping[str, Any],
        **options: Any,
    ) -> None:
        PersonaEnvironment.__init__(self, env, reward, templates, **options)
        self.experience = Experience(**{"env": env.name, **experience})
