"""Whom a node follows. Pure but for what it remembers; every node runs its own.

The lead is the first living node in the order of the roster. A node follows one lead until that one
is silent, then looks at the next two nodes for the same time, then at the next four, eight, ... and
follows the first of them that is heard, or leads itself if none before it is. So it waits only for
nodes before it, and two of them never wait for each other; that a whole rack goes dark at once costs
turns in the logarithm of its size. Not at all nodes at once: every living node asks those at which it
looks, and of a thousand only a few are dark as a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Election:
    """One node's view of who leads.

    Args:
        me: This node.
        suspect_s: Silence after which the next node's turn comes.
        listen_s: How long a node that has just started listens before it may lead: others may know more.
    """

    def __init__(self, me: str, *, suspect_s: float, listen_s: float) -> None:
        self._me = me
        self._suspect_s = suspect_s
        self._listen_s = listen_s
        self._began_s: float | None = None
        self.since_s = 0.0
        """When this node began to follow whom it follows, or to look at those of whom it follows the first."""
        self.following: str | None = None
        """Of several that are looked at the first, until it has had its time."""
        self._turn: tuple[str, ...] = ()
        """Who has to speak up now: whom we follow, or those that are looked at."""

    @property
    def watched(self) -> tuple[str, ...]:
        """Who must be asked for a word now."""
        return self._turn if self.following is not None else ()

    def _settle(self, lead: str, now_s: float) -> None:
        self.following, self.since_s, self._turn = lead, now_s, (lead,)

    def enter(self, lead: str | None, *, now_s: float) -> None:
        """A room is entered; its lead is known, or (None) has to be found out by listening."""
        self.following, self.since_s, self._turn = lead, now_s, (lead,) if lead is not None else ()
        self._began_s = now_s

    def follow(self, lead: str, *, now_s: float) -> None:
        """A directive of that lead was taken, or the one we follow has said that it follows that one."""
        if (self.following, self._turn) != (lead, (lead,)):
            self._settle(lead, now_s)

    def lead(self, order: Sequence[str], age_s: Callable[[str], float | None], *, now_s: float) -> str | None:
        """Who leads now, as far as this node can tell; None while it still listens.

        Args:
            order: All nodes that may lead, first come first.
            age_s: Time since a node was heard, None if never.
            now_s: Monotonic time.
        """
        if len(order) <= 1:
            return self._me
        if self._began_s is None:
            self._began_s = now_s
        if self.following not in order:
            ages = {node: age_s(node) for node in order if node != self._me}
            if now_s - self._began_s < self._listen_s and not all(age is not None for age in ages.values()):
                return None
            living = [node for node in order if node == self._me or ((age := ages[node]) is not None and age <= self._suspect_s)]
            self._settle(living[0] if living else self._me, now_s)
        while not self._has_chosen(age_s, now_s):
            self._turn, self.since_s = self._next(order), now_s
        return self.following

    def _has_chosen(self, age_s: Callable[[str], float | None], now_s: float) -> bool:
        """Follows the first of those looked at that has time left to speak up; False: none has."""
        turn_s = now_s - self.since_s
        for node in self._turn:
            if node == self._me:
                self.follow(node, now_s=now_s)
                return True
            age = age_s(node)
            if turn_s <= self._suspect_s or (age is not None and age <= self._suspect_s):
                self.following = node
                # What it said before its turn proves nothing: it may have gone dark together with those before it.
                if age is not None and age < turn_s:
                    self.follow(node, now_s=now_s)
                return True
        return False

    def _next(self, order: Sequence[str]) -> tuple[str, ...]:
        """Who is looked at next. Twice as many as before, but none behind this node: whoever hears nobody before it leads."""
        at = order.index(self._turn[-1])
        nodes = tuple(order[(at + step) % len(order)] for step in range(1, min(2 * len(self._turn), len(order)) + 1))
        return nodes[: nodes.index(self._me) + 1] if self._me in nodes else nodes
