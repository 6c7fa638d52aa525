"""Any arm by name: a checkpoint, an adapter, a model, an endpoint, or a user's own Tutor class."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maieutic.config import EnvSpec, ModelSpec
from maieutic.dialogue import Dialogue, Message, Turn
from maieutic.engines.base import ChatModel, Completion, Sampling
from maieutic.env.base import Tutor
from maieutic.env.imports import load_object
from maieutic.env.prompts import EnvTemplates
from maieutic.errors import EngineError, ModelError, RecipeError
from maieutic.evaluation.cache import CachedChat, CostLedger, ResponseCache
from maieutic.evaluation.config import ArmSpec, EvaluationRecipe

_IMPORT_PATH = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
_WHOLE_FILE = 64 * 2**20


def find_arm(text: str, recipe: EvaluationRecipe) -> tuple[str, ArmSpec]:
    """Name and settings of the arm that ``text`` names.

    In this order: an arm of the recipe; ``package.module:Class``; ``http://host:port#model``; a folder with an adapter; a
    checkpoint (its ``model`` folder); anything else is a model's name, folder or Hub id. All but the first take the settings
    of ``recipe.tutor``.
    """
    if text in recipe.arms:
        return text, recipe.arms[text]
    base = recipe.tutor.model_dump(exclude_unset=True) if recipe.tutor is not None else {}
    if _IMPORT_PATH.match(text):
        return text.rpartition(":")[2], ArmSpec.model_validate({**base, "kind": text})
    if text.startswith(("http://", "https://")):
        url, mark, model = text.partition("#")
        if not mark or not model:
            raise RecipeError(f"{text}: an endpoint is named with its model, as http://host:port#model")
        engine = {**base.pop("engine", {}), "kind": "chat", "urls": [url]}
        return model, ArmSpec.model_validate({**base, "kind": "chat", "model": model, "engine": engine})
    folder = Path(text).expanduser()
    if (folder / "model").is_dir() and not (folder / "config.json").is_file():
        folder = folder / "model"
    label = _label(Path(text))
    if (folder / "adapter_config.json").is_file():
        adapter = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        model = base.pop("model", None) or adapter.get("base_model_name_or_path")
        if not model:
            raise ModelError(
                f"{folder}: the adapter names no base model: give it as tutor.model in the recipe"
            )
        return label, ArmSpec.model_validate({**base, "model": model, "adapter": str(folder)})
    if folder.is_dir():
        return label, ArmSpec.model_validate({**base, "model": str(folder)})
    return label, ArmSpec.model_validate({**base, "model": text})


def _label(path: Path) -> str:
    """A name for files: the last part of the path, and the run's for a checkpoint."""
    parts = [p for p in path.parts if p not in ("checkpoints", "model", "/", ".", "..")]
    keep = parts[-2:] if parts and parts[-1].startswith("step-") else parts[-1:]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(keep)) or "arm"


def fingerprint(folder: str | Path) -> str:
    """Hash of the files of a model folder (large ones by size and both ends), "" for what is no folder."""
    root = Path(folder)
    if not root.is_dir():
        return ""
    digest = hashlib.sha256()
    for file in sorted(f for f in root.iterdir() if f.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as f:
            if size <= _WHOLE_FILE:
                digest.update(f.read())
            else:
                digest.update(f.read(2**20))
                f.seek(-(2**20), 2)
                digest.update(f.read())
    return digest.hexdigest()[:16]


def identity(spec: ArmSpec) -> dict[str, Any]:
    """What of an arm decides its words: its settings without how servers are reached, and hashes of local weights."""
    data = spec.model_dump(mode="json", exclude={"engine", "inner"})
    data["extra_body"] = spec.engine.extra_body
    data["weights"] = [fingerprint(p) for p in (spec.model, spec.adapter) if p]
    if spec.inner is not None:
        data["inner"] = identity(spec.inner)
    if spec.kind not in ("policy", "chat"):
        # What a class of one's own reads beyond its options (a repository of experience) decides its words too.
        own = getattr(load_object(spec.kind, "kind"), "identity", None)
        if own is not None:
            data["own"] = own(spec.options)
    return data


@dataclass
class Arm:
    """A way of tutoring, opened: a :class:`~maieutic.env.base.Tutor` in any environment, and a chat model for plain questions."""

    name: str
    spec: ArmSpec
    chat: Any
    """Answers plain questions (problem solving): a :class:`~maieutic.engines.base.ChatModel`."""
    engine: Any = None
    renderer: Any = None
    own: Tutor | None = None

    def tutor(self, templates: EnvTemplates, env: EnvSpec) -> Tutor:
        """The tutor under an environment's prompts. A user's own class brings its own prompts."""
        from maieutic.tutors import ChatTutor, PolicyTutor

        if self.own is not None:
            return self.own
        sampling = _sampling(self.spec)
        if self.engine is None:
            return ChatTutor(self.chat, templates, env, sampling)
        history = self.spec.thinking_history
        return PolicyTutor(self.engine, self.renderer, templates, env, sampling, thinking_history=history)

    async def start(self) -> None:
        """Wait until servers are up."""
        for part in (self.engine, self.chat, self.own):
            start = getattr(part, "start", None)
            if start is not None:
                await start()

    async def close(self) -> None:
        """Free what the arm holds."""
        for part in (self.chat, self.engine, self.own):
            close = getattr(part, "close", None)
            if close is not None:
                await close()


def token_notes(arm: Arm) -> list[str]:
    """What a reader must know of the arm's token counts."""
    if arm.own is not None:
        return ["Token counts are those that the arm's own class reports."]
    if arm.engine is None:
        return [
            "Visible tokens are the endpoint's completion tokens, thinking included: it does not tell them apart."
        ]
    return []


def _sampling(spec: ArmSpec) -> Sampling:
    return Sampling(spec.sampling.temperature, spec.sampling.top_p, spec.sampling.max_tokens)


def open_arm(
    name: str,
    spec: ArmSpec,
    ledger: CostLedger,
    cache: ResponseCache,
    *,
    templates: EnvTemplates,
    env: EnvSpec,
    offline: bool,
) -> Arm:
    """Load or connect an arm. ``templates`` and ``env`` are those of a tutor that a user's own class wraps."""
    from maieutic.engines.connect import connect_chat, connect_vllm
    from maieutic.engines.local_chat import LocalChat
    from maieutic.runtime import make_renderer
    from maieutic.training.policy import load_tokenizer

    if spec.kind == "chat":
        assert spec.model is not None
        http = connect_chat(spec.engine, spec.model, role="tutor", ledger=ledger)
        return Arm(name, spec, CachedChat(http, cache, structured=True))
    if spec.kind != "policy":
        inner = None
        if spec.inner is not None:
            inner = open_arm(name, spec.inner, ledger, cache, templates=templates, env=env, offline=offline)
        given = [] if inner is None else [inner.tutor(templates, env)]
        factory = load_object(spec.kind, f"arms.{name}.kind")
        try:
            own = factory(*given, **spec.options)
        except (TypeError, ValueError) as error:
            raise RecipeError(
                f"arm {name}: {spec.kind} cannot be made with {dict(spec.options)}: {error}"
            ) from error
        if not isinstance(own, Tutor):
            raise RecipeError(f"arm {name}: {spec.kind} gave a {type(own).__name__}, which is no Tutor")
        chat: ChatModel = inner.chat if inner is not None else TutorAsChat(own, name)
        return Arm(name, spec, chat, own=own)
    assert spec.model is not None
    model = ModelSpec.model_validate(
        spec.model_dump(include={"model", "revision", "dtype", "chat_template"}) | {"engine": spec.engine}
    )
    tokenizer = load_tokenizer(model, offline=offline)
    renderer = make_renderer(model, tokenizer, thinking=spec.thinking)
    engine: Any
    if spec.engine.kind == "vllm":
        engine = connect_vllm(spec.engine, role="tutor", ledger=ledger)
    else:
        engine = _in_process(spec, model, tokenizer, offline)
    chat = LocalChat(engine, renderer, name=spec.model)
    return Arm(
        name,
        spec,
        CachedChat(chat, cache, identity=json.dumps(identity(spec), sort_keys=True)),
        engine,
        renderer,
    )


def _in_process(spec: ArmSpec, model_spec: ModelSpec, tokenizer: Any, offline: bool) -> Any:
    import torch

    from maieutic.engines.hf import HfEngine
    from maieutic.runtime import pad_id
    from maieutic.training.policy import load_model, model_dtype

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = model_dtype(model_spec, device)
    model = load_model(model_spec.model, dtype, device, revision=spec.revision, offline=offline)
    if spec.adapter is not None:
        from peft import PeftModel

        try:
            model = PeftModel.from_pretrained(model, spec.adapter).eval()
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"adapter {spec.adapter!r} cannot be put on {spec.model!r}: {error}") from error
    return HfEngine(
        model,
        pad_id=pad_id(tokenizer),
        max_batch_size=spec.engine.max_batch_size,
        cache_tokens=spec.engine.cache_tokens,
    )


class TutorAsChat:
    """A user's own tutor asked a plain question: the question is the student's opening, the reply its visible turn."""

    extra_body: Mapping[str, Any] = {}

    def __init__(self, tutor: Tutor, name: str) -> None:
        self._tutor, self._name = tutor, name

    @property
    def name(self) -> str:
        return self._name

    async def start(self) -> None:
        """The tutor is started by its arm."""

    async def complete(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        seed: int,
        n: int = 1,
        session: str | None = None,
    ) -> list[Completion]:
        """``n`` replies to one question. EngineError where the tutor says that it cannot go on."""
        question = "\n\n".join(m.content for m in messages)
        out = []
        for i in range(n):
            dialogue = Dialogue(f"question-{seed}-{i}", question)
            dialogue.add(Turn("student", question, scripted=True))
            turn = await self._tutor.reply(dialogue, seed=seed + i)
            if turn is None:
                raise EngineError(f"tutor {self._name}: the question does not fit its context")
            out.append(
                Completion(
                    turn.visible, "length" if turn.truncated else "stop", turn.visible_tokens, told_apart=True
                )
            )
        return out

    async def close(self) -> None:
        """The tutor is closed by its arm."""
