"""From a REAT recipe to its parts: endpoints, student, teachers, roles, repositories. Live only inside ``async with``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maieutic.config import EngineSpec, RewardSpec, StudentSpec
from maieutic.engines.base import Sampling
from maieutic.engines.connect import connect_chat
from maieutic.env.base import Episode, Tutor
from maieutic.env.build import make_environment
from maieutic.env.student import ModelStudent
from maieutic.errors import RecipeError
from maieutic.evaluation.cache import CostLedger, ResponseCache
from maieutic.evaluation.config import ArmSpec
from maieutic.evaluation.tutor_arm import open_arm
from maieutic.latent.tasks import bounded
from maieutic.problems.loaders import read_pairs
from maieutic.problems.schema import ProblemPair
from maieutic.problems.splits import drop_overlap, split_pairs
from maieutic.reat.config import ReatRecipe, RunProblems
from maieutic.reat.connect import Connected, connect_roles
from maieutic.reat.distil_config import LOOPBACK, DistilSection, OcmRole, OcmRoles
from maieutic.reat.embeddings import Embedder, make_embedder
from maieutic.reat.fields import load_fields
from maieutic.reat.live import LiveObserver
from maieutic.reat.persona import PersonaEnvironment, assign, load_personas
from maieutic.reat.repository import Repository
from maieutic.reat.retrieval import RetrievalSettings
from maieutic.reat.roles import RoleChat
from maieutic.reat.sources import RepositorySource
from maieutic.reat.tutor import ReatTutor, Round
from maieutic.reat.world_roles import WorldRoles, WorldServer
from maieutic.seeds import derive


@dataclass(frozen=True)
class ProblemSets:
    """Batches that experience is made from, held-out splits, other data sets; each pair carries its persona."""

    batches: list[list[ProblemPair]]
    splits: list[list[ProblemPair]]
    others: dict[str, list[ProblemPair]]


def load_problem_sets(recipe: ReatRecipe) -> ProblemSets:
    """The sets of a recipe. No text of a held-out problem occurs in a batch. Raises :class:`RecipeError` for too few problems."""
    spec = recipe.problems
    every = read_pairs(
        spec.source, split=spec.split, config=spec.config, offline=recipe.offline, options=spec.options
    )
    held = spec.splits * spec.split_size
    if spec.test_source is None:
        parted = split_pairs(every, held, recipe.seed)
        train, test = parted.train, parted.held_out
    else:
        test = read_pairs(
            spec.test_source, split=spec.test_split, config=spec.config, offline=recipe.offline
        )[:held]
        train, _ = drop_overlap(every, test)
    need = spec.batches * spec.batch_size if recipe.grow else 0
    for what, pairs, size in (("batches", train, need), ("held-out splits", test, held)):
        if len(pairs) < size:
            raise RecipeError(
                f"problems: {len(pairs)} problems for {what} of {size}: lower their number or size"
            )
    others = {
        name: _personas(
            read_pairs(d.source, split=d.split, config=d.config, offline=recipe.offline)[: d.size], recipe
        )
        for name, d in recipe.transfer.problems.items()
    }
    return ProblemSets(
        _parts(train[:need], spec.batch_size, recipe), _parts(test, spec.split_size, recipe), others
    )


def _parts(pairs: Sequence[ProblemPair], size: int, recipe: ReatRecipe) -> list[list[ProblemPair]]:
    return [_personas(pairs[i : i + size], recipe) for i in range(0, len(pairs), size)]


def _personas(pairs: Sequence[ProblemPair], recipe: ReatRecipe) -> list[ProblemPair]:
    spec: RunProblems = recipe.problems
    personas = load_personas(recipe.env.name)
    return assign(pairs, personas, per_problem=spec.personas_per_problem, seed=spec.persona_seed)


@dataclass
class Played:
    """The dialogues of one arm, and what its tutor noted."""

    episodes: list[Episode]
    rounds: list[Round]
    counts: dict[str, int]


@dataclass
class ReatClassroom:
    """Everything that plays and judges."""

    recipe: ReatRecipe
    ledger: CostLedger = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = CostLedger(self.recipe.spending_limit_usd)
        self._embedder: Embedder | None = None

    async def __aenter__(self) -> ReatClassroom:
        recipe = self.recipe
        self._stack = AsyncExitStack()
        self.world: WorldServer | None = None
        self._url = ""
        if LOOPBACK in recipe.model_dump_json():
            self.world = WorldServer(WorldRoles(faults=recipe.faults))
            self._url = await self._stack.enter_async_context(self.world)
        env = make_environment(recipe.env, RewardSpec())
        if not isinstance(env, PersonaEnvironment):
            await self._stack.aclose()
            raise RecipeError(
                f"env.kind is {recipe.env.kind}: a REAT run plays maieutic.reat.persona:PersonaEnvironment"
            )
        self.env = env
        self.fields = load_fields(recipe.env.name)
        s = recipe.roles.student
        engine = self._placed(s.engine)
        chat = connect_chat(engine, s.model, role="student", ledger=self.ledger)
        self._stack.push_async_callback(chat.close)
        spec = StudentSpec(name=s.model, model=s.model, engine=engine, sampling=s.sampling)
        self.student = ModelStudent(chat, spec, env.templates, env.env)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._stack.aclose()

    def _placed(self, engine: EngineSpec) -> EngineSpec:
        return engine.model_copy(update={"urls": [self._url if u == LOOPBACK else u for u in engine.urls]})

    def _role(self, role: OcmRole) -> OcmRole:
        return role.model_copy(update={"engine": self._placed(role.engine)})

    def _arm(self, spec: ArmSpec) -> ArmSpec:
        inner = None if spec.inner is None else self._arm(spec.inner)
        return spec.model_copy(update={"engine": self._placed(spec.engine), "inner": inner})

    @asynccontextmanager
    async def roles(self, spec: OcmRoles, settings: DistilSection | None = None) -> AsyncIterator[Connected]:
        """The OCM roles of a section, on their endpoints."""
        placed = {
            name: self._role(role)
            for name in OcmRoles.model_fields
            if (role := getattr(spec, name)) is not None
        }
        async with connect_roles(
            spec.model_copy(update=placed),
            settings or self.recipe.distil,
            seed=self.recipe.seed,
            ledger=self.ledger,
        ) as connected:
            yield connected

    # ---- repositories ----------------------------------------------------------------------------------------------------

    @property
    def embedder(self) -> Embedder:
        """The recipe's, loaded once."""
        if self._embedder is None:
            self._embedder = make_embedder(self.recipe.embedder, offline=self.recipe.offline)
        return self._embedder

    def open_repository(self, folder: Path, *, read_only: bool = True, **more: Any) -> Repository:
        """A repository in a folder (made where it is missing, unless ``read_only``)."""
        return Repository.open(
            folder, embedder=self.embedder, settings=self.recipe.repository, read_only=read_only, **more
        )

    # ---- playing -----------------------------------------------------------------------------------------------------------

    def live_observer(self, stack: AsyncExitStack, *, rewrite: bool = True) -> LiveObserver:
        """The Observer while tutoring, with an empty memory; its connections are closed with ``stack``."""
        roles = self.recipe.roles

        def connect(name: str, role: OcmRole) -> RoleChat:
            role = self._role(role)
            chat = connect_chat(role.engine, role.model, role=name, ledger=self.ledger)
            stack.push_async_callback(chat.close)
            s = role.sampling
            return RoleChat(
                name,
                chat,
                Sampling(s.temperature, s.top_p, s.max_tokens),
                self.recipe.distil.reasks,
                role.structured,
            )

        observer = roles.live or roles.ocm.observer or roles.ocm.ocm
        second = None if roles.live_rewriter is None else connect("live_rewriter", roles.live_rewriter)
        return LiveObserver(
            connect("live_observer", observer),
            second,
            rewrite=rewrite,
            fallback=self.recipe.distil.fallback,
            retries=self.recipe.distil.rewrite_retries,
        )

    async def play(
        self,
        where: str,
        arm: str,
        pairs: Sequence[ProblemPair],
        *,
        tutor: ArmSpec,
        repository: Repository | None,
        retrieval: RetrievalSettings | None = None,
        rewrite: bool = True,
        step: int = 0,
    ) -> Played:
        """One dialogue a pair. Seeds and personas follow from ``where`` and the pair alone: they are the same for every arm.

        ``repository``: None plays with empty fields. Episodes come back in the order of the pairs; a lost one is excluded, not
        scored.
        """
        recipe, env = self.recipe, self.env
        async with AsyncExitStack() as stack:
            opened = open_arm(
                "tutor",
                self._arm(tutor),
                self.ledger,
                ResponseCache(None),
                templates=env.templates,
                env=env.env,
                offline=recipe.offline,
            )
            stack.push_async_callback(opened.close)
            await opened.start()
            inner: Tutor = opened.tutor(env.templates, env.env)
            if repository is None:
                teacher = ReatTutor(inner, self.fields)
                observer = None
            else:
                observer = self.live_observer(stack, rewrite=rewrite)
                source = RepositorySource(repository, retrieval or recipe.retrieval)
                teacher = ReatTutor(inner, self.fields, observer, source)

            async def one(pair: ProblemPair) -> Episode:
                return await env.play(
                    teacher,
                    self.student,
                    None,
                    None,
                    pair,
                    seed=derive(recipe.seed, where, pair.id),
                    id=f"{where}/{arm}/{pair.id}",
                    group_id=pair.id,
                    phase="eval",
                    step=step,
                )

            episodes = await bounded(pairs, one, recipe.concurrency)
        counts = dict(teacher.counts)
        if observer is not None:
            counts |= {f"observer.{k}": v for k, v in observer.counts.items()}
        return Played(episodes, teacher.rounds, counts)
