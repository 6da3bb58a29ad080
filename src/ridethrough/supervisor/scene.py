"""What the lead sees of a launch, and what can be concluded from it alone. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ridethrough.errors import Fenced
from ridethrough.supervisor import policy
from ridethrough.supervisor.directive import Directive, Outcome
from ridethrough.supervisor.saving import IsCovered, ReplicaNodes
from ridethrough.supervisor.settings import Settings
from ridethrough.supervisor.view import NodePhase, NodeView

_SLOW_START_S = 120.0
"""Silence before the first step, or between epochs, proves nothing for longer: nobody can say whether work goes on."""
ORDERLY = (policy.Cause.FINISHED, policy.Cause.STOPPED)
_ROOTS = ("ridethrough", "application", "killed", "hang", "dark", "unknown", "cascade", "stopped", "finished")
"""Of several ends the first of these is the root; the others are its consequences."""


class Sight(NamedTuple):
    """A node, as the lead sees it.

    A tuple, since thousands are made each second.
    """

    view: NodeView | None
    """What it said last, None if it was never heard."""
    silent_s: float
    """Since it was heard, or since it should have been: from then on it was watched. Infinite if it cannot be heard."""
    age_s: float = 0.0
    """Of its last word, watched or not: silence proves death, only a word proves life."""
    has_restarted: bool = False
    """Its keeper is younger than the launch: what the node had in memory is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the lead knows besides the nodes' views."""

    me: str
    order: tuple[str, ...]
    """All nodes that may take part."""
    attempt: str | None
    """Label of the attempt that this node's ranks have agreed on."""
    save_interval_steps: int = 1
    restored_step: int = 0
    replica_nodes: ReplicaNodes = field(default=lambda node: ())
    is_covered: IsCovered = field(default=lambda dark: not dark)
    has_shared_tier: bool = False
    past: tuple[policy.PastEnd, ...] = ()
    now_s: float = 0.0
    now_at: str = ""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One launch at one moment: its members, who of them is heard, and how its steps go."""

    directive: Directive
    sights: Mapping[str, Sight]
    around: Surroundings
    settings: Settings

    @cached_property
    def members(self) -> tuple[str, ...]:
        """Nodes of the launch."""
        return self.directive.members or (self.around.me,)

    @cached_property
    def seen(self) -> dict[str, Sight]:
        """Every member, also one that was never heard."""
        nobody = Sight(view=None, silent_s=float("inf"))
        return {node: self.sights.get(node, nobody) for node in self.members}

    @cached_property
    def known(self) -> list[NodeView]:
        """The last words about this launch, also of members that are silent now."""
        views = [s.view for s in self.seen.values() if s.view is not None]
        return [v for v in views if v.generation >= self.directive.generation]

    @cached_property
    def living(self) -> dict[str, NodeView]:
        """Members that are heard and have not lost the launch."""
        limit_s = self.settings.suspect_s
        return {n: s.view for n, s in self.seen.items() if s.view is not None and s.silent_s <= limit_s and not s.has_restarted}

    @cached_property
    def silent(self) -> tuple[str, ...]:
        """Members that are not heard now; those that never were, from when they should have been."""
        limit_s = self.settings.suspect_s
        return tuple(n for n, s in self.seen.items() if n not in self.living and (s.view is not None or limit_s < s.silent_s < float("inf")))

    @cached_property
    def dark(self) -> tuple[str, ...]:
        """Members that take no part in a save now."""
        return tuple(n for n in self.members if n not in self.living)

    @cached_property
    def ends(self) -> dict[str, NodeView]:
        """Members whose command of this launch is over."""
        return {
            n: v for n, v in self.living.items() if v.phase is NodePhase.ENDED and v.end is not None and v.generation >= self.directive.generation
        }

    @cached_property
    def failed(self) -> list[NodeView]:
        """Of these the ones that did not end in order."""
        return [v for v in self.ends.values() if v.end is not None and v.end.cause not in ORDERLY]

    @cached_property
    def at_work(self) -> list[str]:
        """Members whose command goes on."""
        return [n for n in self.living if n not in self.ends]

    @cached_property
    def signal(self) -> int:
        """A signal that asked some node to stop, 0 if none did."""
        return next((s.view.signal for s in self.sights.values() if s.view is not None and s.view.signal), 0)

    @cached_property
    def stuck(self) -> str | None:
        """Why only a person can help."""
        return next((f"{n}: {v.stuck}" for n, v in self.living.items() if v.stuck), None)

    @cached_property
    def fenced(self) -> str | None:
        """A later attempt owns the run: what is trained here can never be saved."""
        refusals = ((n, v.refused) for n, v in self.living.items() if v.refused is not None and v.generation >= self.directive.generation)
        return next((f"{n}: {refused.message}" for n, refused in refusals if refused.code == Fenced.code), None)

    @cached_property
    def last_step(self) -> int:
        """The last step that any rank is known to have made."""
        return max((v.step for v in self.known if v.ranks), default=self.start_step)

    @cached_property
    def start_step(self) -> int:
        """Where the launch started, -1 if no rank has got that far."""
        return max((v.restored_step for v in self.known if v.ranks), default=-1)

    @cached_property
    def saved_step(self) -> int:
        """The newest step known to be durable, -1 if none."""
        confirmed = int(self.directive.confirmed["step"]) if self.directive.confirmed else -1
        return max([confirmed, *(s.view.saved_step for s in self.sights.values() if s.view is not None)])

    @cached_property
    def durable_step(self) -> int:
        """The newest durable step of this launch, -1 if none: with several nodes, what the lead has confirmed."""
        if len(self.members) > 1:
            return int(self.directive.confirmed["step"]) if self.directive.confirmed else -1
        return max((v.durable_step for v in self.living.values()), default=-1)

    @cached_property
    def pace(self) -> policy.Pace:
        """How the job's steps go; of a silent node its last word counts, for its ranks may well go on."""
        views = [s.view for s in self.seen.values() if s.view is not None and not s.has_restarted]
        here = list(self.living.values())
        # Nobody finishes a step alone: if the living have made their first one, the others were there too, whatever they last said.
        known = here + [v for v in views if v.has_stepped and v.node not in self.living]
        is_stepping = bool(here) and all(v.is_stepping for v in known)
        return policy.Pace(
            is_stepping=is_stepping,
            is_inside=is_stepping and all(v.is_inside for v in known),
            overdue_s=min((v.since_step_s for v in here), default=0.0),
            step_s_p99=max((v.step_s_p99 for v in views), default=0.0),
        )

    def lost(self) -> tuple[str, ...]:
        """Members to give up: no rank of the job progresses, and there is evidence of death.

        A network for management that is down proves nothing while steps are made, and little before
        the first step or between epochs, when none are expected.
        """
        if not self.living:
            # Nobody has the launch any more, and whoever waits for the others would wait for ever.
            gone = [s.has_restarted or s.silent_s > self.settings.dead_s for s in self.seen.values()]
            return self.silent if all(gone) and any(s.has_restarted for s in self.seen.values()) else ()
        if not self.at_work:
            return ()
        pace = self.pace
        is_overdue = pace.overdue_s > policy.overdue_limit_s(pace)
        dead_s = self.settings.dead_s
        found = []
        for node in self.silent:
            sight = self.seen[node]
            if sight.has_restarted:
                # It came back without its ranks: that it was dark is a fact and needs no waiting.
                is_gone = is_overdue or not pace.is_stepping
            elif pace.is_inside:
                is_gone = is_overdue and sight.silent_s > dead_s
            else:
                is_gone = pace.overdue_s > _SLOW_START_S and sight.silent_s > max(_SLOW_START_S, dead_s)
            if is_gone:
                found.append(node)
        # Whoever is silent too has gone with them: one incident, not two.
        return self.silent if found else ()

    def root(self) -> NodeView:
        """Of the ended members the one whose end explains the others'."""
        views = self.failed or list(self.ends.values())
        return min(views, key=lambda v: _ROOTS.index(v.end.cause) if v.end is not None else len(_ROOTS))

    @property
    def has_only_symptoms(self) -> bool:
        """Commands that failed have only said that their peers are gone."""
        return all(v.end is not None and v.end.cause in (policy.Cause.CASCADE, policy.Cause.UNKNOWN) for v in self.failed)

    def silence(self, nodes: Sequence[str]) -> dict[str, Any]:
        """What is known of nodes that are silent, for the record."""
        silent_s = {n: round(min(self.seen[n].silent_s, 1e6), 2) for n in nodes}
        return {"nodes": list(nodes), "silent_s": silent_s, "has_restarted": [n for n in nodes if self.seen[n].has_restarted]}

    def last_words(self, outcome: Outcome) -> tuple[int, str]:
        """Exit code and text with which the run ends after that launch."""
        saved = f"step {self.saved_step} is durable" if self.saved_step >= 0 else "nothing was saved"
        if self.signal and outcome.cause != policy.Cause.FINISHED.value:
            name = signal.Signals(self.signal).name
            if self.signal == signal.SIGINT:
                return 130, f"stopped by {name}; {saved}"
            if self.saved_step >= 0:
                return 20, f"stopped by {name}; {saved}; run the same command to go on"
            return 128 + self.signal, f"stopped by {name}; {saved}"
        if outcome.exit_code:
            return outcome.exit_code, f"{outcome.reason}; {saved}"
        if not self.settings.argv:
            return 0, ""
        if not any(v.ranks for v in self.known):
            return 0, "the command ended with 0 but made no ridethrough.Checkpointer: nothing of it was protected"
        return 0, f"finished; {saved}"
