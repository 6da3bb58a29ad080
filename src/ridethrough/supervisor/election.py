"""Whom a node follows. Pure but for what it remembers; every node runs its own.

The lead is the first living node in the order of the roster. A node follows one lead until that one
is silent, then gives each next node in turn the same time to speak up, and leads itself when its turn
comes. So it waits only for nodes before it, and two of them never wait for each other.
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
        """When this node began to follow whom it follows."""
        self.following: str | None = None

    def enter(self, lead: str | None, *, now_s: float) -> None:
        """A room is entered; its lead is known, or (None) has to be found out by listening."""
        self.following, self.since_s = lead, now_s
        self._began_s = now_s

    def follow(self, lead: str, *, now_s: float) -> None:
        """A directive of that lead was taken, or the one we follow has said that it follows that one."""
        if lead != self.following:
            self.following, self.since_s = lead, now_s

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
            self.following, self.since_s = (living[0] if living else self._me), now_s
        assert self.following is not None
        if self.following != self._me:
            age = age_s(self.following)
            quiet_s = now_s - self.since_s if age is None else min(age, now_s - self.since_s)
            if quiet_s > self._suspect_s:
                at = order.index(self.following)
                self.following, self.since_s = order[(at + 1) % len(order)], now_s
        return self.following
