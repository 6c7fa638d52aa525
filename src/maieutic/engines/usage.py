"""What calls cost: requests, tokens and money for each role, and a hard spending limit."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from maieutic.errors import SpendingLimitError


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars for a million tokens."""

    input: float = 0.0
    output: float = 0.0
    cached_input: float | None = None
    """Price of prompt tokens that the server had cached; None: as ``input``."""


@dataclass(slots=True)
class Usage:
    """Counts of one role (``student``, ``judge``, ``tutor``, …)."""

    requests: int = 0
    retries: int = 0
    failures: int = 0
    """Requests that gave nothing after their retries."""
    cancelled: int = 0
    """Requests given up before their answer came, those that still waited for a slot included: a post-test that went ahead and
    was not needed, a stopped run. Their tokens are not counted below, and a provider may charge for them."""
    moved: int = 0
    """Dialogues that went on at another server because theirs was lost."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    usd: float = 0.0


@dataclass(slots=True)
class Ledger:
    """Usage by role, and the spending limit that the whole run shares.

    The limit is checked before each request and after each answer, so a run overshoots by at most the requests in flight.
    """

    limit_usd: float | None = None
    roles: dict[str, Usage] = field(default_factory=dict)

    def usage(self, role: str) -> Usage:
        return self.roles.setdefault(role, Usage())

    @property
    def usd(self) -> float:
        return sum(u.usd for u in self.roles.values())

    def check(self) -> None:
        """Raises :class:`SpendingLimitError` when the limit is reached."""
        if self.limit_usd is not None and self.usd >= self.limit_usd:
            parts = ", ".join(f"{role} ${u.usd:.2f}" for role, u in self.roles.items() if u.usd)
            raise SpendingLimitError(
                f"spending limit reached: ${self.usd:.2f} of ${self.limit_usd:.2f} ({parts}); "
                "raise spending_limit_usd in the recipe and resume"
            )

    def add(self, role: str, price: Price, *, prompt: int, completion: int, cached: int = 0) -> None:
        """Record one answered request (token counts as the server reported them)."""
        u = self.usage(role)
        u.requests += 1
        u.prompt_tokens += prompt
        u.cached_tokens += cached
        u.completion_tokens += completion
        cached_price = price.input if price.cached_input is None else price.cached_input
        u.usd += ((prompt - cached) * price.input + cached * cached_price + completion * price.output) / 1e6

    def metrics(self) -> dict[str, float]:
        """``usage/<role>/<count>`` for every role, cumulative."""
        return {f"usage/{role}/{k}": float(v) for role, u in self.roles.items() for k, v in asdict(u).items()}

    def state(self) -> dict[str, dict[str, float]]:
        """For a checkpoint: spending survives a resume."""
        return {role: asdict(u) for role, u in self.roles.items()}

    def load(self, state: dict[str, dict[str, float]]) -> None:
        self.roles = {role: Usage(**u) for role, u in state.items()}  # type: ignore[arg-type]
