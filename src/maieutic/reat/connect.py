"""From a recipe's ``roles`` to :class:`~maieutic.reat.roles.Roles`: endpoints, a loopback server where one is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from maieutic.engines.base import Sampling
from maieutic.engines.chat import HttpChat
from maieutic.engines.connect import connect_chat
from maieutic.engines.usage import Ledger
from maieutic.reat.distil_config import LOOPBACK, DistilSection, OcmRole, OcmRoles
from maieutic.reat.roles import RoleChat, Roles


@dataclass(frozen=True)
class Connected:
    """Roles ready to be asked. ``capacity``: requests that their endpoints take at once."""

    roles: Roles
    capacity: int


@asynccontextmanager
async def connect_roles(
    spec: OcmRoles, settings: DistilSection, *, seed: int, ledger: Ledger
) -> AsyncIterator[Connected]:
    """The roles of a recipe, closed at the end. A role that is not given shares ``ocm``'s endpoint and its limit of concurrency.

    Raises :class:`~maieutic.errors.RecipeError` for an API key that is not set, EngineError for servers that are not found.
    """
    counts: Counter[str] = Counter()
    async with AsyncExitStack() as stack:
        loopback = ""
        if any(LOOPBACK in r.engine.urls for r in spec.given):
            from maieutic.reat.rule_roles import Faults, RuleRoles

            faults = Faults() if spec.faults is None else Faults(**spec.faults.model_dump())
            loopback = await stack.enter_async_context(RuleRoles(faults))
        capacity = 0

        def open_chat(role: OcmRole, name: str) -> HttpChat:
            nonlocal capacity
            urls = [loopback if u == LOOPBACK else u for u in role.engine.urls]
            engine = role.engine.model_copy(update={"urls": urls})
            chat = connect_chat(engine, role.model, role=name, ledger=ledger)
            stack.push_async_callback(chat.close)
            capacity += engine.http.concurrency * len(chat.pool.urls)
            return chat

        shared = open_chat(spec.ocm, "ocm")

        def role(name: str, own: OcmRole | None) -> RoleChat:
            used = own or spec.ocm
            s = used.sampling
            return RoleChat(
                name,
                shared if own is None else open_chat(own, name),
                Sampling(s.temperature, s.top_p, s.max_tokens),
                settings.reasks,
                used.structured,
                counts=counts,
            )

        roles = Roles(
            role("observer", spec.observer),
            role("critic", spec.critic),
            role("mentor", spec.mentor),
            role("rewriter", spec.rewriter),
            role("reflection", None) if settings.merged_roles else None,
            seed,
        )
        yield Connected(roles, capacity)
