"""Which servers a recipe needs, how many GPUs each takes, and where on the job's nodes everything goes (pure, torch-free).

Servers belong to the job that they serve, as steps of it: they start, are requeued and end with the training. Trainers take the
first GPUs of the first nodes; servers fill what is left there, then further nodes, first fit. Each gets a fixed slice of its
node's GPUs, because overlapping steps of a job would otherwise all see all of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from maieutic.config import EngineSpec, Recipe
from maieutic.errors import RecipeError
from maieutic.slurm.site import Site

ENDPOINTS = "MAIEUTIC_ENDPOINTS"
"""Environment variable of every job: the folder in which its servers publish their addresses."""
_UNPLAIN = re.compile(r"[^A-Za-z0-9_-]+")
_SIZES = {
    "--tensor-parallel-size": "-tp",
    "--pipeline-parallel-size": "-pp",
    "--data-parallel-size": "-dp",
}


@dataclass(frozen=True, slots=True)
class Role:
    """One model to serve: for the tutor, one of the students, or the judge."""

    role: str
    student: str | None
    """The student's name, where the recipe has several that are served."""
    gpus: int
    """Of one server: tensor × pipeline × data parallel size, from ``engine.serve_args``."""

    @property
    def name(self) -> str:
        """Of its address files, its log and its step: plain words, whatever the student is called.

        Without dots, so that the pattern of ``qwen2`` does not take the servers of ``qwen2.5``.
        """
        return self.role if self.student is None else f"{self.role}-{_UNPLAIN.sub('-', self.student)}"

    @property
    def pattern(self) -> str:
        """What the recipe's ``engine.urls`` says."""
        return f"file:${ENDPOINTS}/{self.name}.[0-9]*.json"


@dataclass(frozen=True, slots=True)
class PlacedServer:
    role: Role
    number: int
    node: int
    """Index in the job's list of nodes."""
    gpus: tuple[int, int] | None
    """First and last of the node's GPUs; None without GPUs."""

    @property
    def name(self) -> str:
        return f"{self.role.name}.{self.number}"


@dataclass(frozen=True, slots=True)
class Placement:
    """A job's nodes: trainers on the first ``train_nodes``, with ``processes`` each."""

    nodes: int
    train_nodes: int
    processes: int
    servers: tuple[PlacedServer, ...]


def is_ours(engine: EngineSpec) -> bool:
    """Addresses are read from files: a server that this job starts. ``http…`` ones are somebody else's."""
    return engine.kind != "hf" and any(u.startswith("file:") for u in engine.urls)


def served_roles(recipe: Recipe, *, tutor: bool = True, judge: bool = True) -> list[Role]:
    """The roles whose servers the job starts, in the order tutor, students, judge."""
    roles = []
    if tutor and is_ours(recipe.tutor.engine):
        roles.append(_role("tutor", None, recipe.tutor.engine))
    for spec in recipe.students:
        if spec.kind == "model" and is_ours(spec.engine):
            roles.append(_role("student", spec.name if len(recipe.students) > 1 else None, spec.engine))
    if judge and recipe.judge.kind == "llm" and is_ours(recipe.judge.engine):
        roles.append(_role("judge", None, recipe.judge.engine))
    names = [r.name for r in roles]
    for role in roles:
        if names.count(role.name) > 1:
            raise RecipeError(
                f"students {[r.student for r in roles if r.name == role.name]}: their servers' files would all be called "
                f"{role.name}: choose names that differ in letters or digits"
            )
    return roles


def _role(role: str, student: str | None, engine: EngineSpec) -> Role:
    return Role(role, student, _parallel(engine.serve_args, student or role))


def _parallel(args: Sequence[str], who: str) -> int:
    """GPUs of one server: the product of its parallel sizes. As vLLM reads them: ``_`` is ``-``, and the last of two counts."""
    words = [w for arg in args for w in arg.split("=", 1)]
    total = 1
    for long, short in _SIZES.items():
        size = 1
        for i, word in enumerate(words):
            if word == short or word.replace("_", "-") == long:
                value = words[i + 1] if i + 1 < len(words) else ""
                if not value.isdecimal() or int(value) < 1:
                    raise RecipeError(f"{who}: engine.serve_args: {word} {value!r} is not a number of GPUs")
                size = int(value)
        total *= size
    return total


def with_addresses(recipe: Recipe) -> Recipe:
    """The recipe with the job's own address files in place of the ``file:`` patterns of the roles that it serves."""
    roles = {(r.role, r.student): r for r in served_roles(recipe)}
    if not roles:
        return recipe

    def there(engine: EngineSpec, role: str, student: str | None = None) -> EngineSpec:
        ours = roles.get((role, student))
        other = [u for u in engine.urls if not u.startswith("file:")]
        return engine if ours is None else engine.model_copy(update={"urls": [ours.pattern, *other]})

    several = len(recipe.students) > 1
    students = [
        s.model_copy(update={"engine": there(s.engine, "student", s.name if several else None)})
        for s in recipe.students
    ]
    return recipe.model_copy(
        update={
            "tutor": recipe.tutor.model_copy(update={"engine": there(recipe.tutor.engine, "tutor")}),
            "students": students,
            "judge": recipe.judge.model_copy(update={"engine": there(recipe.judge.engine, "judge")}),
        }
    )


def place(roles: Sequence[Role], site: Site, *, train_nodes: int, processes: int) -> Placement:
    """Where trainers and servers go.

    ``processes``: trainer processes a node, one GPU each (without GPUs any number; no server shares a node with them then).

    Raises:
        RecipeError: a server needs more GPUs than a node has.
    """
    counts = {"tutor": site.tutor_servers, "student": site.student_servers, "judge": site.judge_servers}
    free = [site.gpus_per_node - processes] * train_nodes
    placed = []
    for role in roles:
        for number in range(counts[role.role]):
            if not site.gpus_per_node:
                free.append(0)
                placed.append(PlacedServer(role, number, len(free) - 1, None))
                continue
            if role.gpus > site.gpus_per_node:
                raise RecipeError(
                    f"{role.name}: one server takes {role.gpus} GPUs (engine.serve_args), a node has {site.gpus_per_node}: "
                    "choose smaller parallel sizes, and more servers"
                )
            node = next((i for i, n in enumerate(free) if n >= role.gpus), len(free))
            if node == len(free):
                free.append(site.gpus_per_node)
            first = site.gpus_per_node - free[node]
            free[node] -= role.gpus
            placed.append(PlacedServer(role, number, node, (first, first + role.gpus - 1)))
    return Placement(len(free), train_nodes, processes, tuple(placed))


def processes_of(site: Site) -> int:
    """Trainer processes a node."""
    return site.train_processes or max(1, site.gpus_per_node)
