"""Whatever is wrong in a run directory: the right state or a clear error, and nothing else is touched."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ridethrough.errors import Damaged, FormatTooNew, RideThroughError, StorageDenied, StoreMissing, TierMissing
from ridethrough.format import layout, record
from ridethrough.journal import Journal
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.seam.process import state_dir
from ridethrough.store.catalog import read_catalog, read_run
from ridethrough.store.start import open_run, remember_run, remembered_run
from ridethrough.testing import FakeClock, Loaded, SimpleStore, flip_bit, load_newest
from ridethrough.types import FORMAT, Parent

FS = PosixFileSystem()
NEWEST = 4


def build(run_dir: Path, *, seed: int = 1, world_size: int = 2) -> SimpleStore:
    """Attempt 1 with steps 1, 2 and 99 (abandoned); attempt 2 from step 2 with steps 3 and 4."""
    store = SimpleStore(fs=FS, run_dir=str(run_dir), seed=seed, world_size=world_size, part_bytes=900)
    store.start()
    Journal(FS, FakeClock(), layout.journal_path(store.run_dir, "node-0"), role="t").append("run.started")
    store.commit(1, 2, 99)
    store.start(parent=Parent(attempt=store.attempt, step=2))
    store.commit(3, NEWEST)
    return store


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> SimpleStore:
    return build(tmp_path_factory.mktemp("pristine") / "run")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> SimpleStore:
    return build(tmp_path_factory.mktemp("foreign") / "run", seed=2)


@pytest.fixture
def run(pristine: SimpleStore, tmp_path: Path) -> Path:
    """A copy of the pristine run, to be spoilt."""
    return Path(shutil.copytree(pristine.run_dir, tmp_path / "run"))


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file() and not path.is_symlink()}


def load_untouched(root: Path) -> Loaded | None:
    """What would be loaded; reading has changed no file."""
    before = snapshot(root)
    try:
        return load_newest(FS, str(root))
    finally:
        assert snapshot(root) == before


def flip(place: str) -> Callable[[Path], None]:
    return lambda path: flip_bit(str(path), {"head": 0, "middle": path.stat().st_size // 2, "tail": -1}[place], 3)


def be_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def be_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "zero length": lambda path: os.truncate(path, 0),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "last byte lost": lambda path: os.truncate(path, path.stat().st_size - 1),
    "head flipped": flip("head"),
    "middle flipped": flip("middle"),
    "tail flipped": flip("tail"),
    "zeroes": lambda path: path.write_bytes(bytes(path.stat().st_size)) and None,  # type: ignore[func-returns-value]
    "too long": lambda path: path.write_bytes(path.read_bytes() + b"\0" * 512) and None,  # type: ignore[func-returns-value]
    "missing": lambda path: path.unlink(),
    "a directory": be_directory,
    "a dangling link": be_dangling_link,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_to_any_one_file_costs_at_most_the_checkpoint_it_belongs_to(
    pristine: SimpleStore, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    names = sorted(snapshot(Path(pristine.run_dir)))
    kinds = {os.path.basename(name) if name.endswith(".json") else name.rsplit(".", 1)[1] for name in names}
    assert kinds == {"run.json", "attempt.json", "roster.json", "claim", "seal", "safetensors", "meta.json", "manifest.json", "jsonl"}
    root = Path(shutil.copytree(pristine.run_dir, tmp_path / "run"))
    for name in names:
        damage(root / name)
        loaded = load_untouched(root)
        assert loaded is not None, name
        assert pristine.is_true(loaded), name
        is_of_newest = name.startswith(f"step-{NEWEST:09d}") and not name.endswith(".json")
        assert loaded.step == (NEWEST - 1 if is_of_newest else NEWEST), name
        if (root / name).is_dir():
            (root / name).rmdir()
        (root / name).unlink(missing_ok=True)
        shutil.copy(Path(pristine.run_dir, name), root / name)


def test_every_part_of_the_newest_damaged_at_once_falls_back_one_step(pristine: SimpleStore, run: Path) -> None:
    for path in run.glob(f"step-{NEWEST:09d}-*/*.safetensors"):
        flip_bit(str(path), 200)
    loaded = load_untouched(run)
    assert loaded is not None
    assert (loaded.step, pristine.is_true(loaded)) == (NEWEST - 1, True)
    assert loaded.rejected


def test_everything_damaged_gives_nothing_rather_than_something_wrong(run: Path) -> None:
    for path in run.glob("step-*/*.safetensors"):
        flip_bit(str(path), 200)
    assert load_untouched(run) is None


@pytest.mark.parametrize("name", ["notes.txt", "replicated~node-0-00000000.seal", "replicated~node-0-00000000.safetensors", "x.seal", "-rf", "a\nb"])
def test_extra_files_in_a_checkpoint_are_no_obstacle(pristine: SimpleStore, run: Path, name: str) -> None:
    [directory] = run.glob(f"step-{NEWEST:09d}-*")
    (directory / name).write_bytes(b"not ours")
    (directory / "sub").mkdir()
    loaded = load_untouched(run)
    assert loaded is not None
    assert (loaded.step, pristine.is_true(loaded)) == (NEWEST, True)


@pytest.mark.parametrize("name", ["step-000000999-01234567", "step-x", "attempts/000009-01234567", "attempts/x", "journal/x.jsonl", "last", "é \n'"])
def test_extra_files_and_directories_in_a_run_are_no_obstacle(pristine: SimpleStore, run: Path, name: str) -> None:
    for make in (lambda: (run / name).write_bytes(b"junk"), lambda: ((run / name).unlink(), (run / name).mkdir())):
        make()
        loaded = load_untouched(run)
        assert loaded is not None
        assert (loaded.step, pristine.is_true(loaded)) == (NEWEST, True)


def test_a_checkpoint_of_another_run_is_never_loaded(pristine: SimpleStore, foreign: SimpleStore, run: Path) -> None:
    for source in Path(foreign.run_dir).glob("step-*"):
        shutil.copytree(source, run / source.name)
    loaded = load_untouched(run)
    assert loaded is not None
    assert pristine.is_true(loaded)


def test_parts_of_another_run_inside_our_checkpoint_are_never_loaded(pristine: SimpleStore, foreign: SimpleStore, run: Path) -> None:
    [mine] = run.glob(f"step-{NEWEST:09d}-*")
    [theirs] = Path(foreign.run_dir).glob(f"step-{NEWEST:09d}-*")
    for part in ("rank-00000", "replicated"):
        for path in mine.glob(f"{part}~*"):
            path.unlink()
        for path in theirs.glob(f"{part}~*"):
            shutil.copy(path, mine / path.name)
    loaded = load_untouched(run)
    assert loaded is not None
    assert (loaded.step, pristine.is_true(loaded)) == (NEWEST - 1, True)


def test_the_marker_of_another_run_makes_everything_foreign(foreign: SimpleStore, run: Path) -> None:
    shutil.copy(os.path.join(foreign.run_dir, layout.RUN), run / layout.RUN)
    assert load_untouched(run) is None
    assert len(read_catalog(FS, str(run)).problems) > 10


def test_a_part_of_another_attempt_at_the_same_step_is_never_mixed_in(tmp_path: Path) -> None:
    store = build(tmp_path / "run")
    theirs = Path(store.run_dir, store.dir_name(NEWEST))
    store.start(parent=Parent(attempt=store.attempt, step=3))
    store.commit_parts(NEWEST, parts=("replicated", "rank-00000"))
    mine = Path(store.run_dir, store.dir_name(NEWEST))
    for path in theirs.glob("rank-00001~*"):
        shutil.copy(path, mine / path.name)
    loaded = load_untouched(Path(store.run_dir))
    assert loaded is not None
    assert (loaded.step, store.is_true(loaded)) == (3, True)


def test_parts_of_another_world_size_never_make_a_checkpoint(tmp_path: Path) -> None:
    store = build(tmp_path / "run", world_size=2)
    two = Path(store.run_dir, store.dir_name(NEWEST))
    store.world_size = 3
    store.start(parent=Parent(attempt=store.attempt, step=NEWEST))
    store.commit_parts(5, parts=("replicated", "rank-00000", "rank-00001"))  # the third rank was cut off
    loaded = load_untouched(Path(store.run_dir))
    assert loaded is not None
    assert (loaded.step, sorted(loaded.payloads)) == (NEWEST, ["rank-00000", "rank-00001", "replicated"])
    assert loaded.dir_name == two.name


@pytest.mark.parametrize("swap", [("rank-00000", "rank-00001"), ("rank-00001", "rank-00000")])
def test_a_payload_under_the_name_of_another_is_noticed(pristine: SimpleStore, run: Path, swap: tuple[str, str]) -> None:
    [directory] = run.glob(f"step-{NEWEST:09d}-*")
    [source], [target] = (list(directory.glob(f"{part}~*.safetensors")) for part in swap)
    shutil.copy(source, target)
    loaded = load_untouched(run)
    assert loaded is not None
    assert (loaded.step, pristine.is_true(loaded)) == (NEWEST - 1, True)


def test_an_older_payload_under_the_name_of_the_newest_is_noticed(pristine: SimpleStore, run: Path) -> None:
    [old] = run.glob(f"step-{NEWEST - 1:09d}-*/replicated~*.safetensors")
    [new] = run.glob(f"step-{NEWEST:09d}-*/replicated~*.safetensors")
    shutil.copy(old, new)
    loaded = load_untouched(run)
    assert loaded is not None
    assert (loaded.step, pristine.is_true(loaded)) == (NEWEST - 1, True)


def test_a_renamed_checkpoint_directory_is_not_believed(pristine: SimpleStore, run: Path) -> None:
    [directory] = run.glob(f"step-{NEWEST:09d}-*")
    directory.rename(run / directory.name.replace(f"{NEWEST:09d}", "000000777"))
    loaded = load_untouched(run)
    assert loaded is not None
    assert (loaded.step, pristine.is_true(loaded)) == (NEWEST - 1, True)


def later(path: Path, kind: str) -> None:
    fields = json.loads(path.read_bytes())["record"]
    path.write_bytes(record.encode(kind, {**fields, "format": FORMAT + 1}))


@pytest.mark.parametrize(
    ("pattern", "kind"), [("run.json", "run"), ("attempts/000002-*/attempt.json", "attempt"), ("attempts/000002-*/roster.json", "roster")]
)
def test_a_run_written_by_a_newer_version_is_refused_with_a_hint(run: Path, pattern: str, kind: str) -> None:
    [path] = run.glob(pattern)
    later(path, kind)
    with pytest.raises(FormatTooNew) as caught:
        load_untouched(run)
    assert caught.value.exit_code == 2


def test_a_checkpoint_written_by_a_newer_version_is_named_and_passed_over(pristine: SimpleStore, run: Path) -> None:
    [path] = run.glob(f"step-{NEWEST:09d}-*/replicated~*.seal")
    later(path, "seal")
    loaded = load_untouched(run)
    assert loaded is not None
    assert (loaded.step, pristine.is_true(loaded)) == (NEWEST - 1, True)
    assert any(isinstance(p.error, FormatTooNew) for p in read_catalog(FS, str(run)).problems)


@pytest.mark.parametrize("shape", ["absent", "empty directory", "file", "marker is a directory"])
def test_a_place_without_a_run_is_a_clear_error(tmp_path: Path, shape: str) -> None:
    path = tmp_path / "runs"
    if shape == "file":
        path.write_text("not a directory")
    elif shape != "absent":
        path.mkdir()
    if shape == "marker is a directory":
        (path / layout.RUN).mkdir()
    with pytest.raises((StoreMissing, Damaged)) as caught:
        load_newest(FS, str(path))
    assert caught.value.exit_code == (1 if shape == "marker is a directory" else 10)


def test_a_lost_marker_beside_checkpoints_never_becomes_a_new_run(pristine: SimpleStore, run: Path) -> None:
    (run / layout.RUN).unlink()
    with pytest.raises(Damaged, match="missing"):
        open_run(FS, FakeClock(), str(run), known_uid=None, is_fresh=False)
    assert not (run / layout.RUN).exists()
    loaded = load_untouched(run)
    assert loaded is not None
    assert pristine.is_true(loaded)


def test_an_unmounted_tier_is_never_a_new_run(run: Path, tmp_path: Path) -> None:
    uid = read_run(FS, str(run)).run_uid
    remember_run(FS, state_dir(), str(run), uid)
    run.rename(tmp_path / "unmounted")
    run.mkdir()
    known = remembered_run(FS, state_dir(), str(run))
    assert known == uid
    with pytest.raises(TierMissing) as caught:
        open_run(FS, FakeClock(), str(run), known_uid=known, is_fresh=False)
    assert caught.value.exit_code == 13
    assert os.listdir(run) == []
    assert open_run(FS, FakeClock(), str(run), known_uid=known, is_fresh=True).run_uid != uid


@pytest.mark.root
@pytest.mark.parametrize("name", ["", "attempts", "step", "run.json"])
def test_what_may_not_be_read_is_denied_not_damaged(pristine: SimpleStore, name: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="ridethrough-denied-") as base:
        os.chmod(base, 0o755)
        root = Path(shutil.copytree(pristine.run_dir, os.path.join(base, "run")))
        target = next(root.glob("step-*")) if name == "step" else root / name
        os.chmod(target, 0o000)
        os.seteuid(65534)
        try:
            with pytest.raises(StorageDenied) as caught:
                load_newest(FS, str(root))
        finally:
            os.seteuid(0)
        assert isinstance(caught.value, RideThroughError)
        assert (caught.value.exit_code, caught.value.retryable) == (13, False)
