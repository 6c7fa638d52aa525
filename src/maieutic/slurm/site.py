"""The site's settings: one file of ``KEY=value`` lines, read (never executed) and validated.

What belongs to the cluster stands here, what belongs to the experiment in the recipe. Keys and secrets have no place in it:
jobs inherit the environment of ``maieutic slurm submit``.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, model_validator

from maieutic.config import Count, Section
from maieutic.resources import share_dir
from maieutic.slurm.errors import SiteError

ENV_VAR = "MAIEUTIC_SITE"
"""Names the settings file where ``--site`` does not."""
DEFAULT = Path("slurm/site.env")
Time = Annotated[str, StringConstraints(pattern=r"^(\d+-)?\d+(:\d\d){0,2}$")]
_WHOLE = Annotated[int, Field(ge=0)]
_LISTS = ("modules", "sbatch_args", "srun_args")
_REFERENCE = re.compile(r"\$\{?\w+\}?")
# A comment begins a word, so that `docker://host#image` is whole; quoted text is kept as it is.
_QUOTED_OR_COMMENT = re.compile(r"""("[^"]*"|'[^']*')|(?:^|(?<=\s))#.*""")
# Whole words of a name: HF_TOKEN, not TOKENIZERS_PARALLELISM.
_SECRET = re.compile(r"\b\w*(?:KEY|TOKEN|SECRET|PASSWORD)S?(?:_\w*)?=", re.IGNORECASE)
_PATHS = ("accelerate_config", "python", "vllm_python", "scratch", "hf_home", "container_image")


class Site(Section):
    """Every key is the upper-case name in the file. Empty values count as not given."""

    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    sbatch_args: list[str] = Field(default_factory=list)
    """Further flags of sbatch, each a word such as ``--exclusive``."""
    srun_args: list[str] = Field(default_factory=list)
    """Further flags of each step."""
    time: Time = "24:00:00"
    """Limit of one run of the training job; a longer training is requeued."""
    evaluation_time: Time = "08:00:00"
    signal_seconds: Annotated[int, Field(ge=30, le=65_535)] = 300
    """How long before the limit training is told to write its checkpoint."""
    grace_seconds: Annotated[int, Field(ge=1)] = 30
    """Most seconds that servers get to end."""
    max_requeues: _WHOLE = 50
    """After so many requeues a job fails instead of starting again."""
    start_seconds: Count = 1_800
    """Most seconds until every server is healthy (loading weights included)."""

    gpus_per_node: _WHOLE
    """0: a CPU trial; every server then gets a node of its own."""
    gpu_flag: Literal["gres", "gpus-per-node"] = "gres"
    gpu_type: str | None = None
    """``--gres=gpu:TYPE:N``"""
    cpus_per_node: Count
    mem_per_node: str = "0"
    """sbatch's ``--mem``; 0 is all of a node. ``none``: no such flag, for sites that refuse it."""

    train_nodes: Count = 1
    train_processes: Count | None = None
    """Trainer processes a node (None: one a GPU, so that none is left for servers there; 1 without GPUs)."""
    tutor_servers: Count = 1
    student_servers: Count = 1
    """Of each student."""
    judge_servers: Count = 1
    accelerate_config: str | None = None
    """Such as ``recipes/accelerate/fsdp2.yaml``; None: plain data parallel."""

    python: str | None = None
    """Interpreter inside the jobs (None: the one that submits; in a container ``python``)."""
    vllm_python: str | None = None
    """Interpreter of the environment that has vLLM, where that is another one."""
    modules: list[str] = Field(default_factory=list)
    setup: str | None = None
    """A line of shell before anything else, such as ``source /…/activate`` (it must contain no secret)."""
    scratch: str | None = None
    """Folder that all nodes share; relative ``output_dir`` of recipes lie below it (None: below the working directory)."""
    hf_home: str | None = None
    """Exported as HF_HOME: where models and data sets lie."""
    wanted_port: Annotated[int, Field(ge=1_024, le=65_535)] | None = None
    """Tried first by every server and by the trainers' meeting point; one that is taken is replaced by a free one."""

    container_image: str | None = None
    """Pyxis: an image or a squashfs file; every step then runs in it. None: bare metal."""
    container_mounts: str | None = None
    """``FROM:TO,…`` (None: scratch and the working directory, at the same place)."""
    container_args: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.container_image is None and (self.container_mounts or self.container_args):
            raise ValueError("CONTAINER_MOUNTS and CONTAINER_ARGS need CONTAINER_IMAGE")
        if self.gpus_per_node and self.train_processes and self.train_processes > self.gpus_per_node:
            raise ValueError(
                f"TRAIN_PROCESSES is {self.train_processes}, but a node has {self.gpus_per_node} GPUs"
            )
        for key in ("time", "evaluation_time"):
            limit = seconds_of(getattr(self, key))
            if 0 < limit <= self.signal_seconds:  # 0 is no limit
                raise ValueError(
                    f"{key.upper()} is {getattr(self, key)} ({limit} s), SIGNAL_SECONDS is {self.signal_seconds}: jobs would "
                    "be told to stop as soon as they start; give more time, or a shorter warning"
                )
        if self.scratch is not None and not Path(self.scratch).is_absolute():
            raise ValueError(f"SCRATCH is {self.scratch}: an absolute path is needed, the same on all nodes")
        return self


def seconds_of(time: str) -> int:
    """Seconds of a time limit as SLURM reads it: ``M``, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M`` or ``D-H:M:S``."""
    days, dash, rest = time.rpartition("-")
    parts = [int(p) for p in rest.split(":")]
    if not dash and len(parts) < 3:
        parts.insert(0, 0)  # without days the first of one or two numbers is minutes
    hours, minutes, seconds = (parts + [0, 0])[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def load_site(path: str | Path | None = None, changes: Sequence[str] = ()) -> Site:
    """The settings of ``path`` (else of ``$MAIEUTIC_SITE``, else of ``slurm/site.env``), with ``changes`` (``KEY=value``) on top.

    An empty change (``PARTITION=``) takes the file's value away.

    Raises:
        SiteError: no such file, a line that is no ``KEY=value``, an unknown key (with the nearest one), a value that does not
            fit, or a variable in a value that is not set.
    """
    file = Path(path or os.environ.get(ENV_VAR) or DEFAULT)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SiteError(
            f"{file}: not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8"
        ) from None
    except OSError as error:
        raise SiteError(
            f"{file}: {error.strerror}: copy slurm/site.env.example there and fill it in, or name it with --site"
        ) from error
    values, lines = _parse(text, file)
    for change in changes:
        changed, named = _parse(change, Path("--set"))
        if not named:
            raise SiteError(f"--set: write KEY=value, this is {change!r}")
        for key in named:
            values.pop(key, None)
            lines.pop(key, None)  # an error is the change's, not the file's
        values |= changed
    try:
        site = Site.model_validate(values)
    except ValidationError as error:
        raise SiteError("\n".join(_explain(e, file, lines) for e in error.errors())) from None
    return site.model_copy(update={"accelerate_config": _accelerate_config(site)})


def _accelerate_config(site: Site) -> str | None:
    """The file, or the one of this name that comes with the package; what lies in a container only is not looked for."""
    named = site.accelerate_config
    if named is None or site.container_image is not None or Path(named).is_file():
        return named
    shipped = share_dir("recipes").parent / named
    if shipped.is_file():
        return str(shipped)
    raise SiteError(f"ACCELERATE_CONFIG: {named} is no file (from {Path.cwd()}); see recipes/accelerate")


def _parse(text: str, file: Path) -> tuple[dict[str, Any], dict[str, int]]:
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, rest = line.removeprefix("export ").partition("=")
        key = name.strip().lower()
        if not equals or not re.fullmatch(r"\w+", name.strip()):
            raise SiteError(f"{file}:{number}: write KEY=value, this is {line!r}")
        if key not in Site.model_fields or name.strip() != key.upper():
            near = difflib.get_close_matches(key, Site.model_fields, n=1)
            hint = f"; did you mean {near[0].upper()}?" if near else f"; known: {_known()}"
            raise SiteError(f"{file}:{number}: unknown key {name.strip()}{hint}")
        if key in lines:
            raise SiteError(f"{file}:{number}: {name.strip()} is given twice (line {lines[key]} too)")
        lines[key] = number
        value = _value(rest, key, f"{file}:{number}: {name.strip()}")
        if value not in ("", []):
            values[key] = value
    return values, lines


def _value(rest: str, key: str, where: str) -> Any:
    """The value without quotes and trailing comment, with ``$VARIABLES`` of the environment filled in."""
    try:
        plain = _QUOTED_OR_COMMENT.sub(r"\1", rest)
        words = shlex.split(plain)
        text = " ".join(words)
    except ValueError as error:
        raise SiteError(f"{where}: {error}") from None
    if found := _SECRET.search(text):
        raise SiteError(
            f"{where}: {found[0]}… looks like a secret, which would stand in every script: export it before "
            "`maieutic slurm submit`; jobs inherit the environment"
        )
    if key == "setup":  # a line of shell is for the job's shell
        if len(words) > 1 and any(c in plain for c in "'\"\\"):
            raise SiteError(f"{where}: put the whole line in quotes: those inside it would be lost")
    else:
        text = os.path.expandvars(text)
        if left := _REFERENCE.search(text):
            raise SiteError(f"{where}: {left[0]} is not set in this environment")
        if key in _PATHS:
            text = os.path.expanduser(text)
            if text.startswith("~"):
                raise SiteError(f"{where}: {text.split('/')[0]} is no user here")
    if key in _LISTS or key == "container_args":
        return text.split()
    number = Site.model_fields[key].annotation
    return int(text) if "int" in str(number) and re.fullmatch(r"-?\d+", text) else text


def _known() -> str:
    return ", ".join(k.upper() for k in Site.model_fields)


def _explain(item: Any, file: Path, lines: Mapping[str, int]) -> str:
    key = str(item["loc"][0]) if item["loc"] else ""
    where = f"{file}:{lines[key]}" if key in lines else str(file)
    if item["type"] == "missing":
        return f"{where}: {key.upper()} is required, but not given"
    message = item["msg"].removeprefix("Value error, ")
    return f"{where}: {key.upper()}: {item['input']!r}: {message}" if key else f"{where}: {message}"
