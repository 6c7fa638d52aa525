"""The recipe schema (torch-free). One recipe is one runnable experiment; see :mod:`maieutic.recipe` for loading and overrides.

Every section is strict: an unknown key or a wrong type is an error. Defaults are the published Eduardo setting
(``reference-facts``) unless a comment says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

ImportPath = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""A user's own class or function: ``package.module:Name``."""
Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
"""A share that is never all: 1 would keep a moment for ever, or drop every weight."""
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


def _own_options(where: str, kind: str, shipped: tuple[str, ...], options: dict[str, Any]) -> None:
    """Options go to a user's own class or function; with a shipped one they would be ignored in silence."""
    if options and kind in shipped:
        raise ValueError(
            f"{where}.options is {options}, but kind {kind} takes none: they are for your own (module:Name)"
        )


class SamplingSpec(Section):
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Count = 512
    """Most new tokens of one call."""


class PriceSpec(Section):
    """US dollars for a million tokens."""

    input: Annotated[float, Field(ge=0)] = 0.0
    output: Annotated[float, Field(ge=0)] = 0.0
    cached_input: Annotated[float, Field(ge=0)] | None = None


class HttpSpec(Section):
    """How servers are called; None of ``outage_limit_s`` and ``deadline_s``: no such limit."""

    concurrency: Count = 64
    """Most requests in flight to one server."""
    timeout_s: Positive = 120.0
    """Most seconds of one attempt."""
    retries: Annotated[int, Field(ge=0)] = 4
    """Further attempts after transient answers (408, 409, 425, 429, 5xx, time-outs, broken answers)."""
    backoff_s: Positive = 0.5
    backoff_max_s: Positive = 30.0
    outage_limit_s: Positive | None = 900.0
    """The run stops, with a checkpoint, when no server of a role has answered for this long."""
    deadline_s: Positive | None = None
    """Most seconds of one request, pauses included; then that episode is excluded."""


class EngineSpec(Section):
    """What samples: ``hf`` in process, ``vllm`` servers by token ids, ``chat`` any OpenAI-compatible endpoint by messages."""

    kind: Literal["hf", "vllm", "chat"] = "hf"
    max_batch_size: Count = 128
    """``hf``: most sequences decoded together."""
    cache_tokens: Annotated[int, Field(ge=0)] = 65_536
    """``hf``: tokens of key-value cache kept for growing dialogues (0: none)."""
    urls: list[str] = []
    """Servers: ``http://host:port``, or ``file:PATTERN`` of the address files that ``maieutic serve`` publishes."""
    start_timeout_s: Positive = 600.0
    """How long to wait for address files and for healthy servers."""
    served_name: str | None = None
    """The model's name at the endpoint (None: ``vllm`` asks the server, ``chat`` uses ``model``)."""
    http: HttpSpec = HttpSpec()
    api_key_env: str | None = None
    """Environment variable that holds the API key."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """``chat``: merged into each request (thinking off, reasoning effort, …)."""
    max_tokens_key: str = "max_tokens"
    send_seed: bool = True
    send_n: bool = True
    """``chat``: off for endpoints that refuse ``seed`` or ``n`` (an ``n = k`` request is then k requests)."""
    merge_turns: bool = False
    """``chat``: join messages of one role that follow each other, for endpoints whose template wants strict alternation."""
    price: PriceSpec = PriceSpec()
    push: Literal["disk", "lora", "nccl"] = "disk"
    """``vllm`` tutor: how weights reach the servers. ``disk``: whole weights through a shared folder; ``lora``: the adapter
    alone through that folder; ``nccl``: vLLM's weight-transfer engine, from GPU to GPU."""
    push_folder: str | None = None
    """``vllm`` tutor: folder shared by trainer and servers for weights (None: the run's folder; ``/dev/shm/…`` on one node)."""
    push_timeout_s: Positive = 300.0
    """Most seconds that one server may take for the weights of a push."""
    serve_args: list[str] = []
    """Added to the command of ``maieutic serve`` (``--tensor-parallel-size 2`` and the like)."""

    @model_validator(mode="after")
    def _servers_named(self) -> Self:
        if self.kind == "hf" and self.urls:
            raise ValueError("engine.urls is set but engine.kind is hf: set kind: vllm or kind: chat")
        if self.kind != "hf" and not self.urls:
            raise ValueError(f"engine.kind is {self.kind} but engine.urls names no server")
        return self


class ModelSpec(Section):
    model: str
    """Hub id, path, or packaged name (``maieutic models list``)."""
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    chat_template: str | None = None
    """Path of a Jinja file that replaces the tokenizer's template."""
    engine: EngineSpec = EngineSpec()


class LoraSpec(Section):
    r: Count = 16
    alpha: Positive = 32
    dropout: Fraction = 0.0
    targets: str | list[str] = "all-linear"


class TutorSpec(ModelSpec):
    kind: Literal["policy"] | ImportPath = "policy"
    """``policy``, or a user's own :class:`maieutic.env.base.Tutor`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to a user's own class as keyword arguments."""
    init_from: str | None = None
    """Path or Hub id of weights or an adapter that training starts from (``model`` keeps naming architecture and tokenizer)."""
    lora: LoraSpec | None = None
    thinking: bool | None = None
    """Passed to the template as ``enable_thinking``; None leaves the template's own default."""
    thinking_history: Literal["keep", "strip"] = "keep"
    """What becomes of earlier turns' thinking: kept in the append-only sequence (as published), or one segment a turn."""
    sampling: SamplingSpec = SamplingSpec(temperature=1.15)
    """``max_tokens`` is ignored: a tutor turn may use ``env.visible_budget + env.thinking_budget`` tokens."""

    @model_validator(mode="after")
    def _options_used(self) -> Self:
        _own_options("tutor", self.kind, ("policy",), self.options)
        return self


class StudentSpec(ModelSpec):
    name: str = "student"
    kind: Literal["model"] | ImportPath = "model"
    options: dict[str, Any] = Field(default_factory=dict)
    weight: Positive = 1.0
    """Share of episodes that this student plays, relative to the other students'."""
    sampling: SamplingSpec = SamplingSpec(temperature=0.6, max_tokens=500)

    @model_validator(mode="after")
    def _options_used(self) -> Self:
        _own_options("students", self.kind, ("model",), self.options)
        return self


class JudgeSpec(Section):
    kind: Literal["rule", "llm"] | ImportPath = "rule"
    """``rule`` (numeric problems, no model), ``llm``, or a user's own :class:`maieutic.env.base.Judge`."""
    options: dict[str, Any] = Field(default_factory=dict)
    model: str | None = None
    """``llm``: the judge model, and how it is asked."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    engine: EngineSpec = EngineSpec()
    sampling: SamplingSpec = SamplingSpec(temperature=0.6, max_tokens=4_096)
    votes: Annotated[int, Field(ge=1)] = 3
    reasks: Annotated[int, Field(ge=0)] = 1
    """How often an unreadable vote is asked again."""
    structured: bool = True
    """Ask for structured output (``chat`` endpoints that have it)."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.kind == "llm" and self.model is None:
            raise ValueError("judge.kind is llm but judge.model names no model")
        if self.kind == "rule" and self.model is not None:
            raise ValueError(
                f"judge.model is {self.model} but judge.kind is rule, which asks no model: set kind: llm"
            )
        _own_options("judge", self.kind, ("llm",), self.options)
        if self.votes % 2 == 0:
            raise ValueError(f"judge.votes is {self.votes}: a majority needs an odd number")
        return self


class RewardSpec(Section):
    kind: Literal["learning_gain"] | ImportPath = "learning_gain"
    """``learning_gain``, or a user's own function ``(Episode, RewardSpec) -> RewardBreakdown``."""
    options: dict[str, Any] = Field(default_factory=dict)
    gate_penalty: Annotated[float, Field(ge=0)] = 0.2
    soft_penalty: Annotated[float, Field(ge=0)] = 0.75
    """Subtracted in ``gates: soft`` when a gate rejects (and the post-test is still taken)."""
    eoc_bonus: float = 0.0
    """Added to a positive gain when the dialogue ended by the end token."""
    think_reward: float = 0.0
    """Times the share of well-formed tutor turns."""

    @model_validator(mode="after")
    def _options_used(self) -> Self:
        _own_options("reward", self.kind, ("learning_gain",), self.options)
        return self


ENV_TIMING = {"post_test_ahead"}
"""Keys of ``env`` that decide when something is computed, never what: they are no part of an experiment's identity."""


class EnvSpec(Section):
    """What an episode is. Values left out come from ``envs/<name>/env.yaml``; prompts are the files beside it."""

    name: str = "near_transfer"
    """A folder of ``envs/`` (shipped, or a path)."""
    kind: Literal["tutoring"] | ImportPath = "tutoring"
    """``tutoring``, or a user's own :class:`maieutic.env.play.Environment`."""
    options: dict[str, Any] = Field(default_factory=dict)
    transfer: bool = True
    """Condition 1: the post-test is the transfer variant (off: the source problem)."""
    hide_tutor: bool = True
    """Condition 2: tutor turns read ``(hidden)`` in the post-test."""
    gates: Literal["hard", "soft", "off"] = "hard"
    """Condition 3: ``hard`` a rejection costs the reward; ``soft`` subtracts ``reward.soft_penalty``; ``off`` only measures."""
    gate_names: list[Literal["leakage", "correctness"]] = ["leakage", "correctness"]
    tutor_sees_solution: bool = False
    max_turns: Annotated[int, Field(ge=2)] = 22
    """Most turns of a dialogue, the scripted opening included."""
    end_token: str = "<end_of_conversation>"
    end_after: Annotated[int, Field(ge=0)] = 3
    """The end token is honoured only when at least this many tutor turns precede it."""
    visible_budget: Count = 150
    thinking_budget: Annotated[int, Field(ge=0)] = 512
    """Tokens of one tutor turn; their sum is the hard cap of a turn, each is a decay threshold T0 of the reward."""
    prompt_limit: Count = 2_048
    """Most tokens of the tutor's prompt (system, problem, opening)."""
    conversation_limit: Count = 8_192
    """Most tokens after the prompt, in the tutor's sequence."""
    post_test_samples: Annotated[int, Field(ge=1)] = 16
    """K."""
    post_test_max_tokens: Count = 800
    post_test_min_graded: Share = 0.5
    """Below this share of graded answers the episode is excluded."""
    post_test_ahead: Literal["never", "tail", "always"] = "never"
    """Pose a training episode's post-test while its gates are judged, and cancel it when they reject: rollouts end earlier, and
    students spend time on rejected episodes. ``tail``: only once at most one in eight of the rollout's dialogues still goes on,
    when little is left to hide the gates behind. Evaluations always do, since they test every episode."""
    student_retries: Annotated[int, Field(ge=0)] = 2
    """Most regenerations of a student turn that is empty or out of role."""

    @property
    def tutor_cap(self) -> int:
        """Most tokens of one tutor turn."""
        return self.visible_budget + self.thinking_budget

    @model_validator(mode="after")
    def _gates_named_once(self) -> Self:
        if len(set(self.gate_names)) != len(self.gate_names):
            raise ValueError(f"gate_names lists a gate twice: {self.gate_names}")
        if self.gates != "off" and not self.gate_names:
            raise ValueError("gates are on but gate_names is empty: set gates: off, or name a gate")
        _own_options("env", self.kind, ("tutoring",), self.options)
        return self


RateBand = Literal["none", "train_band", "paper_test"] | dict[Literal["low", "high"], Share]


class ProblemsSpec(Section):
    source: str = "gsm-symbolic-mini"
    """Shipped set, path (.jsonl, .parquet), Hub id, or ``generate:gsm_symbolic`` (see docs/problems.md)."""
    split: str | None = None
    """Split of a Hub data set; None takes ``train``."""
    missing_variant: Literal["error", "drop", "source"] = "error"
    """Rows without a transfer variant: an error, dropped, or tested on the source problem."""
    filter: RateBand = "none"
    """Named filter on both solve rates, or ``{low: …, high: …}`` (inclusive band)."""
    eval_filter: RateBand = "none"
    train_size: Count | None = None
    eval_size: Annotated[int, Field(ge=0)] | None = None
    """Held-out pairs, disjoint from training (None: a tenth)."""
    eval_source: str | None = None
    """A separate held-out set (else split off ``source`` by seed)."""
    split_seed: int = 0
    """Seed of the split alone, so that runs with other seeds keep the same held-out pairs."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of a generator."""

    @model_validator(mode="after")
    def _bands_hold_something(self) -> Self:
        for name, band in (("filter", self.filter), ("eval_filter", self.eval_filter)):
            if isinstance(band, dict) and band.get("low", 0) > band.get("high", 1):
                raise ValueError(
                    f"{name}: low {band['low']:g} is above high {band.get('high', 1):g}: no rate is kept"
                )
        return self


class AlgorithmSpec(Section):
    loss: Literal["grpo", "dppo"] | ImportPath = "dppo"
    options: dict[str, Any] = Field(default_factory=dict)
    divergence: Literal["tv", "kl"] = "tv"
    """DPPO's mask: binary total variation or binary KL."""
    delta: Positive | None = None
    """DPPO's threshold; None: 0.10 for ``tv``, 0.05 for ``kl``."""
    ratio_cap: Positive = 10.0
    clip_low: Positive = 0.2
    clip_high: Positive = 0.2
    """GRPO's clip range [1 − clip_low, 1 + clip_high]."""
    advantage_scale: Literal["none", "std"] = "none"
    kl_beta: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the KL to the initial policy (0: no reference is computed)."""

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if self.loss == "grpo" and self.clip_low >= 1:
            raise ValueError(
                f"clip_low is {self.clip_low:g}: the ratio is clipped from below at 1 − clip_low, which must be > 0"
            )
        _own_options("algorithm", self.loss, ("grpo", "dppo"), self.options)
        return self


class OptimizerSpec(Section):
    lr: Positive = 1e-6
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Positive = 1e-15
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip: Positive = 1.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0


LOGITS_AT_ONCE = 2**26
"""Positions × vocabulary of one projection under ``training.logit_chunk: auto``."""


def logit_positions(chunk: int | Literal["auto"], vocabulary: int) -> int:
    """Positions that a head of ``vocabulary`` outputs projects at a time, at least 1. ``chunk``: ``training.logit_chunk``."""
    return max(1, LOGITS_AT_ONCE // vocabulary) if chunk == "auto" else chunk


class TrainingSpec(Section):
    max_steps: Count = 75
    """Rollout steps; each has ``problems_per_step / mini_batch_problems × epochs_per_step`` optimizer steps."""
    problems_per_step: Count = 16
    group_size: Annotated[int, Field(ge=2)] = 8
    """G: episodes of one pair; an advantage baseline needs at least 2."""
    mini_batch_problems: Count = 8
    epochs_per_step: Count = 1
    tokens_per_micro_batch: Count = 16_384
    packing: Literal["auto", "off"] = "auto"
    """``auto`` packs sequences where a start-up check shows that the architecture isolates them."""
    gradient_checkpointing: bool = True
    logit_chunk: Count | Literal["auto"] = "auto"
    """Trained positions that are projected to the vocabulary at a time; ``auto``: as many as have 2²⁶ logits, so that their
    memory (0.5 GiB at the peak) depends neither on the length of sequences nor on the size of the vocabulary."""
    optimizer: OptimizerSpec = OptimizerSpec()
    max_excluded_share: Share = 0.5
    excluded_patience: Count = 3
    """The run stops when more than ``max_excluded_share`` of the episodes stay excluded for this many steps in a row."""
    group_retries: Annotated[int, Field(ge=0)] = 1
    """Fresh tries for an episode that was lost to an engine or student failure (unknown verdicts are not retried)."""
    staleness: Annotated[int, Field(ge=0, le=1)] = 0
    """1: the next step's episodes are played while this step is learned from, by weights that are one step old. Needs a
    served tutor (``tutor.engine.kind: vllm``)."""
    probe_tolerance: Positive | None = None
    """Most |log-prob difference| between engine and trainer on the start-up probe; None: in fp32 1e-4 in
    process and 1e-3 for servers, 0.3 in 16 bits. Weight pushes are held to it too."""

    @model_validator(mode="after")
    def _whole_mini_batches(self) -> Self:
        if self.problems_per_step % self.mini_batch_problems:
            raise ValueError(
                f"problems_per_step ({self.problems_per_step}) is not a multiple of "
                f"mini_batch_problems ({self.mini_batch_problems})"
            )
        return self


class EvalSpec(Section):
    every: Annotated[int, Field(ge=0)] = 10
    """Steps between held-out evaluations (0: never); always before the first and after the last step when on."""
    problems: Count | None = None
    """Held-out pairs used each time (None: all)."""
    samples: Count = 1
    """Episodes a problem."""
    temperature: Annotated[float, Field(ge=0)] = 0.6
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95


class CheckpointSpec(Section):
    every: Annotated[int, Field(ge=0)] = 10
    """Steps between checkpoints (0: only at the end and on a signal)."""
    keep_last: Count = 2
    best: str | None = "eval/transfer_gain"
    """Metric whose best checkpoint is kept too (higher is better); None: none."""


class ThresholdSpec(Section):
    """An alert with hysteresis: it fires at ``fire`` or above, and is over below ``clear``."""

    fire: Positive
    clear: Annotated[float, Field(ge=0)]

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.clear >= self.fire:
            raise ValueError(
                f"clear ({self.clear:g}) is not below fire ({self.fire:g}): the alert would fire again and again"
            )
        return self


class AlertsSpec(Section):
    """What is shouted about (docs/training-health.md), once for each episode of trouble; None switches one off."""

    patience: Count = 2
    """Steps in a row that a value must stay at ``fire`` to fire, and below ``clear`` to be over."""
    leak: ThresholdSpec | None = ThresholdSpec(fire=0.15, clear=0.05)
    """Rise of the leak rate (mean of the last 3 steps) over the lowest that it was."""
    unknown: ThresholdSpec | None = ThresholdSpec(fire=0.05, clear=0.02)
    """``rollout/unknown_share``."""
    blank: ThresholdSpec | None = ThresholdSpec(fire=0.10, clear=0.05)
    """``rollout/blank_turn_rate``."""
    kl: ThresholdSpec | None = ThresholdSpec(fire=0.05, clear=0.02)
    """``train/kl_mu_pi``: KL(μ‖π), nats a token."""
    variance: ThresholdSpec | None = ThresholdSpec(fire=0.9, clear=0.7)
    """``train/flat_group_share``: groups whose rewards are all equal."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        for name in ("leak", "unknown", "blank", "variance"):
            threshold = getattr(self, name)
            if threshold is not None and threshold.fire > 1:
                raise ValueError(f"{name}.fire is {threshold.fire:g}: a share is never above 1")
        return self


class TrackingSpec(Section):
    wandb: Literal["off", "offline", "online"] = "off"
    tensorboard: bool = False
    project: str = "maieutic"
    group: str | None = None
    """W&B's group (None: one for each experiment, whatever the seed)."""
    tags: list[str] = []
    transcripts: Annotated[int, Field(ge=0)] = 16
    """Episodes of each step and evaluation that trackers show as text (the first ones; 0: none)."""
    alerts: AlertsSpec = AlertsSpec()


class Recipe(Section):
    """A whole experiment."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    arm: str = "dppo"
    """Way of tutoring that is compared (``base | sft | tutorrl | grpo | dppo | reat | latent`` or an ablation's name)."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Below 2³¹: what every random generator takes, with room for a rank's own."""
    output_dir: str = "runs"
    offline: bool = False
    """Never touch the network."""
    spending_limit_usd: Positive | None = None
    """The run stops, with a checkpoint, when paid endpoints have cost this much (see ``price``)."""
    tutor: TutorSpec
    students: Annotated[list[StudentSpec], Field(min_length=1)]
    judge: JudgeSpec = JudgeSpec()
    env: EnvSpec = EnvSpec()
    reward: RewardSpec = RewardSpec()
    problems: ProblemsSpec = ProblemsSpec()
    algorithm: AlgorithmSpec = AlgorithmSpec()
    training: TrainingSpec = TrainingSpec()
    eval: EvalSpec = EvalSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    tracking: TrackingSpec = TrackingSpec()

    @model_validator(mode="after")
    def _orchestrated(self) -> Self:
        engine = self.tutor.engine
        if self.training.staleness and engine.kind != "vllm":
            raise ValueError(
                f"training.staleness is {self.training.staleness} but tutor.engine.kind is {engine.kind}: an engine in the "
                "trainer's process samples from the very weights that are being trained; serve the tutor "
                "(tutor.engine.kind: vllm), or set training.staleness: 0"
            )
        if engine.kind == "vllm" and engine.push == "lora" and self.tutor.lora is None:
            raise ValueError(
                "tutor.engine.push is lora but tutor.lora is not set: all weights are trained, so push them (push: disk or "
                "nccl), or train an adapter"
            )
        return self

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.algorithm.loss in ("grpo", "dppo") or ":" in self.algorithm.loss:
            if self.tutor.sampling.top_p < 1:
                raise ValueError(
                    f"tutor.sampling.top_p is {self.tutor.sampling.top_p:g}: a ratio loss needs the log-probs of the whole "
                    "distribution (top_p: 1)"
                )
            if self.tutor.sampling.temperature == 0:
                raise ValueError(
                    "tutor.sampling.temperature is 0: greedy sampling has no distribution to train on"
                )
        if self.tutor.engine.kind == "chat" and self.tutor.kind == "policy":
            raise ValueError(
                "tutor.engine.kind is chat: a policy is trained on token ids, which need hf or vllm"
            )
        names = [s.name for s in self.students]
        if len(set(names)) != len(names):
            raise ValueError(f"students share a name: {names}")
        need = self.env.tutor_cap + max(s.sampling.max_tokens for s in self.students)
        # An environment's own defaults may be smaller than these: what is left out is checked once they are filled in.
        known = {"visible_budget", "thinking_budget", "conversation_limit"} <= self.env.model_fields_set
        if need > self.env.conversation_limit and (known or self.env.name == "near_transfer"):
            raise ValueError(
                f"env.conversation_limit is {self.env.conversation_limit}: one turn of each side may take {need} tokens "
                f"(tutor {self.env.tutor_cap}, student {need - self.env.tutor_cap})"
            )
        return self

    @property
    def worst_case_tokens(self) -> int:
        """Tokens of the longest conversation that the turn caps allow (published recipe: 12,282), prompt not counted."""
        tutor_turns = self.env.max_turns // 2
        student_turns = (self.env.max_turns - 1) // 2
        return tutor_turns * self.env.tutor_cap + student_turns * max(
            s.sampling.max_tokens for s in self.students
        )
