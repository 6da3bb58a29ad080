"""The sending side of a courier: one connection to one holder, always with the newest step."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from ridethrough.errors import Damaged
from ridethrough.seam import tcp
from ridethrough.snapshot import wire
from ridethrough.snapshot.plan import Plan
from ridethrough.types import AttemptRef

_GREETING_S = 3.0
_RECEIPT_S = 10.0
"""Longer than any peer that still reads takes for one part, at 1 Mbit/s."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A whole step of this node: the private parts of all its ranks."""

    step: int
    parts: tuple[wire.Packed, ...]


class Sender:
    """Brings the newest step to one node. A peer that is slow or dark makes it skip steps, and costs nobody else anything.

    One batch is under way at a time and one waits, the newest: nothing queues up that is old when it arrives.

    Args:
        plan: Of the launch.
        node: Who is to hold our parts.
        interface: To send from.
    """

    def __init__(self, plan: Plan, node: str, interface: str | None) -> None:
        host, _, port = plan.addresses[node]
        self._host, self._port, self._interface = str(host), int(port or 0), interface
        self._hello = wire.Hello(
            run_uid=plan.run_uid, attempt=AttemptRef(seq=plan.attempt.seq, nonce=plan.attempt.nonce), sender=plan.node, holder=node
        )
        self._secret = wire.Secret(plan.key)
        self._lookup: tcp.Lookup | None = None
        self._tries = 0
        self._retry_s = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._deadline_s = 0.0
        self._said = self._challenge = b""
        self._inbox = wire.Inbox()
        self._session: wire.Session | None = None
        self._newest: Batch | None = None
        self._under_way = -1
        self._awaited: set[int] = set()
        self._is_refused = False
        self.connection: tcp.Connection | None = None
        self.acknowledged = -1
        """The newest step of which the other node has said that it holds all our parts."""
        self.trouble: str | None = "not connected yet"

    def offer(self, batch: Batch) -> None:
        """This step is sent next, whatever waited before."""
        self._newest = batch

    def advance(self, now_s: float) -> None:
        """What can be done without waiting is done."""
        connection = self.connection
        if connection is None:
            if now_s >= self._retry_s:
                self._connect(now_s)
        elif not connection.is_open:
            self._lose(connection.reason, now_s)
        elif now_s > self._deadline_s and (self._session is None or self._awaited):
            self._lose("does not answer", now_s)
        elif self._session is not None and not self._awaited and self._newest is not None and self._newest.step != self._under_way:
            self._send(self._newest, now_s)

    def receive(self, now_s: float) -> None:
        """What the other node has said is heard."""
        if self.connection is None:
            return
        self._inbox.add(self.connection.receive(self._inbox.room_bytes))
        try:
            while self.connection is not None and (body := self._inbox.take()) is not None:
                if self._session is None:
                    self._greet(body, now_s)
                else:
                    self._take_receipt(self._session.open(body)[0], now_s)
        except (Damaged, KeyError, TypeError, ValueError) as error:
            self._lose(f"makes no sense: {error}", now_s)

    def close(self) -> None:
        """Hung up. Idempotent."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    # -- connecting ------------------------------------------------------------------------------------------------

    def _connect(self, now_s: float) -> None:
        if self._lookup is None:
            self._lookup = tcp.Lookup(self._host, self._port)
        if not self._lookup.is_done:
            return
        found, reason, self._lookup = self._lookup.found, self._lookup.reason, None
        if not found:
            self._lose(reason, now_s)
            return
        # A name may stand for several addresses; the next try takes the next one.
        self.connection = tcp.connect(found[self._tries % len(found)], self._interface)
        self._tries += 1
        self._inbox = wire.Inbox()
        self._deadline_s = now_s + _GREETING_S
        self._said = self._hello.encode(secrets.token_bytes(wire.NONCE_BYTES))
        self._challenge = b""
        self.connection.queue([wire.message(self._said)])

    def _greet(self, body: bytes, now_s: float) -> None:
        assert self.connection is not None
        fields = wire.decode_greeting(body)
        status = fields.get("status")
        if status == "challenge" and not self._challenge:
            self._challenge = wire.field_bytes(fields, "challenge")
            proof = self._secret.proof(wire.AS_SENDER, self._said, self._challenge)
            self.connection.queue([wire.message(wire.encode_greeting({"proof": proof.hex()}))])
        elif status == "welcome" and self._challenge:
            if not wire.is_same(wire.field_bytes(fields, "proof"), self._secret.proof(wire.AS_HOLDER, self._said, self._challenge)):
                self._lose("has another key", now_s)
                return
            self._session = self._secret.session(self._said, self._challenge, is_sender=True)
            self._pause_s = _FIRST_PAUSE_S
            self._under_way = self.acknowledged
            self.trouble = None
        else:
            self._lose(f"{status}: {fields.get('reason', '')}"[:200], now_s)

    def _lose(self, reason: str, now_s: float) -> None:
        self.close()
        self._session = None
        self._awaited.clear()
        self.trouble = reason
        self._retry_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    # -- sending ---------------------------------------------------------------------------------------------------

    def _send(self, batch: Batch, now_s: float) -> None:
        assert self.connection is not None
        assert self._session is not None
        for part in batch.parts:
            self.connection.queue(self._session.seal(part.head, part.payload))
        self._under_way = batch.step
        self._awaited = {part.rank for part in batch.parts}
        self._is_refused = False
        self._deadline_s = now_s + _RECEIPT_S

    def _take_receipt(self, fields: dict[str, object], now_s: float) -> None:
        if fields["step"] != self._under_way or fields["rank"] not in self._awaited:
            raise ValueError("a receipt for what was not sent")
        self._awaited.discard(int(str(fields["rank"])))
        self._is_refused = self._is_refused or fields["is_held"] is not True
        self._deadline_s = now_s + _RECEIPT_S
        if not self._awaited and not self._is_refused:
            self.acknowledged = self._under_way
