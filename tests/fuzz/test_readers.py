"""Whatever bytes a reader is given: it refuses them with an error of its own, or what it accepts can be used."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fuzz_readers
import pytest
import xxhash

import fuzz
from ridethrough import journal
from ridethrough.errors import Damaged, ForeignRecord
from ridethrough.format import part, record, seal, tree
from ridethrough.format.attempt import Roster, Run
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.snapshot import wire
from ridethrough.store.start import remember_run, remembered_run, unfinished_claims
from ridethrough.supervisor.directive import Directive
from ridethrough.supervisor.view import NodeView

ROOT = Path(__file__).parents[2]
INPUTS = 100
SEED = 20261130
NAMES = (
    "run", "attempt", "claim", "roster", "seal", "manifest", "node-run", "tree", "journal", "payload", "layout", "key", "packet", "greeting",
    "frame", "view", "directive", "talk", "catalog",
)  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What a process of its own made of all readers: one that hangs or dies must not take the tests with it."""
    path = tmp_path_factory.mktemp("fuzz") / "rows.json"
    command = [sys.executable, str(ROOT / "bench" / "fuzz.py"), "--inputs", str(INPUTS), "--seed", str(SEED), "--rows", str(path)]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, timeout=240, check=False)
    assert path.exists(), done.stdout + done.stderr
    return {row["reader"]: row for row in json.loads(path.read_text())}


@pytest.mark.parametrize("name", NAMES)
def test_reader_refuses_damaged_and_hostile_bytes_without_crash_hang_or_lie(rows: dict[str, dict[str, Any]], name: str) -> None:
    assert rows[name]["failures"] == []
    assert rows[name]["inputs"] == INPUTS


def test_every_reader_accepts_some_inputs_and_refuses_some(rows: dict[str, dict[str, Any]]) -> None:
    """One that refuses all would pass, and would never have been looked into."""
    assert set(rows) == set(NAMES)
    assert [name for name, row in rows.items() if not row["accepted"] or not row["refused"]] == []


# -- the fuzzer can fail ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fuzz_readers.Reader]:
    return fuzz_readers.all_readers(tmp_path_factory.mktemp("corpus"))


def found(reader: fuzz_readers.Reader, wanted: str, *, inputs: int = 3000) -> bool:
    """The fuzzer finds a failure of that kind."""
    for seed in range(8):
        row = fuzz.fuzz(reader, seed=seed, inputs=inputs // 8, until_s=None, failures=50)
        if any(failure["failure"].startswith(wanted) for failure in row.failures):
            return True
    return False


def run_without_its_checksum(data: bytes) -> Run:
    """Reads what stands there and believes it."""
    fields = json.loads(data[11 : data.rindex(b',\n"sha256"')])
    return Run(run_uid=fields["run_uid"], name=fields["name"], created_at=fields["created_at"])


def journal_without_a_guard(data: bytes) -> Any:
    """Makes a number of whatever is there."""
    for line in data.split(b"\n"):
        if journal.decode_event(line) is not None:
            int(float(str(json.loads(line)["mono_s"])))
    return data


def payload_that_believes_its_length(data: bytes) -> bytes:
    """Makes room for what the first bytes say."""
    length = int.from_bytes(data[:8], "little")
    room = bytearray(min(length, 1 << 24))
    if length + 8 > len(data):
        raise Damaged(path="x", detail="short")
    return bytes(room[:1])


def tree_that_evaluates(data: bytes) -> Any:
    """As a reader with pickle would: what it reads can run."""
    try:
        value = json.loads(data)
        return eval(value["numpy"]["v"][0])
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, SyntaxError, NameError, AttributeError) as error:
        raise Damaged(path="x", detail="bad") from error


def payload_that_multiplies(data: bytes) -> Any:
    """Works out the size of a tensor, however long it takes."""
    length = int.from_bytes(data[:8], "little")
    try:
        for entry in json.loads(data[8 : 8 + length]).values():
            count = 1
            for extent in entry["shape"] * 2:
                count *= extent
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(path="x", detail="bad") from error
    return count


def greeting_that_tells_everything(data: bytes) -> Any:
    """Repeats in its message what a stranger has said."""
    raise Damaged(path="greeting", detail=data.decode("utf-8", "surrogateescape") * 3)


def greeting_without_a_limit(data: bytes) -> Any:
    """Goes as deep as a stranger wants."""

    def depth(value: Any) -> int:
        return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 1

    try:
        return depth(json.loads(data).get("reason"))
    except (ValueError, AttributeError) as error:
        raise Damaged(path="greeting", detail="bad") from error


@pytest.mark.parametrize(
    ("name", "read", "wanted"),
    [
        ("run", run_without_its_checksum, "lie"),
        ("run", run_without_its_checksum, "crash: KeyError"),
        ("journal", journal_without_a_guard, "crash: OverflowError"),
        ("payload", payload_that_believes_its_length, "memory"),
        ("tree", tree_that_evaluates, "code"),
        ("payload", payload_that_multiplies, "slow"),
        ("greeting", greeting_that_tells_everything, "message"),
        ("seal", greeting_without_a_limit, "crash"),
    ],
)
def test_a_broken_reader_is_found(
    readers: dict[str, fuzz_readers.Reader], monkeypatch: pytest.MonkeyPatch, name: str, read: Callable[[bytes], Any], wanted: str
) -> None:
    monkeypatch.setattr(fuzz, "SLOW_S", 0.1)
    is_vouched = readers[name].is_vouched if wanted == "lie" else None
    assert found(replace(readers[name], read=read, is_vouched=is_vouched), wanted)


def test_a_reader_that_does_not_come_back_is_found(readers: dict[str, fuzz_readers.Reader], monkeypatch: pytest.MonkeyPatch) -> None:
    def read(data: bytes) -> None:
        while True:
            pass

    monkeypatch.setattr(fuzz, "HANG_S", 0.1)
    outcome = fuzz.try_input(replace(readers["run"], read=read), b"")
    assert outcome.failure is not None
    assert outcome.failure.startswith("hang")


def test_a_reader_that_kills_the_interpreter_is_found_with_its_input(tmp_path: Path) -> None:
    """The process of the fuzzer is killed from outside here, in the middle of an input."""
    script = (
        "import os, sys; sys.path.insert(0, sys.argv.pop(1)); import fuzz, fuzz_readers; "
        "fuzz_readers.read_names = lambda data: os.abort() if b'~' in data else None; fuzz.__file__ = sys.argv.pop(1); "
        "fuzz._FORBIDDEN = (); sys.exit(fuzz.main())"
    )
    me = tmp_path / "again.py"
    me.write_text(f"import sys\nsys.argv[1:1] = [{str(ROOT / 'bench')!r}, __file__]\nexec({script!r})\n")
    command = [sys.executable, str(me), "--reader", "layout", "--inputs", "50", "--seed", "1", "--rows", str(tmp_path / "rows.json")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    [row] = json.loads((tmp_path / "rows.json").read_text())
    assert row["failures"][0]["failure"].startswith("interpreter: ended with -")
    assert b"~" in bytes.fromhex(row["failures"][0]["hex"])


def test_equal_seeds_make_equal_inputs(readers: dict[str, fuzz_readers.Reader]) -> None:
    def digest() -> str:
        seen = hashlib.sha256()

        def read(data: bytes) -> None:
            seen.update(data + b"\0")

        fuzz.fuzz(replace(readers["seal"], read=read), seed=3, inputs=60, until_s=None)
        return seen.hexdigest()

    digest()  # what is imported at first use belongs to no input
    assert digest() == digest()


# -- what it found ---------------------------------------------------------------------------------------------------------

RUN_UID, NONCE = "e" * 32, "a" * 32
ROSTER: dict[str, Any] = {
    "run_uid": RUN_UID, "attempt": {"seq": 1, "nonce": NONCE}, "nodes": ["n0", "n1"], "parts": [{"name": "replicated", "holders": [0, 1]}],
}  # fmt: skip
SEAL: dict[str, Any] = {
    "run_uid": RUN_UID, "attempt": {"seq": 1, "nonce": NONCE}, "parent": None, "step": 7, "save_id": seal.save_id(RUN_UID, NONCE, 7),
    "part": "replicated", "node": "n0", "roster_digest": "d" * 64,
    "payload": {"name": "replicated~n0-01234567.safetensors", "size_bytes": 10, "chunk_bytes": 16, "xxh3_128": ["0" * 32]},
    "tensors": [["w", "U8", [10], 0, 10]], "tree": {}, "meta": {},
}  # fmt: skip


def signed(kind: str, text: str) -> bytes:
    """A record of that JSON under a checksum that holds."""
    body = b'{"format":1,"kind":"' + kind.encode() + b'",' + text.encode().removeprefix(b"{")
    return b'{"record": ' + body + b',\n"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def test_the_fields_that_are_changed_below_are_good_ones() -> None:
    assert seal.decode(signed("seal", json.dumps(SEAL)), path="x").step == 7
    assert Roster.decode(signed("roster", json.dumps(ROSTER)), path="x").world_size == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"nodes": []},
        {"nodes": [1, 2]},
        {"parts": []},
        {"parts": [{"name": "replicated", "holders": []}]},
        {"parts": [{"name": "replicated", "holders": [2]}]},
        {"parts": [{"name": "replicated", "holders": [-1]}]},
        {"parts": [{"name": "replicated", "holders": "01"}]},
        {"parts": [{"name": ["replicated"], "holders": [0]}]},
        {"attempt": {"seq": -1, "nonce": NONCE}},
        {"attempt": {"seq": 10**18, "nonce": NONCE}},
        {"attempt": {"seq": 1, "nonce": "/../../x"}},
        {"run_uid": "\ud800"},
    ],
    ids=json.dumps,
)
def test_a_roster_that_cannot_be_of_any_run_is_damaged(changed: dict[str, Any]) -> None:
    with pytest.raises(Damaged):
        Roster.decode(signed("roster", json.dumps({**ROSTER, **changed})), path="roster.json")


def test_a_roster_with_a_rank_of_infinity_is_damaged() -> None:
    with pytest.raises(Damaged):
        Roster.decode(signed("roster", json.dumps(ROSTER).replace("[0, 1]", "[1e999]")), path="roster.json")


@pytest.mark.parametrize(
    "changed",
    [
        {"run_uid": "\ud800"},
        {"attempt": {"seq": 1, "nonce": "\ud800"}},
        {"attempt": {"seq": int("9" * 4300), "nonce": NONCE}},
        {"step": -7},
        {"step": 10**18},
        {"part": "../x"},
        {"node": "\n"},
        {"tensors": [["w", "U8", [10], 0, "10"]]},
        {"tensors": [[1, "U8", [10], 0, 10]]},
        {"tensors": [["w", "O8", [10], 0, 10]]},
        {"payload": {**SEAL["payload"], "xxh3_128": [0]}},
        {"payload": {**SEAL["payload"], "xxh3_128": ["\ud800"]}},
        {"payload": {**SEAL["payload"], "size_bytes": -1, "xxh3_128": []}},
    ],
    ids=lambda changed: json.dumps(changed)[:60],
)
def test_a_seal_that_cannot_be_of_any_save_is_damaged(changed: dict[str, Any]) -> None:
    fields = {**SEAL, **changed}
    name = f"{fields['run_uid']}\0{fields['attempt']['nonce']}\0{fields['step']}".encode("utf-8", "surrogatepass")
    with pytest.raises(Damaged):
        seal.decode(signed("seal", json.dumps({**fields, "save_id": hashlib.sha256(name).hexdigest()[:32]})), path="x.seal")


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_a_record_with_what_is_no_json_is_damaged(constant: str) -> None:
    with pytest.raises(Damaged):
        record.decode("seal", signed("seal", json.dumps({**SEAL, "meta": {"loss": 1}}).replace('{"loss": 1}', f'{{"loss": {constant}}}')), path="x")


@pytest.mark.parametrize("value", ["A" * 70_000, [["B" * 9000] * 9] * 9, {"c" * 9000: 1}, int("9" * 4000), "\ud800", None])
def test_a_message_about_a_record_is_short_and_can_be_printed(value: Any) -> None:
    texts = []
    for data in (
        signed("run", json.dumps({"run_uid": value})),
        record.encode(str(value), {}),
        signed("run", json.dumps({"run_uid": "a", "name": [value]})),
    ):
        with pytest.raises((Damaged, ForeignRecord)) as caught:
            Run.decode(data, path="run.json")
        texts.append(str(caught.value))
    assert max(map(len, texts)) < 500
    assert all(text.encode() for text in texts)


def test_a_format_beyond_all_counting_is_damage_and_not_a_newer_version() -> None:
    body = b'{"format":' + b"9" * 4000 + b',"kind":"run"}'
    with pytest.raises(Damaged):
        record.decode("run", b'{"record": ' + body + b',\n"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"}\n', path="x")


@pytest.mark.parametrize(
    ("name", "value"), [("seq", "1e999"), ("mono_s", "9" * 400), ("seq", "NaN"), ("format", "1e999"), ("format", "true"), ("format", "0")]
)
def test_a_journal_line_with_an_endless_number_is_passed_over(name: str, value: str) -> None:
    fields: dict[str, Any] = {"format": 1, "kind": "k", "at": "x", "mono_s": 1.0, "boot": "b", "seq": 1, "writer": "w", "data": {}, name: "HERE"}
    text = json.dumps(fields).replace('"HERE"', value).removesuffix("}").encode()
    line = text + b',"sum":"' + xxhash.xxh3_64_hexdigest(text).encode() + b'"}\n'
    good = journal.encode_event(journal.Event(kind="k", at="x", mono_s=1.0, boot="b", seq=1, writer="w"))
    history = journal.decode(line + good)
    assert (len(history.events), history.damaged_lines) == (1, (1,))


def test_a_note_of_a_run_that_does_not_say_which_still_says_that_there_was_one(tmp_path: Path) -> None:
    fs = PosixFileSystem()
    remember_run(fs, str(tmp_path), "/runs/x", "a" * 32)
    [path] = (tmp_path / "runs").iterdir()
    path.write_bytes(record.encode("node-run", {"storage": "shared"}))
    assert remembered_run(fs, str(tmp_path), "/runs/x") == ""


@pytest.mark.parametrize("shape", [[9] * 200_000, [int("9" * 4000)] * 300], ids=["many", "large"])
def test_a_tensor_of_endless_shape_is_refused_at_once(readers: dict[str, fuzz_readers.Reader], shape: list[int]) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    outcome = fuzz.try_input(readers["payload"], struct.pack("<Q", len(header)) + header + bytes(4))
    assert (outcome.failure, outcome.is_accepted) == (None, False)


def test_a_tensor_without_items_may_have_any_other_extent() -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [10**20, 0], "data_offsets": [0, 0]}}).encode()
    [spec], _ = part.parse_header(struct.pack("<Q", len(header)) + header, path="x")
    assert spec.shape == (10**20, 0)


@pytest.mark.parametrize("tag", ["set", "fset", "dict", "odict"])
def test_keys_that_are_made_to_collide_are_refused_before_a_table_is_filled(tag: str) -> None:
    numbers = [number * ((1 << 61) - 1) for number in range(1, 100_000)]
    items = [[number, 0] for number in numbers] if "dict" in tag else numbers
    with pytest.raises(Damaged, match="equal"):
        tree.decode({"~": tag, "v": items}, dict[str, Any]().__getitem__, path="x.seal")


@pytest.mark.parametrize("tag", ["set", "fset"])
def test_large_sets_of_honest_keys_are_read(tag: str) -> None:
    items = [*range(-3000, 3000), *(number << 40 for number in range(1, 3000))]
    assert len(tree.decode({"~": tag, "v": items}, dict[str, Any]().__getitem__, path="x.seal")) == len(items)


@pytest.mark.parametrize(
    "dtype", ["(" + "-" * 30_000 + "1)f4", "(__import__('os'),)f4", "f4,f4", "O", "M8[s]", "V4", {"names": [], "formats": []}, None]
)
def test_a_numpy_scalar_has_a_plain_type_or_is_damaged(readers: dict[str, fuzz_readers.Reader], dtype: Any) -> None:
    outcome = fuzz.try_input(readers["tree"], json.dumps({"~": "numpy", "v": [dtype, "00" * 8]}).encode())
    assert (outcome.failure, outcome.is_accepted) == (None, False)


@pytest.mark.parametrize(
    "fields", [{"nonce": "\udcff", "nodes": ["n0"]}, {"nonce": NONCE, "nodes": [1]}, {"nonce": NONCE, "nodes": [["n0"]]}], ids=str
)
def test_a_claim_that_makes_no_sense_is_of_somebody_unknown(fields: dict[str, Any]) -> None:
    [claim] = unfinished_claims(fuzz_readers.OneFile(signed("claim", json.dumps(fields))), "run", above=0)  # type: ignore[arg-type]
    assert (claim.nonce, claim.nodes, claim.label) == ("", (), "000007-unknown")


def test_a_message_about_a_part_of_an_endless_step_is_short() -> None:
    with pytest.raises(Damaged) as caught:
        wire.Parcel.unpack({"rank": 2, "step": int("9" * 4000), "index": {"step": 1, "parts": [{}]}}, b"x")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("step", [-1, 1 << 63, 1 << 64])
def test_a_part_of_a_step_that_no_slot_can_hold_is_refused(step: int) -> None:
    packed = wire.pack(rank=2, step=step, index={}, tree={}, payload=b"x")
    with pytest.raises(Damaged):
        wire.Parcel.unpack(json.loads(packed.head), b"x")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", "-1e999"])
def test_a_part_with_a_number_that_no_slot_can_hold_is_refused(value: str) -> None:
    packed = wire.pack(rank=2, step=7, index={"loss": 1.5}, tree={}, payload=b"x")
    sender, holder = (wire.Secret("k").session(b"h", b"c", is_sender=is_sender) for is_sender in (True, False))
    with pytest.raises(Damaged):
        holder.open(b"".join(sender.seal(packed.head.replace(b"1.5", value.encode()), b"x"))[4:])


@pytest.mark.parametrize(
    "said",
    [
        [], "node", {"generation": "1"}, {"generation": None}, {"generation": 1.5}, {"up_s": []}, {"up_s": float("nan")},
        {"up_s": float("inf")}, {"signal": 999}, {"replicas": []}, {"replicas": {"a": 1}}, {"posted": ["a"]}, {"is_ready": 1},
        {"sealed": {"step": 1}}, {"sealed": [{"step": "1", "dark": []}]},
        {"sealed": [{"step": 1, "dark": [], "digests": []}]}, {"refused": {"number": 1}}, {"missing": "ab"},
        {"end": {"status": "x", "cause": "", "fingerprint": "", "detail": ""}},
    ],
    ids=str,
)  # fmt: skip
def test_a_view_of_another_shape_is_refused_where_it_is_heard(said: Any) -> None:
    with pytest.raises((TypeError, ValueError, KeyError)):
        NodeView.decode({"node": "b", **said} if isinstance(said, dict) else said)


@pytest.mark.parametrize(
    "said",
    [
        [], {"number": "1"}, {"generation": []}, {"called_s": "x"}, {"called_s": float("nan")}, {"members": "ab"}, {"members": [1]}, {"attempt": 5},
        {"flush": []}, {"flush": {"id": "x"}}, {"stop": {"since_s": None}}, {"stop": {"term_s": float("inf")}}, {"confirmed": {"step": "7"}},
        {"confirmed": {"dark": "c"}}, {"is_suspect": 1}, {"outcome": []}, {"incident": {"nodes": [1]}}, {"announced": 1.5},
    ],
    ids=str,
)  # fmt: skip
def test_a_word_of_another_shape_is_refused_where_it_is_heard(said: Any) -> None:
    with pytest.raises((TypeError, ValueError, KeyError)):
        Directive.decode(said)
