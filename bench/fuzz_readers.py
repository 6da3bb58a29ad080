"""Every reader of bytes that may be damaged or hostile, with real files to start from and with what it may raise.

A reader is driven the way its callers do, and what it accepts is used a little: a value that crashes the next line was
not refused where it should have been.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fuzz_mutate as mutate
from fuzz_mutate import Pairs

from ridethrough import journal
from ridethrough.config import Config, PeersConfig
from ridethrough.errors import Damaged, ForeignRecord, FormatTooNew, RideThroughError, StorageError, UsageError
from ridethrough.format import layout, part, record, seal, tree
from ridethrough.format.attempt import Attempt, Roster, Run
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.snapshot import wire
from ridethrough.store.catalog import lineage
from ridethrough.store.key import read_key
from ridethrough.store.start import remembered_run, remembered_storage, unfinished_claims
from ridethrough.supervisor import packet
from ridethrough.supervisor.directive import Directive, Incident, Outcome, Stage
from ridethrough.supervisor.peers import Peers
from ridethrough.supervisor.settings import Settings
from ridethrough.supervisor.talk import Talk
from ridethrough.supervisor.view import End, NodePhase, NodeView, Refused, Sealed
from ridethrough.testing import FakeClock, SimpleStore, load_newest
from ridethrough.testing.network import FakeNetwork
from ridethrough.types import AttemptRef, Parent

GOLDEN = Path(__file__).parents[1] / "tests" / "data" / "format1" / "exp001"
RECORD_ERRORS = (Damaged, FormatTooNew, ForeignRecord)
FILE_EVENTS = ("open", "os.")
_COPIED_BYTES = 50_000
_FILE_BYTES = 300_000
_RECORD = mutate.Record()
KEY, SCOPE = bytes(range(32)), "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One way in."""

    name: str
    corpus: tuple[bytes, ...]
    read: Callable[[bytes], Any]
    documented: tuple[type[BaseException], ...]
    """What it says that it raises."""
    shape: mutate.Shape = mutate.Shape()  # noqa: RUF009 - has no state
    fix: mutate.Fix | None = None
    hints: tuple[bytes, ...] = ()
    is_vouched: Callable[[bytes, Any], bool] | None = None
    """What was accepted may be accepted, told without the code that is tested."""
    allowed_events: tuple[str, ...] = ()
    """Beginnings of audit events that belong to reading."""
    copies: int = 1
    """Structures of the whole input that are there at once: what is read from JSON, and what is made of it."""
    limit_bytes: int = _FILE_BYTES
    """Longer input never reaches the reader."""


# -- the corpus ------------------------------------------------------------------------------------------------------------


def build(run_dir: Path) -> SimpleStore:
    """A run of two attempts with a journal: attempt 1 with steps 1 and 9 (abandoned), attempt 2 from step 1 with step 2."""
    store = SimpleStore(fs=PosixFileSystem(), run_dir=str(run_dir), part_bytes=300)
    store.start()
    store.commit(1, 9)
    store.start(parent=Parent(attempt=store.attempt, step=1))
    store.commit(2)
    log = journal.Journal(store.fs, FakeClock(), layout.journal_path(store.run_dir, "node-0"), role="t")
    log.append("checkpoint.durable", step=1, attempt_seq=1, save_id="ab" * 16, loss=float("nan"))
    log.append("launch.ended", nodes=["a", "b"], silent_s={"a": 1.5})
    return store


class Corpus:
    """Real files by kind, from a run of `SimpleStore` and from the golden run of the tests."""

    def __init__(self, root: Path) -> None:
        self.store = build(root / "run")
        self.run_dir = Path(self.store.run_dir)
        self.root = root

    def files(self, pattern: str) -> tuple[bytes, ...]:
        """Contents of the files of that name."""
        found = [path.read_bytes() for top in (self.run_dir, GOLDEN) for path in sorted(top.rglob(pattern))]
        assert found, pattern
        return tuple(dict.fromkeys(found))


class OneFile:
    """A file system with the same bytes in every file."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, path: str, *, max_bytes: int, past_cache: bool = False) -> bytes:
        if len(self._data) > max_bytes:
            raise StorageError(path=path, detail="too long")
        return self._data

    def list_dir(self, path: str) -> list[str]:
        return ["000007.claim"]


# -- records ---------------------------------------------------------------------------------------------------------------


def use_attempt(attempt: AttemptRef, parent: Parent | None) -> None:
    """As the catalog does."""
    known = {attempt: parent}
    lineage(known.items())
    AttemptRef(seq=attempt.seq + 1, nonce="0" * 32).label.encode()
    for ref in (attempt, *([parent.attempt] if parent else [])):
        assert layout.parse_attempt_dir(ref.label) is not None, f"an attempt without a directory of its own: {ref.label!r}"


def use_roster(roster: Roster) -> None:
    """As the catalog, the loader and the placement do."""
    assert Roster.decode(roster.encode(), path="again") == roster
    use_attempt(roster.attempt, None)
    assert roster.digest
    assert roster.part_names, "a checkpoint without parts would be complete"
    assert 3 % roster.world_size < roster.world_size
    for held in roster.parts:
        assert [roster.nodes[rank] for rank in held.holders], "a part that nobody holds"


def read_run(data: bytes) -> Run:
    found = Run.decode(data, path="run.json")
    assert Run.decode(found.encode(), path="again") == found
    seal.save_id(found.run_uid, "0" * 32, 1)
    return found


def read_attempt(data: bytes) -> Attempt:
    found = Attempt.decode(data, path="attempt.json")
    assert Attempt.decode(found.encode(), path="again") == found
    use_attempt(found.attempt, found.parent)
    return found


def read_roster(data: bytes) -> Roster:
    found = Roster.decode(data, path="roster.json")
    use_roster(found)
    return found


def read_manifest(data: bytes) -> Roster:
    fields = record.decode("manifest", data, path="manifest.json")
    found = Roster.from_fields(record.field(fields, "roster", dict, path="manifest.json"), path="manifest.json")
    use_roster(found)
    return found


def read_claim(data: bytes) -> Any:
    [claim] = unfinished_claims(OneFile(data), "run", above=0)  # type: ignore[arg-type]
    claim.label.encode()
    claim.is_over(["node-0"])
    return claim if claim.nonce else None


def read_memory(data: bytes) -> Any:
    """What a node remembers of a run."""
    fs = OneFile(data)
    uid = remembered_run(fs, "state", "run")  # type: ignore[arg-type]
    remembered_storage(fs, "state", "run")  # type: ignore[arg-type]
    return uid or None


def read_seal(data: bytes) -> seal.Seal:
    found = seal.decode(data, path="x.seal")
    use_attempt(found.attempt, found.parent)
    assert found.payload_digest
    assert found.payload_bytes >= 0
    assert layout.parse_step_dir(layout.step_dir(found.step, found.save_id)) == (found.step, found.save_id[:8])
    sum(spec.end - spec.begin for spec in found.tensors)
    hash((found.run_uid, found.attempt, found.parent, found.save_id, found.part, found.node, found.roster_digest))
    if len(data) < _COPIED_BYTES:  # the copy would count as memory that the reader takes
        assert seal.decode(found.encode(), path="again").payload_digest == found.payload_digest
    return found


def fix_seal(value: Any, rng: random.Random) -> None:
    """The save id belongs to the run, attempt and step again."""
    fields = dict(map(tuple, value)) if isinstance(value, Pairs) else {}
    try:
        nonce = dict(map(tuple, fields["attempt"]))["nonce"]
        text = f"{fields['run_uid']}\0{nonce}\0{fields['step']}".encode("utf-8", "surrogatepass")
    except (KeyError, TypeError, ValueError):
        return
    for pair in value:
        if pair[0] == "save_id":
            pair[1] = hashlib.sha256(text).hexdigest()[:32]


def is_record_vouched(data: bytes, result: Any) -> bool:
    return result is None or _RECORD.is_intact(data)


def record_reader(name: str, corpus: tuple[bytes, ...], read: Callable[[bytes], Any], fix: mutate.Fix | None = None) -> Reader:
    return Reader(name=name, corpus=corpus, read=read, documented=RECORD_ERRORS, shape=_RECORD, fix=fix, is_vouched=is_record_vouched)


# -- trees -----------------------------------------------------------------------------------------------------------------

TAGS = ("tuple", "dict", "odict", "float", "bytes", "set", "fset", "complex", "tensor", "array", "numpy", "torch", "path", "pickle")
TREE = {
    "tuple": {"~": "tuple", "v": [1, "a"]}, "dict": {"~": "dict", "v": [[1, 2], [{"~": "tuple", "v": []}, None]]},
    "odict": {"~": "odict", "v": [["a", 1]]}, "float": {"~": "float", "v": "nan"}, "bytes": {"~": "bytes", "v": "AP8="},
    "set": {"~": "set", "v": [1, 2]}, "fset": {"~": "fset", "v": ["a"]}, "complex": {"~": "complex", "v": ["0x1p+0", "-0x1.8p+0"]},
    "tensor": {"~": "tensor", "v": "w"}, "array": {"~": "array", "v": "w"}, "numpy": {"~": "numpy", "v": ["<f4", "cdcccc3d"]},
    "dtype": {"~": "torch", "v": ["dtype", "float32"]}, "device": {"~": "torch", "v": ["device", "cpu"]},
    "size": {"~": "torch", "v": ["size", [1, 2]]}, "path": {"~": "path", "v": "/a/b"},
}  # fmt: skip
_DTYPES = (
    "O", "|O8", "f8,O", "S0", "V0", "U9", "M8[s]", "m8[99999999999s]", "c32", "<f16", "(2,)f4", "(99999999,9999999)f8", "f4" * 500, "f4," * 4000,
    "(" + "-" * 30_000 + "1)f4", "(" * 300 + ")" * 300 + "f4", "(__import__('os'),)f4", "i0", "b1", ">i8", "?", "e", "float", "str", "object",
)  # fmt: skip
_COLLIDING = b'{"~":"set","v":[' + b",".join(str(n * ((1 << 61) - 1)).encode() for n in range(1, 12_000)) + b"]}"
TREE_HINTS = (
    *(json.dumps({"~": tag, "v": value}).encode() for tag in TAGS for value in ([], {}, [[]], "", 1, [1, 2], ["a", "b"], None)),
    *(json.dumps({"~": "numpy", "v": [dtype, "00" * 16]}).encode() for dtype in (*_DTYPES, ["f4", "O"], {"names": ["a"], "formats": ["O"]}, None, 5)),
    *(json.dumps({"~": "torch", "v": [kind, value]}).encode() for kind in ("dtype", "device", "size") for value in ("load", "meta", 0, [2**70])),
    json.dumps({"~": "numpy", "v": ["(1,)i1", "00" * 60_000]}).encode(),
    _COLLIDING,
)  # fmt: skip


class _Tensor:
    """Stands for any tensor of the part."""

    def numpy(self) -> bytes:
        return b""


def _tensor(name: Any) -> _Tensor:
    if type(name) is not str:
        raise KeyError(name)
    return _Tensor()


def read_tree(data: bytes) -> Any:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:  # as `record.decode` has done before
        raise Damaged(path="x.seal", detail="not JSON") from error
    return tree.decode(value, _tensor, path="x.seal")


# -- journal, payload, names, key ------------------------------------------------------------------------------------------


def read_journal(data: bytes) -> journal.History:
    found = journal.decode(data)
    for event in found.events:
        event.data.get("step")
    found.of("launch.ended")
    return found if found.events else None  # type: ignore[return-value]


def is_journal_vouched(data: bytes, result: Any) -> bool:
    return result is None or len(result.events) <= mutate.Journal.intact_count(data)


PAYLOAD_HINTS = (
    b"[" + b",".join([b"9"] * 60_000) + b"]", b"[0," + b",".join([b"9" * 4300] * 20) + b"]", b"[0,0]", b"[[0,1]]", b'"F32"', b"[-1,-1]",
)  # fmt: skip
"""Shapes whose product takes long to work out, among others."""


def read_payload(data: bytes) -> Any:
    specs, begin = part.parse_header(data, path="x.safetensors")
    assert begin + sum(spec.end - spec.begin for spec in specs) == len(data), "bytes that belong to no tensor"
    return specs


def read_names(data: bytes) -> Any:
    name = os.fsdecode(data)
    step, attempt = layout.parse_step_dir(name), layout.parse_attempt_dir(name)
    claim, file = layout.parse_claim(name), layout.parse_part_file(name)
    if step is not None:
        assert layout.step_dir(*step) == name
    if attempt is not None:
        assert AttemptRef(seq=attempt[0], nonce=attempt[1]).label == name
    if claim is not None:
        assert os.path.basename(layout.claim_path("", claim)) == name
    if file is not None:
        assert layout.part_stem(file.part, file.node, file.nonce8) == file.stem
        assert f"{file.stem}.{'seal' if file.is_seal else 'safetensors'}" == name
    found = [kind for kind in (step, attempt, claim, file) if kind is not None]
    assert len(found) <= 1, "two meanings"
    assert not found or (name.isascii() and name.isprintable() and "/" not in name)
    return found or None


def key_reader(root: Path) -> Reader:
    path = root / "key"
    path.touch(mode=0o600)

    def read(data: bytes) -> str:
        path.write_bytes(data)
        found = read_key(PosixFileSystem(), str(path))
        assert len(bytes.fromhex(found)) == 32
        return found

    corpus = (b"5a" * 32 + b"\n", b"AB" * 32, b" " + b"01" * 32 + b"\r\n")
    return Reader(name="key", corpus=corpus, read=read, documented=(UsageError, StorageError), allowed_events=FILE_EVENTS, limit_bytes=10_000)


# -- a whole run -----------------------------------------------------------------------------------------------------------


class Files(mutate.Shape):
    """The name of a file, a line end, and what is in it; each in its own shape."""

    @staticmethod
    def _inner(data: bytes) -> tuple[bytes, bytes, mutate.Shape]:
        name, _, content = data.partition(b"\n")
        if name.endswith(b".jsonl"):
            return name, content, mutate.Journal()
        if name.endswith(b".safetensors"):
            return name, content, mutate.Payload()
        return name, content, mutate.Json() if name.endswith(b"meta.json") else _RECORD

    def open(self, data: bytes) -> list[bytes]:
        _, content, shape = self._inner(data)
        return shape.open(content)

    def close(self, data: bytes, number: int, text: bytes, rng: random.Random) -> bytes:
        name, content, shape = self._inner(data)
        return name + b"\n" + shape.close(content, number, text, rng)


def catalog_reader(corpus: Corpus) -> Reader:
    """A run in which one file is not what it was; whatever is restored is what was saved."""
    store, root = corpus.store, corpus.run_dir
    files = {str(path.relative_to(root)).encode(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}

    def read(data: bytes) -> Any:
        name, _, content = data.partition(b"\n")
        if name not in files or content == files[name]:
            return None
        path = root / name.decode()
        path.write_bytes(content)
        try:
            return load_newest(store.fs, store.run_dir, past_cache=False)
        finally:
            path.write_bytes(files[name])

    def is_vouched(data: bytes, loaded: Any) -> bool:
        content = data.partition(b"\n")[2]
        # A record that was changed and signed again is another record: what it vouches for is its own affair.
        return loaded is None or store.is_true(loaded) or _RECORD.is_intact(content)

    return Reader(
        name="catalog",
        corpus=tuple(name + b"\n" + content for name, content in files.items()),
        read=read,
        documented=(RideThroughError,),
        shape=Files(),
        fix=fix_seal,
        is_vouched=is_vouched,
        allowed_events=FILE_EVENTS,
    )


# -- the network -----------------------------------------------------------------------------------------------------------


class Datagram(mutate.Shape):
    """A packet under a mac that holds; its body, if it is JSON that is not compressed or can be unpacked."""

    signer = packet.Signer(KEY, SCOPE)
    _derived = hashlib.blake2b(SCOPE.encode(), key=hashlib.blake2b(KEY, digest_size=32).digest(), digest_size=32, person=b"rt peers").digest()

    def open(self, data: bytes) -> list[bytes]:
        return [data[3:-52]] if len(data) >= 55 else []

    def close(self, data: bytes, number: int, text: bytes, rng: random.Random) -> bytes:
        tail = bytearray(data[-52:-16])
        if rng.random() < 0.3:
            tail[rng.randrange(len(tail))] = rng.randrange(256)
        return self.signed(b"rt\1" + text + tail)

    def signed(self, data: bytes) -> bytes:
        """With the mac, told without the code that is tested."""
        return data + hashlib.blake2b(data, key=self._derived, digest_size=16).digest()


def read_packet(data: bytes) -> Any:
    found = Datagram.signer.open(data)
    if isinstance(found, packet.Refusal):
        return None
    body = found.body()
    assert body is None or len(body) <= packet.BODY_LIMIT_BYTES or not found.flags & packet.DEFLATED
    assert len(found.life) == packet.LIFE_BYTES
    return found


def packet_reader() -> Reader:
    signer = Datagram.signer
    bodies = (None, b"{}", json.dumps({"r": "x", "v": {"node": "a"}, "n": [1, "", 2]}).encode(), bytes(8000), random.Random(1).randbytes(8192))
    corpus = [signer.letter(body).sign(bytes(8), bytes(12), 7, bytes(4), 40000, age=5, asks=True) for body in bodies]
    bomb = mutate.BINARY[0] + bytes(10)
    corpus.append(Datagram().signed(b"rt\1" + bomb + struct.pack(">B8s12sI4sHH", 6, bytes(8), bytes(12), 1, bytes(4), 1, 0)))
    return Reader(
        name="packet",
        corpus=tuple(corpus),
        read=read_packet,
        documented=(),
        shape=Datagram(),
        is_vouched=lambda data, found: found is None or Datagram().signed(data[:-16]) == data,
        limit_bytes=65_507,
    )


HELLO = wire.Hello(run_uid="run-1", attempt=AttemptRef(seq=3, nonce="ab" * 16), sender="n0", holder="n1")


def read_greeting(data: bytes) -> Any:
    """As both sides of a connection that has not proven anything yet."""
    inbox = wire.Inbox()
    inbox.add(wire.message(data)[: inbox.room_bytes])
    body = inbox.take()
    if body is None:
        return None
    fields = wire.decode_greeting(body)
    # What the sender of parts makes of an answer that is none.
    f"{fields.get('status')}: {fields.get('reason', '')}"[:200].encode("utf-8", "backslashreplace")
    for name in ("challenge", "proof", "nonce"):
        with contextlib.suppress(Damaged):
            assert len(wire.field_bytes(fields, name)) == wire.NONCE_BYTES
    found = wire.Hello.decode(body)
    return found


def greeting_reader() -> Reader:
    corpus = (
        HELLO.encode(bytes(32)),
        wire.encode_greeting({"status": "challenge", "challenge": "ab" * 32}),
        wire.encode_greeting({"proof": "cd" * 32}),
        wire.encode_greeting({"status": "refused", "reason": "another run"}),
    )
    limit_bytes = wire.GREETING_LIMIT_BYTES + 20
    return Reader(name="greeting", corpus=corpus, read=read_greeting, documented=(Damaged,), shape=mutate.Json(), limit_bytes=limit_bytes)


def _session_key() -> bytes:
    secret = hashlib.blake2b(b"key").digest()
    state = hashlib.blake2b(key=secret, digest_size=32, person=b"rt session")
    state.update(b"hello" + b"challenge")
    return state.digest()


class Frame(mutate.Shape):
    """A frame of a connection: mac, length, head, payload."""

    _key = _session_key()

    def open(self, data: bytes) -> list[bytes]:
        end = 36 + int.from_bytes(data[32:36], "big")
        return [data[36:end]] if 36 <= end <= len(data) else []

    def close(self, data: bytes, number: int, text: bytes, rng: random.Random) -> bytes:
        payload = data[36 + int.from_bytes(data[32:36], "big") :]
        length = len(text) if rng.random() < 0.9 else rng.choice((0, 1, len(text) + 1, 0xFFFFFFFF))
        return self.signed(struct.pack(">I", length) + text + payload)

    def signed(self, rest: bytes) -> bytes:
        """With the mac of the first frame, told without the code that is tested."""
        return hashlib.blake2b(bytes(8) + rest, key=self._key, digest_size=32, person=b"rt to holder").digest() + rest


def read_frame(data: bytes) -> Any:
    """As the holder does with a part of another node."""
    inbox = wire.Inbox()
    inbox.limit_bytes = wire.FRAME_LIMIT_BYTES
    inbox.add(wire.message(data))
    body = inbox.take()
    assert body is not None
    session = wire.Secret("key").session(b"hello", b"challenge", is_sender=False)
    parcel = wire.Parcel.unpack(*session.open(body))
    # What `Replicas.put` does to keep it in a slot.
    parcel.index["parts"][0]["at"] = 4096
    json.dumps(parcel.index, separators=(",", ":"), allow_nan=False).encode()
    struct.pack("<QI", parcel.step, max(parcel.rank, 0) % 100_000)
    return parcel


def fix_frame(value: Any, rng: random.Random) -> None:
    """The steps of head and index agree, mostly with an extreme one."""
    if isinstance(value, Pairs):
        step = rng.choice((7, 0, 1 << 62, 1 << 63, 1 << 64, -1))
        for pair in value:
            if pair[0] == "step":
                pair[1] = step
            elif pair[0] == "index" and isinstance(pair[1], Pairs):
                for inner in pair[1]:
                    if inner[0] == "step":
                        inner[1] = step


def frame_reader() -> Reader:
    frames = []
    for payload in (b"", b"payload" * 9, bytes(3000)):
        packed = wire.pack(rank=2, step=7, index={"metrics": {"loss": 1.5}, "progress": [1, None]}, tree=TREE, payload=payload)
        session = wire.Secret("key").session(b"hello", b"challenge", is_sender=True)
        frames.append(b"".join(session.seal(packed.head, packed.payload))[4:])
    assert all(Frame().signed(frame[32:]) == frame for frame in frames)
    return Reader(
        name="frame",
        corpus=tuple(frames),
        read=read_frame,
        documented=(Damaged,),
        shape=Frame(),
        fix=fix_frame,
        is_vouched=lambda data, found: Frame().signed(data[32:]) == data,
    )


# -- between supervisors ---------------------------------------------------------------------------------------------------

NODES = ("a", "b", "c")
VIEW = NodeView(
    node="b", up_s=10.0, phase=NodePhase.RUNNING, generation=1, attempt="000001-00000000", missing=("storage",), signal=15, ranks=2, step=7,
    posted=(6, 7), replicas={"a": (6, 7)}, wanted=7, wanted_age_s=0.5, sealed=(Sealed(7, ("c",), True, {"replicated": "ab"}),),
    refused=Refused(number=1, step=7, code="RT-1", message="no", age_s=1.0), dead_ranks=(1,),
    end=End(status=1, cause="c", fingerprint="f", detail="d"),
)  # fmt: skip
WORD = Directive(
    room="r", number=3, lead="b", stage=Stage.RUNNING, generation=1, called_s=1.0, members=NODES, reason="x", attempt="000001-00000000", announced=7,
    announcement=1, dark=("c",), flush={"id": 1, "reason": "r", "dark": ["c"]}, confirmed={"step": 7, "is_verified": True, "dark": ["c"]},
    refused={"number": 1, "step": 7, "code": "c", "message": "m"}, stop={"id": 1, "state": "proposed", "step": 9, "since_s": 1.0, "term_s": 2.0},
    outcome=Outcome(cause="c", fingerprint="f", detail="d", action="restart", reason="r", lost=("c",)),
    incident=Incident(cause="c", detail="d", nodes=("c",), last_step=6, opened_at="2026-01-01T00:00:00Z"), code=1, text="t",
)  # fmt: skip
_SETTINGS = Settings(argv=("train",), config=Config(peers=PeersConfig(port=29577)))


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("too deep") from error


def read_view(data: bytes) -> NodeView:
    found = NodeView.decode(_json(data))
    json.dumps(found.encode(), default=str).encode()
    hash(tuple(found.posted + found.dead_ranks + found.missing))
    # What is compared and added up by whoever leads.
    assert min(found.generation, found.signal, found.step, found.ranks, found.flushed, found.durable_step, *found.posted) < 1 << 80
    assert found.up_s + found.since_step_s + found.wanted_age_s + found.step_s_p99 is not None
    assert all((sealed.step + 1, f"{sealed.dark}{sealed.digests}") for sealed in found.sealed)
    return found


def read_directive(data: bytes) -> Directive:
    found = Directive.decode(_json(data))
    json.dumps(found.encode(), default=str).encode()
    assert (found.generation, found.attempt or "", found.number) < (1 << 80, "", 0)
    hash((found.room, found.lead, found.members, found.dark, found.text, found.reason))
    assert found.called_s + found.announcement + found.code is not None
    return found


class Hall:
    """Node a, and b, who holds the key and says anything at all."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        network = FakeNetwork(self.clock)
        addresses = {node: (node, 29577) for node in NODES}
        self.talk = Talk(self.clock, _SETTINGS, "a", open_socket=lambda port, interface: network.socket("a", port))
        self.talk.enter(key="5a" * 32, scope=SCOPE, addresses=addresses, order=NODES)
        self.talk.election.enter("b", now_s=self.clock.monotonic_s())
        self.peers = Peers(self.clock, network.socket("b", 29577), key=b"\x5a" * 32, scope=SCOPE, node="b", addresses=addresses)
        self.mine = NodeView(node="a", generation=1, up_s=10.0)
        self.word = Directive(room="r", lead="b", number=1, stage=Stage.RUNNING, generation=1, called_s=self.clock.monotonic_s(), members=NODES)
        for _ in range(4):
            self.round()

    def round(self) -> None:
        self.peers.receive()
        self.word = self.talk.hear(self.word)
        is_lead = self.talk.leads(self.mine, self.word)
        self.talk.sights(self.mine, self.word)
        self.talk.say(self.mine, self.word, is_lead=is_lead)
        self.clock.advance(0.1)


def read_talk(data: bytes) -> Any:
    hall = Hall()
    before = hall.word
    hall.peers.send(data, to=["a"])
    for _ in range(3):
        hall.round()
    return hall.word if hall.word is not before or hall.talk._views else None


def talk_reader() -> Reader:
    hall = Hall()
    bodies = [
        {"r": "r", "f": "b", "v": hall.talk._encode_view(VIEW), "d": hall.talk._encode(WORD, 1.0)},
        {"r": "r", "f": "b", "v": hall.talk._encode_view(NodeView(node="b")), "n": [1, "000001-00000000", 3]},
        {"r": "r", "f": "", "v": {"node": "b", "generation": 2}, "d": {"room": "r", "called_s": 1.0, "generation": 2, "number": 1, "lead": "b"}},
    ]
    corpus = tuple(json.dumps(body, separators=(",", ":")).encode() for body in bodies)
    return Reader(name="talk", corpus=corpus, read=read_talk, documented=(), shape=mutate.Json(), limit_bytes=packet.BODY_LIMIT_BYTES)


# -- all of them -----------------------------------------------------------------------------------------------------------


def all_readers(root: Path) -> dict[str, Reader]:
    """By name; files that they need lie under `root`."""
    corpus = Corpus(root)
    seals = corpus.files("*.seal")
    trees = tuple(json.dumps(json.loads(data)["record"]["tree"]).encode() for data in seals)
    names = tuple(os.fsencode(path.name) for top in (corpus.run_dir, GOLDEN) for path in sorted(top.rglob("*")))
    memory = record.encode("node-run", {"run_uid": "ab" * 16, "run_dir": "/runs/x", "storage": "shared"})
    view, word = (json.dumps(value.encode(), default=str).encode() for value in (VIEW._replace(replicas=dict(VIEW.replicas)), WORD))
    decoding = (TypeError, ValueError, KeyError)
    readers = (
        record_reader("run", corpus.files("run.json"), read_run),
        record_reader("attempt", corpus.files("attempt.json"), read_attempt),
        record_reader("claim", corpus.files("*.claim"), read_claim),
        record_reader("roster", corpus.files("roster.json"), read_roster),
        record_reader("seal", seals, read_seal, fix_seal),
        record_reader("manifest", corpus.files("manifest.json"), read_manifest),
        record_reader("node-run", (memory,), read_memory),
        Reader(
            name="tree",
            corpus=(json.dumps(TREE).encode(), *trees),
            read=read_tree,
            documented=(Damaged,),
            shape=mutate.Json(),
            hints=TREE_HINTS,
            copies=2,
        ),
        Reader(
            name="journal", corpus=corpus.files("*.jsonl"), read=read_journal, documented=(FormatTooNew,), shape=mutate.Journal(),
            is_vouched=is_journal_vouched,
        ),
        Reader(
            name="payload", corpus=corpus.files("*.safetensors"), read=read_payload, documented=(Damaged,), shape=mutate.Payload(),
            hints=PAYLOAD_HINTS,
        ),
        Reader(name="layout", corpus=tuple(dict.fromkeys(names)), read=read_names, documented=(), limit_bytes=2000),
        key_reader(root),
        packet_reader(),
        greeting_reader(),
        frame_reader(),
        replace(talk_reader(), name="view", corpus=(view, b'{"node":"b"}'), read=read_view, documented=decoding),
        replace(talk_reader(), name="directive", corpus=(word, b"{}"), read=read_directive, documented=decoding),
        talk_reader(),
        catalog_reader(corpus),
    )  # fmt: skip
    return {reader.name: reader for reader in readers}


@contextlib.contextmanager
def readers() -> Any:
    """All readers, in a directory that goes away."""
    with tempfile.TemporaryDirectory(prefix="ridethrough-fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as root:
        yield all_readers(Path(root))
