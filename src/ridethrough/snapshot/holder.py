"""The holding side of a courier: takes private parts from those nodes that are to send them here, and from nobody else."""

from __future__ import annotations

import secrets
import socket

from ridethrough.errors import Damaged
from ridethrough.seam import tcp
from ridethrough.snapshot import wire
from ridethrough.snapshot.plan import Plan
from ridethrough.snapshot.replicas import Replicas

_GREETING_S = 3.0
_FAREWELL_S = 1.0
_MAX_CONNECTIONS = 64
_READS_A_ROUND = 4
"""So that one sender in a hurry does not keep the others waiting."""
_IGNORED_BYTES = 4096


class _Caller:
    """A connection that somebody has made to us."""

    def __init__(self, connection: tcp.Connection, now_s: float) -> None:
        self.connection = connection
        self.inbox = wire.Inbox()
        self.deadline_s: float | None = now_s + _GREETING_S
        self.node = ""
        self.said = self.challenge = b""
        self.session: wire.Session | None = None
        self.is_over = False

    def answer(self, **fields: str) -> None:
        self.connection.queue([wire.message(wire.encode_greeting(fields))])

    def part(self, status: str, reason: str, now_s: float) -> None:
        """The caller is told why, and has a moment to read it."""
        self.answer(status=status, reason=reason)
        self.is_over = True
        self.session = None
        self.deadline_s = now_s + _FAREWELL_S


class _Refused(Exception):
    pass


class Holder:
    """Everybody who has called, and the parts they have brought.

    Args:
        replicas: Where the parts go.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._plan: Plan | None = None
        self._secret = wire.Secret("")
        self._callers: list[_Caller] = []
        self.refused = 0
        self.last_refusal: str | None = None
        self.has_news = False
        """Something is held, or was refused, that was not before."""

    @property
    def connections(self) -> list[tcp.Connection]:
        """For `tcp.wait`."""
        return [caller.connection for caller in self._callers]

    def change_plan(self, plan: Plan | None) -> None:
        """From now on only what belongs to this plan is taken; None: whoever calls is asked to come again."""
        self.close()
        self._plan = plan
        self._secret = wire.Secret(plan.key if plan is not None else "")

    def close(self) -> None:
        """Hung up on everybody."""
        for caller in self._callers:
            caller.connection.close()
        self._callers.clear()

    def serve(self, server: socket.socket | None, ready: set[int], now_s: float) -> None:
        """Everything that has come is dealt with."""
        for caller in self._callers:
            if caller.connection.is_open and caller.connection.fileno() in ready:
                self._hear(caller, now_s)
        if server is not None and server.fileno() in ready:
            while (connection := tcp.accept(server)) is not None:
                self._welcome(connection, now_s)
        for caller in self._callers:
            if caller.deadline_s is not None and now_s > caller.deadline_s:
                caller.connection.close("too slow")
        self._callers = [caller for caller in self._callers if caller.connection.is_open]

    def _refuse(self, peer: str, reason: str) -> None:
        self.refused += 1
        self.last_refusal = f"{peer}: {reason}"[:200]
        self.has_news = True

    def _welcome(self, connection: tcp.Connection, now_s: float) -> None:
        if len(self._callers) >= _MAX_CONNECTIONS:
            # Strangers make room, the oldest first: holding many connections open must not keep our own nodes out.
            strangers = [caller for caller in self._callers if caller.session is None]
            self._refuse(connection.peer, f"{len(self._callers)} connections")
            if not strangers:
                connection.close("too many")
                return
            strangers[0].connection.close("made room")
            self._callers.remove(strangers[0])
        self._callers.append(_Caller(connection, now_s))

    def _hear(self, caller: _Caller, now_s: float) -> None:
        for _ in range(_READS_A_ROUND):
            data = caller.connection.receive(_IGNORED_BYTES if caller.is_over else caller.inbox.room_bytes)
            if not data:
                return
            if caller.is_over:
                continue
            caller.inbox.add(data)
            try:
                while not caller.is_over and (body := caller.inbox.take()) is not None:
                    self._take(caller, body, now_s)
            except (_Refused, Damaged) as error:
                self._refuse(caller.connection.peer, str(error))
                if caller.session is None:
                    caller.part("refused", str(error), now_s)
                else:
                    caller.connection.close(str(error))

    def _take(self, caller: _Caller, body: bytes, now_s: float) -> None:
        if caller.session is not None:
            self._take_part(caller, body)
        elif not caller.said:
            self._take_hello(caller, body, now_s)
        else:
            self._take_proof(caller, body)

    def _take_hello(self, caller: _Caller, body: bytes, now_s: float) -> None:
        hello = wire.Hello.decode(body)
        plan = self._plan
        if plan is None or (hello.run_uid == plan.run_uid and hello.attempt.seq > plan.attempt.seq):
            # Its start agreement is over, ours is about to be: the plan is on its way to our board.
            caller.part("not yet", "no plan of this attempt here", now_s)
            return
        if hello.run_uid != plan.run_uid:
            raise _Refused("another run")
        if hello.attempt != plan.attempt:
            raise _Refused("another attempt")
        if hello.holder != plan.node:
            raise _Refused(f"this is not {hello.holder}")
        if hello.sender not in plan.nodes or plan.node not in plan.replica_nodes(hello.sender):
            raise _Refused(f"{hello.sender} does not send here")
        caller.said, caller.node = body, hello.sender
        caller.challenge = secrets.token_bytes(wire.NONCE_BYTES)
        caller.answer(status="challenge", challenge=caller.challenge.hex())

    def _take_proof(self, caller: _Caller, body: bytes) -> None:
        proof = wire.field_bytes(wire.decode_greeting(body), "proof")
        if not wire.is_same(proof, self._secret.proof(wire.AS_SENDER, caller.said, caller.challenge)):
            raise _Refused("wrong key")
        for other in self._callers:
            if other.node == caller.node and other.session is not None:
                other.connection.close("called again")
        caller.session = self._secret.session(caller.said, caller.challenge, is_sender=False)
        caller.inbox.limit_bytes = wire.FRAME_LIMIT_BYTES
        caller.deadline_s = None
        caller.answer(status="welcome", proof=self._secret.proof(wire.AS_HOLDER, caller.said, caller.challenge).hex())

    def _take_part(self, caller: _Caller, body: bytes) -> None:
        assert caller.session is not None
        assert self._plan is not None
        parcel = wire.Parcel.unpack(*caller.session.open(body))
        nodes = self._plan.roster.nodes
        if not 0 <= parcel.rank < len(nodes) or nodes[parcel.rank] != caller.node:
            raise _Refused(f"rank {parcel.rank} is not on {caller.node}")
        is_held = self._replicas.put(parcel)
        self.has_news = True
        caller.connection.queue(caller.session.seal(wire.encode_receipt(parcel.rank, parcel.step, is_held=is_held)))
