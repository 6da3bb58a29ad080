"""Names on disk: what we write we can read, and what we would not write is not ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridethrough.format import layout
from ridethrough.format.seal import save_id
from ridethrough.types import AttemptRef

hex32 = st.binary(min_size=16, max_size=16).map(bytes.hex)
part_names = st.from_regex(r"[a-z][a-z0-9-]{0,63}", fullmatch=True)
nodes = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?", fullmatch=True)


@given(st.integers(0, 10**18 - 1), hex32)
def test_a_checkpoint_directory_parses_back_to_its_step_and_save(step: int, uid: str) -> None:
    assert layout.parse_step_dir(layout.step_dir(step, uid)) == (step, uid[:8])


@given(st.integers(1, 10**18 - 1), hex32)
def test_an_attempt_directory_parses_back_to_its_number_and_nonce(seq: int, nonce: str) -> None:
    assert layout.parse_attempt_dir(AttemptRef(seq=seq, nonce=nonce).label) == (seq, nonce[:8])


@given(part_names, nodes, hex32, st.booleans())
def test_a_part_file_parses_back_to_part_node_and_nonce(part: str, node: str, nonce: str, is_seal: bool) -> None:
    stem = layout.part_stem(part, node, nonce)
    found = layout.parse_part_file(stem + (".seal" if is_seal else ".safetensors"))
    assert found == layout.PartFile(part=part, node=node, nonce8=nonce[:8], is_seal=is_seal)
    assert found is not None
    assert found.stem == stem


@given(part_names, nodes, hex32)
def test_the_longest_name_we_write_fits_a_file_system(part: str, node: str, nonce: str) -> None:
    assert len(f"{layout.part_stem(part, node, nonce)}.safetensors.01234567{layout.TEMPORARY}".encode()) <= 255


@given(st.text(max_size=40))
def test_whatever_parses_is_exactly_what_we_would_write(name: str) -> None:
    parsed = layout.parse_step_dir(name)
    assert parsed is None or layout.step_dir(*parsed) == name
    attempt = layout.parse_attempt_dir(name)
    assert attempt is None or AttemptRef(seq=attempt[0], nonce=attempt[1]).label == name


HOSTILE_STEPS = [
    "", "step-", "step-1-01234567", "step-000000001-0123456", "step-000000001-0123456G", "step-000000001-01234567\n", " step-000000001-01234567",
    "step-000000001-01234567/..", "../step-000000001-01234567", "step-0000000001-01234567", "step-٠٠٠٠٠٠٠٠١-01234567", "step-000000001-ABCDEF01",
    "step--00000001-01234567", "step-000000001-01234567.tmp", "STEP-000000001-01234567", "step-" + "9" * 19 + "-01234567",
    "step-000000001-01234567\0",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_STEPS)
def test_a_name_that_only_looks_like_a_checkpoint_is_not_ours(name: str) -> None:
    assert layout.parse_step_dir(name) is None


@pytest.mark.parametrize(
    "name", ["", "1-01234567", "000001-0123456", "000001-01234567\n", "٠٠٠٠٠١-01234567", "0000001-01234567", "000001-01234567.tmp"]
)
def test_a_name_that_only_looks_like_an_attempt_is_not_ours(name: str) -> None:
    assert layout.parse_attempt_dir(name) is None


HOSTILE_PARTS = [
    "replicated~n-01234567.seal.0a1b2c3d.tmp", "replicated~n-01234567.SEAL", "Replicated~n-01234567.seal", "~n-01234567.seal", "a~-01234567.seal",
    "a~n-01234567.seal\n", "a/b~n-01234567.seal", "a~..-01234567.seal", "a~../x-01234567.seal", "a~n-0123456.seal", "a~n-012345678.seals",
    "a" * 65 + "~n-01234567.seal", "a~" + "n" * 64 + "-01234567.seal", "-a~n-01234567.seal", "é~n-01234567.seal", "manifest.json", "meta.json",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_PARTS)
def test_a_name_that_only_looks_like_a_part_is_not_ours(name: str) -> None:
    assert layout.parse_part_file(name) is None


@pytest.mark.parametrize("part", ["", "..", "a/b", "A", "a b", "a\n", "-a", "é", "a" * 65, "a~b"])
def test_a_hostile_part_name_is_never_written(part: str) -> None:
    with pytest.raises(ValueError, match="not a name"):
        layout.part_stem(part, "node", "0" * 32)


@pytest.mark.parametrize("node", ["", "..", "a/b", "A", "a b", "a\n", "-a", "a-", ".a", "é", "a" * 64])
def test_a_hostile_node_name_is_never_written(node: str) -> None:
    with pytest.raises(ValueError, match="not a name"):
        layout.part_stem("part", node, "0" * 32)


@given(hex32, hex32, st.integers(0, 10**9))
def test_another_run_attempt_or_step_never_has_the_same_save_id(uid: str, nonce: str, step: int) -> None:
    mine = save_id(uid, nonce, step)
    assert mine not in {
        save_id(uid + "0", nonce, step),
        save_id(uid, nonce + "0", step),
        save_id(uid, nonce, step + 1),
        save_id(nonce, uid, step + 2),
    }
