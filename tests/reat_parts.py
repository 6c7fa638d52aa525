"""Parts for tests of REAT: experiences, situations, an observer and a source by rule."""

from __future__ import annotations

from dataclasses import dataclass, field

from maieutic.dialogue import Dialogue, Turn
from maieutic.reat.live import Reading, Situation
from maieutic.reat.schema import Experience, Provenance, StateTags, Unknown
from maieutic.reat.tutor import Found

STATE = StateTags(
    emotion="confused", intent="request_hint", error_type="concept_error", struggle="repeated_error"
)


def experience(name: str = "a", tags: StateTags = STATE, **changes: object) -> Experience:
    content: dict = {
        "tags": tags,
        "query": f"difficulty {name}",
        "template": f"template {name}",
        "advice": f"advice {name}",
        "pitfalls": f"pitfall {name}",
        "struggle_handling": f"handling {name}",
        "explanation": f"reason {name}",
        "provenance": Provenance(
            transcript="t.jsonl", episode_id=f"episode-{name}", turn=1, revised=True, rounds=2, scores=(40.0, 90.0),
            rewrite="rewritten",
        ),
    }  # fmt: skip
    return Experience.make(utility=float(changes.pop("utility", 90.0)), **{**content, **changes})


def situation(tags: StateTags = STATE, query: str = "difficulty a") -> Situation:
    return Situation(tags=tags, error_detail="", struggle_reason="stuck", query=query, rewrite="merged")


@dataclass
class FixedObserver:
    """Always says the same."""

    says: Situation | Unknown = field(default_factory=situation)
    calls: int = 1

    async def read(self, dialogue: Dialogue, *, seed: int) -> Reading:
        return Reading(self.says, self.calls, observe_s=0.25, rewrite_s=0.125)


@dataclass
class FixedSource:
    """Always has the same; remembers what it was asked."""

    found: Found
    asked: list[Situation] = field(default_factory=list)

    async def find(self, situation: Situation, *, seed: int) -> Found:
        self.asked.append(situation)
        return self.found


@dataclass
class Recorder:
    """A tutor that remembers the dialogues it was shown."""

    seen: list[list[Turn]] = field(default_factory=list)
    says: str = "What do you know?"

    async def reply(self, dialogue: Dialogue, *, seed: int) -> Turn | None:
        self.seen.append(list(dialogue.turns))
        dialogue.record = ("record", len(self.seen))
        return Turn("tutor", self.says, note="own note")


def talk(*texts: str) -> Dialogue:
    """Student and tutor in turns, the student first."""
    dialogue = Dialogue("d", "Ann has 3 pens and buys 4. How many now?", "3 + 4 = 7")
    for n, text in enumerate(texts):
        dialogue.add(Turn("tutor" if n % 2 else "student", text))
    return dialogue
