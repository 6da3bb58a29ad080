"""Small files vouch for themselves: any change to their bytes is noticed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridethrough.errors import Damaged, ForeignRecord, FormatTooNew
from ridethrough.format import record
from ridethrough.format import seal as seal_format
from ridethrough.format.attempt import Attempt, Roster, RosterPart, Run
from ridethrough.format.part import TensorSpec
from ridethrough.format.seal import Seal
from ridethrough.types import FORMAT, AttemptRef, Parent

REF = AttemptRef(seq=2, nonce="ab" * 16)
PARENT = Parent(attempt=AttemptRef(seq=1, nonce="cd" * 16), step=7)
RUN = Run(run_uid="e" * 32, name="exp é 001", created_at="2026-01-01T00:00:00+00:00")
ROSTER = Roster(run_uid="e" * 32, attempt=REF, nodes=("n0", "n0"), parts=(RosterPart(name="replicated", holders=(0, 1)),))
ATTEMPT = Attempt(
    run_uid="e" * 32,
    attempt=REF,
    parent=PARENT,
    snapshot_interval_steps=1,
    world_size=2,
    roster_digest=ROSTER.digest,
    started_at="2026-01-01T00:00:00+00:00",
)
SEAL = Seal(
    run_uid="e" * 32,
    attempt=REF,
    parent=PARENT,
    step=9,
    save_id=seal_format.save_id("e" * 32, REF.nonce, 9),
    part="replicated",
    node="n0",
    roster_digest=ROSTER.digest,
    payload_name="replicated~n0-01234567.safetensors",
    payload_bytes=40,
    chunk_bytes=16,
    chunks=("a" * 32, "b" * 32, "c" * 32),
    tensors=(TensorSpec(name="w", dtype="F32", shape=(2, 3), begin=0, end=24),),
    tree={"lr": 0.1},
    meta={"step": 9},
)
KINDS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "run": (RUN, Run.decode),
    "attempt": (ATTEMPT, Attempt.decode),
    "roster": (ROSTER, Roster.decode),
    "seal": (SEAL, seal_format.decode),
    "manifest": (
        {"step": 9, "save_id": "f" * 32, "roster": ROSTER.fields(), "parts": []},
        lambda data, path: {k: v for k, v in record.decode("manifest", data, path=path).items() if k not in ("format", "kind")},
    ),
}


def encoded(kind: str) -> bytes:
    value = KINDS[kind][0]
    return record.encode(kind, value) if isinstance(value, dict) else value.encode()


def decoded(kind: str, data: bytes) -> Any:
    return KINDS[kind][1](data, path=f"{kind}.json")


every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_a_record_reads_back_as_it_was_written(kind: str) -> None:
    assert decoded(kind, encoded(kind)) == KINDS[kind][0]


@every_kind
def test_any_flipped_bit_of_a_record_is_noticed(kind: str) -> None:
    data = encoded(kind)
    for place in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[place] ^= 1 << bit
            with pytest.raises(Damaged):
                decoded(kind, bytes(flipped))


@every_kind
def test_a_record_truncated_at_any_length_is_noticed(kind: str) -> None:
    data = encoded(kind)
    for length in range(len(data)):
        with pytest.raises(Damaged):
            decoded(kind, data[:length])


@every_kind
def test_a_record_with_bytes_after_its_end_is_noticed(kind: str) -> None:
    for extra in (b"\n", b"\0" * 4096, encoded(kind)):
        with pytest.raises(Damaged):
            decoded(kind, encoded(kind) + extra)


@every_kind
def test_a_record_of_zeroes_of_its_full_length_is_noticed(kind: str) -> None:
    with pytest.raises(Damaged):
        decoded(kind, bytes(len(encoded(kind))))


@every_kind
def test_a_record_of_an_unknown_later_format_is_refused_with_a_hint(kind: str) -> None:
    fields = {**json.loads(encoded(kind))["record"], "format": FORMAT + 1}
    later = record.encode(kind, fields)
    with pytest.raises(FormatTooNew) as caught:
        decoded(kind, later)
    assert caught.value.fields["found"] == FORMAT + 1
    assert "install" in caught.value.hint_filled


@every_kind
def test_an_intact_record_of_another_kind_is_foreign(kind: str) -> None:
    with pytest.raises(ForeignRecord):
        decoded(kind, record.encode("something-else", {}))


@every_kind
def test_an_intact_record_without_its_fields_is_damaged(kind: str) -> None:
    if kind != "manifest":
        with pytest.raises(Damaged):
            decoded(kind, record.encode(kind, {}))


@every_kind
def test_a_field_of_a_wrong_type_is_damaged_not_a_crash(kind: str) -> None:
    fields = json.loads(encoded(kind))["record"]
    for name in set(fields) - {"format", "kind"}:
        for wrong in (None, True, "text", -1, [], [1, [2]], {"x": 1}):
            with contextlib.suppress(Damaged):  # anything else fails the test
                decoded(kind, record.encode(kind, {**fields, name: wrong}))


@every_kind
def test_a_record_file_is_valid_json_for_any_other_tool(kind: str) -> None:
    parsed = json.loads(encoded(kind).decode("utf-8"))
    assert set(parsed) == {"record", "sha256"}
    assert parsed["record"]["kind"] == kind


@pytest.mark.parametrize("data", [b"", b"{", b"null\n", b"\xff\xfe\0", b"[" * 100_000, b'{"record": {}}'])
def test_what_was_never_a_record_is_damaged(data: bytes) -> None:
    with pytest.raises(Damaged):
        record.decode("run", data, path="run.json")


@pytest.mark.parametrize("body", [b"[1]", b"{}", b'{"format":"1"}', b'{"format":true}', b'{"format":0}', b"\xff", b"[" * 100_000, b"1" * 5000])
def test_a_checksummed_body_that_is_not_a_record_is_damaged(body: bytes) -> None:
    import hashlib

    data = b'{"record": ' + body + b',\n"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'
    with pytest.raises(Damaged):
        record.decode("run", data, path="run.json")


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_a_record_that_could_not_be_written_again_is_damaged() -> None:
    assert record.decode("run", record.encode("run", {"deep": nested(record.MAX_DEPTH - 1)}), path="x")
    for levels in (record.MAX_DEPTH, 700):
        with pytest.raises(Damaged, match="nested more than 640 deep"):
            record.decode("run", record.encode("run", {"deep": nested(levels)}), path="x")


def test_a_wide_record_is_no_deep_one() -> None:
    fields = {"wide": [[{"x": [1]}] for _ in range(1000)]}
    assert record.decode("run", record.encode("run", fields), path="x")["wide"] == fields["wide"]


def test_a_number_too_large_for_a_float_is_damaged_and_not_infinity() -> None:
    import hashlib

    body = b'{"format":1,"kind":"run","loss":1e999}'
    data = b'{"record": ' + body + b',\n"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'
    with pytest.raises(Damaged):
        record.decode("run", data, path="x")


def test_unknown_fields_of_the_same_format_are_ignored() -> None:
    fields = {**json.loads(RUN.encode())["record"], "new_in_1_1": [1, 2]}
    assert Run.decode(record.encode("run", fields), path="run.json") == RUN


@given(st.dictionaries(st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5), max_size=5))
def test_equal_values_have_one_canonical_text(value: dict[str, Any]) -> None:
    backwards = dict(reversed(list(value.items())))
    assert record.canonical(value) == record.canonical(backwards)
    assert json.loads(record.canonical(value)) == value


def test_a_command_line_that_is_not_utf8_is_kept_in_valid_json() -> None:
    argument = b"--name=\xff\xfe".decode("utf-8", "surrogateescape")
    data = record.encode("run", {"argv": [argument]})
    assert json.loads(data.decode("utf-8"))["record"]["argv"] == [argument]
    assert record.decode("run", data, path="x")["argv"] == [argument]


def test_a_seal_whose_save_id_is_of_another_step_is_damaged() -> None:
    fields = json.loads(SEAL.encode())["record"]
    with pytest.raises(Damaged, match="save id"):
        seal_format.decode(record.encode("seal", {**fields, "step": 10}), path="x.seal")


def test_a_seal_whose_checksums_do_not_cover_the_payload_is_damaged() -> None:
    fields = json.loads(SEAL.encode())["record"]
    payload = {**fields["payload"], "size_bytes": 400}
    with pytest.raises(Damaged, match="cover"):
        seal_format.decode(record.encode("seal", {**fields, "payload": payload}), path="x.seal")
