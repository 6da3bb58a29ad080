"""What a training script uses: track, restore, epochs, step."""

from __future__ import annotations

import atexit
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import torch

from ridethrough.config import Config
from ridethrough.errors import StepOrder, UsageError
from ridethrough.format import layout
from ridethrough.seam import process
from ridethrough.seam.bounded import BoundedFileSystem
from ridethrough.seam.clock import SystemClock
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.snapshot import link as names
from ridethrough.snapshot.address import real_path, remember_alias
from ridethrough.snapshot.plan import Plan
from ridethrough.snapshot.post import PartState
from ridethrough.snapshot.ranks import RankPhase
from ridethrough.store.retain import Retention
from ridethrough.store.start import remember_run, remembered_run, remembered_storage
from ridethrough.train import agreement, data, guard, nodes, provenance, rng, state
from ridethrough.train.attach import attach, claim, launch_from_environment
from ridethrough.train.group import Group
from ridethrough.train.session import Session
from ridethrough.train.tier import Memory
from ridethrough.types import StateClass

_DURATIONS = 256
_ADAM_STATES = 2
"""Tensors of a parameter's size that the usual optimizers will create at their first step."""
_LEAST_ANSWER_S = 10.0
"""Storage that is only slow takes less for one call, whatever patience was asked for."""


class Checkpointer:
    """Makes a training loop survive power loss.

    Snapshots every step (or every k) into memory that outlives this process, and has every
    `every_n_train_steps`-th made durable by a separate process.

    Args:
        run_dir: Directory of the run, on a disk that keeps what it acknowledges. Several nodes share it, or each has its own.
        every_n_train_steps: Steps between durable checkpoints.
        experiment: Name in `meta.json`; the directory's name if not given.
        config: The run's configuration; only its hash is kept, to notice changes.
        data_version: Version of the data, or `ridethrough.data_fingerprint(paths)`.
        save_last: Also make the very last step durable, at the end of `epochs`.
        keep_last: Newest checkpoints to keep.
        save_top_k: Also keep this many with the best `monitor`.
        monitor: A metric given to `step`, or "loss".
        mode: "min" or "max": which `monitor` is better.
        snapshot_every_n_steps: Steps between snapshots in memory; chosen from free memory if not given.
        fresh: Start at step 0 even where checkpoints exist.
        storage_wait_s: How long to wait at start for storage that answers with an error or not at all.

    Durability:
        A checkpoint counts as saved only when it is durable. Snapshots in memory survive the death
        of this process, not of the machine's power.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        every_n_train_steps: int = 100,
        experiment: str | None = None,
        config: Mapping[str, Any] | None = None,
        data_version: str | None = None,
        save_last: bool = True,
        keep_last: int = 3,
        save_top_k: int = 0,
        monitor: str | None = None,
        mode: str = "min",
        snapshot_every_n_steps: int | None = None,
        fresh: bool = False,
        storage_wait_s: float = 300.0,
    ) -> None:
        process.require_linux("ridethrough.Checkpointer")
        if every_n_train_steps < 1 or keep_last < 1 or mode not in ("min", "max") or (save_top_k and not monitor):
            raise UsageError(detail="Checkpointer: every_n_train_steps and keep_last are at least 1, mode is min or max, save_top_k needs monitor")
        answer_s = max(storage_wait_s, _LEAST_ANSWER_S)
        self.run_dir = real_path(os.fspath(run_dir), limit_s=answer_s)
        remember_alias(os.fspath(run_dir), self.run_dir)
        self._every = every_n_train_steps
        self._experiment = experiment or os.path.basename(self.run_dir)
        self._config = config
        self._data_version = data_version
        self._saves_last = save_last
        self._retention = Retention(keep_last=keep_last, keep_top=save_top_k, mode=mode)
        self._monitor = monitor
        self._wanted_interval = snapshot_every_n_steps
        # Wished for the start of the command: what is restarted after a crash goes on.
        is_restart = names.RESTART_VARIABLE in os.environ
        is_fresh = (fresh and not is_restart) or os.environ.get(names.FRESH_VARIABLE) == "1"
        self._wish = agreement.Wish(is_fresh=is_fresh, is_restart=is_restart)
        self._storage_wait_s = storage_wait_s
        self._fs = BoundedFileSystem(PosixFileSystem(), limit_s=answer_s)
        self._clock = SystemClock()
        self._tracked: dict[str, state.Tracked] = {}
        self._group: Group | None = None
        self._agreed: agreement.Agreement | None = None
        self._session: Session | None = None
        self._step = 0
        self._epoch = 0
        self.restored_step = 0
        """The step this process went on from, 0 at a first start."""
        self._optimizer_steps = 0
        self._loss: Any = None
        self._metrics: dict[str, Any] = {}
        self._meta: dict[str, Any] = {}
        self._structure: dict[str, str] = {}
        self._times: dict[str, float] = {}
        self._durations: deque[float] = deque(maxlen=_DURATIONS)
        self._last_step_s = 0.0
        self._pending_rng: dict[str, Any] | None = None
        self._is_closed = False

    # -- set-up ----------------------------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        """Optimizer steps made since the beginning of the run."""
        return self._step

    @property
    def epoch(self) -> int:
        """The epoch being trained, from 0; after `epochs` the one that would be next."""
        return self._epoch

    def track(self, **objects: Any) -> None:
        """The state of these objects is in every checkpoint from now on.

        Args:
            objects: By name: modules (the DDP wrapper, if there is one), optimizers, schedulers, a
                GradScaler, DataLoaders, and anything with `state_dict` and `load_state_dict`.

        Raises:
            UsageError: An object has no state, or `restore` was called before.
        """
        if self._agreed is not None:
            raise UsageError(detail="call ckpt.track() before ckpt.restore()")
        group = self._group = self._group or Group()
        for name, value in objects.items():
            if name in self._tracked:
                raise UsageError(detail=f"track({name}=…): the name is taken")
            seed = rng.mix(torch.initial_seed(), len(self._tracked))
            self._tracked[name] = state.classify(name, value, world_size=group.world_size, seed=seed)
            if isinstance(value, torch.optim.Optimizer):
                value.register_step_post_hook(self._count_optimizer_step)

    def _count_optimizer_step(self, *_: Any) -> None:
        self._optimizer_steps += 1

    def restore(self) -> int:
        """Every tracked object is as it was at the newest intact checkpoint; call it once, on every rank, before the loop.

        Returns:
            The step to go on from, 0 at a first start.

        Raises:
            NothingRestorable: Checkpoints were made here and none can be used (exit code 12).
            StorageUnreachable: Storage does not answer, or the disk is not mounted (13).
            StoreLocked: Another command owns the run (11).
            ResumeRefused: Something is different from what made the checkpoint that `[resume]` refuses, by default the data (21).
            StateMismatch: The checkpoint does not fit the tracked objects, or cannot be taken over by this number of ranks (22).
            MemoryTooSmall: The snapshots do not fit in memory (21).
            TwoHeads: Another half of the job goes on, or wants to (21).
        """
        if self._agreed is not None:
            raise UsageError(detail="ckpt.restore() was already called")
        group = self._group = self._group or Group()
        launch = launch_from_environment()
        if launch is not None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
            raise UsageError(detail="under `ridethrough run` restarts are its business: give torchrun --max-restarts 0")
        group.meet(process.node_name())
        times = self._times = {"process_start": _process_start_s(), "restore_called": self._clock.monotonic_s()}
        link = group.together(lambda: attach(self._clock, self.run_dir, rank=group.rank))
        session = self._session = Session(self._clock, link, run_dir=self.run_dir, rank=group.rank, world_size=group.world_size)
        if launch is not None:
            session.open_board(launch)
        with session.reporting():
            if launch is not None:
                group.together(lambda: claim(link, self.run_dir))
            times["attached"] = self._clock.monotonic_s()
            session.say(phase=RankPhase.AGREEING, times_s=times)
            try:
                self._agree(group, session)
            finally:
                self._fs.close()  # from here on storage is the persister's; a loader may fork
            times["loaded"] = self._clock.monotonic_s()
            session.say(phase=RankPhase.OUTSIDE, step=self._step, restored_step=self.restored_step, step_at_s=times["loaded"])
            self._last_step_s = times["loaded"]
            self._pending_rng = rng.capture()
        for item in self._tracked.values():
            if item.position is not None:
                item.position.on_start = self._on_loader_start
                item.position.on_end = self._on_loader_end
        atexit.register(self._at_exit, os.getpid())
        return self.restored_step

    def _agree(self, group: Group, session: Session) -> None:
        """The start agreement: which checkpoint, loaded and proven by all; which attempt, durable; then memory for it."""
        config = nodes.config_of(session.link)
        # Before anything is loaded: what that would import belongs to no provenance.
        self._meta = provenance.describe(experiment=self._experiment, config=self._config, data_version=self._data_version)
        self._meta["batch_size"] = state.batch_sizes(self._tracked.values())
        choice = agreement.choose(
            group,
            self._fs,
            self._clock,
            self.run_dir,
            memory=self._remembered(config),
            wish=self._wish,
            storage_wait_s=self._storage_wait_s,
        )
        self._times["chosen"] = self._clock.monotonic_s()
        session.say(phase=RankPhase.LOADING)
        warned = agreement.guard_resume(group, choice, self._meta, config.resume, run_dir=self.run_dir)
        state.mark_replicated(self._tracked.values(), world_size=group.world_size)
        found = choice.checkpoint
        if found is not None:
            self._apply(group, choice)
        opening = choice.opening
        neighbours = nodes.introduce(group, self._clock, session.link, config)
        key = nodes.agree_on_key(group, self._fs, self.run_dir, config, tier_nodes=opening.tier_nodes(group))
        agreed = self._agreed = agreement.agree(group, self._fs, self._clock, self.run_dir, choice, self._facts(), new_launch=session.new_launch)
        group.together(lambda: remember_run(self._fs, process.state_dir(), self.run_dir, agreed.run_uid, opening.storage))
        if layout.REPLICATED not in agreed.roster.part_names:
            for item in self._tracked.values():
                item.is_replicated = False
        self._structure = state.structure(self._tracked.values())
        self._meta["classes"] = state.classes(self._tracked.values(), config_hash=self._meta["config_hash"], world_size=group.world_size)
        plan = Plan(
            run_dir=self.run_dir,
            run_uid=agreed.run_uid,
            attempt=agreed.attempt,
            parent=agreed.parent,
            resumed_dir=found.dir_name if found else None,
            roster=agreed.roster,
            node=group.node,
            meta=self._meta,
            retention=self._retention,
            monitor=self._monitor,
            save_interval_steps=self._every,
            snapshot_interval_steps=agreed.slots.interval_steps,
            restored_step=self.restored_step,
            damaged=choice.suspects(group),
            is_shared=opening.is_shared,
            addresses=neighbours.addresses,
            key=key,
            domains=neighbours.domains,
            differs=guard.notice(warned) if group.node == group.node_order[0] else {},
        )
        session.begin(plan, launch=agreed.launch, slot_count=agreed.slots.slots_per_rank)

    def _remembered(self, config: Config) -> Memory:
        state_dir = process.state_dir()
        return Memory(
            run_uid=remembered_run(self._fs, state_dir, self.run_dir),
            storage=remembered_storage(self._fs, state_dir, self.run_dir),
            declared=config.storage,
            room=config.order,
        )

    def _apply(self, group: Group, choice: agreement.Choice) -> None:
        assert choice.checkpoint is not None
        seals = choice.checkpoint.seals
        own = group.together(lambda: state.apply(self._tracked.values(), choice.parts, rank=group.rank, world_size=group.world_size, seals=seals))
        self._step = self.restored_step = int(own["progress"]["step"])
        self._epoch = int(own["progress"]["epoch"])
        self._metrics.update(own["progress"]["metrics"])
        rng.restore(rng.moved(own["rng"], own["context"]["local_rank"], group.local_rank))
        if group.rank >= own["context"]["world_size"]:
            rng.branch(group.rank)

    def _facts(self) -> agreement.RankFacts:
        size = 0
        for part in self._capture():
            size += part.layout.size_bytes
        for item in self._tracked.values():
            if isinstance(item.value, torch.optim.Optimizer) and not item.value.state:
                size += _ADAM_STATES * sum(p.numel() * p.element_size() for g in item.value.param_groups for p in g["params"] if p.requires_grad)
        return agreement.RankFacts(
            holds_replicated=any(item.is_replicated for item in self._tracked.values()),
            state_bytes=size,
            available_bytes=process.available_memory_bytes(),
            save_interval_steps=self._every,
            wanted_interval_steps=self._wanted_interval,
        )

    def _on_loader_start(self) -> None:
        # Last of all, after the loader's iterators exist: code before the loop may have drawn random numbers that
        # the run which never stopped did not draw here.
        if self._pending_rng is not None and self.restored_step:
            rng.restore(self._pending_rng)

    def _on_loader_end(self, is_exhausted: bool) -> None:
        if is_exhausted:
            # A resumed epoch without a batch left is over: what the code after its loop draws must count.
            self._pending_rng = None
        if not self._is_closed:
            self._open_session().say(phase=RankPhase.OUTSIDE)

    # -- the loop --------------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Epoch numbers up to `count`, from the one to go on with; at the end the last step is durable.

        A resumed epoch goes on with the next batch of the tracked loaders; one whose last batch was
        already trained has no batch left, and the code after the inner loop runs as it would have.
        """
        self._open_session()
        for epoch in range(self._epoch, count):
            self._start_epoch(epoch)
            for item in self._tracked.values():
                if item.position is None and item.kind is StateClass.DATA:
                    data.set_sampler_epoch(item.value, epoch)
            yield epoch
            # What is saved from here on has the code after the inner loop behind it: a longer run must not repeat it.
            self._start_epoch(epoch + 1)
        if self._saves_last:
            self.close()

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        for item in self._tracked.values():
            if item.position is not None:
                item.position.start_epoch(epoch)

    def step(self, loss: Any = None, *, boundary: bool = True, **metrics: Any) -> None:
        """The step just made is counted and, where due, snapshotted; call it after optimizer, scaler and scheduler.

        Args:
            loss: Of this step (a number or a tensor of one).
            boundary: False for the micro-batches of gradient accumulation in which no optimizer stepped.
            metrics: Numbers for `monitor` and the record.

        Raises:
            StepOrder: No tracked optimizer has stepped since the last call.
            SystemExit: The run was asked to stop, and this step is durable.
        """
        session = self._open_session()
        if loss is not None:
            self._loss = loss
        self._metrics.update(metrics)
        if not boundary:
            return
        with session.reporting():
            self._check_order()
            self._step += 1
            self._pending_rng = None
            for item in self._tracked.values():
                if item.position is not None:
                    item.position.confirm()
            session.recover()
            now_s = self._clock.monotonic_s()
            self._durations.append(now_s - self._last_step_s)
            self._last_step_s = now_s
            stops = session.is_asked_to_stop(self._step)
            if self._is_snapshot_step() or stops:
                self._snapshot(session)
            self._tell(session)
            if stops:
                session.wait_until_durable(self._step, wait_s=self._storage_wait_s)
                session.say(phase=RankPhase.STOPPED)
                self._is_closed = True
                raise SystemExit(0)

    def _is_snapshot_step(self) -> bool:
        """Every k-th step, and the last one of an epoch: what runs after the inner loop must not be in that snapshot."""
        assert self._agreed is not None
        if self._step % self._agreed.slots.interval_steps == 0:
            return True
        inside = [item for item in self._tracked.values() if item.position is not None and item.position.is_iterating]
        return any(data.is_exhausted(item.value, item.position) for item in inside if item.position is not None)

    def _check_order(self) -> None:
        optimizers = [t for t in self._tracked.values() if isinstance(t.value, torch.optim.Optimizer)]
        scalers = [t for t in self._tracked.values() if isinstance(t.value, torch.amp.GradScaler) and t.value.is_enabled()]
        if optimizers and not self._optimizer_steps and not scalers:
            raise StepOrder(step=self._step + 1, detail="no tracked optimizer has stepped since the last call")
        self._optimizer_steps = 0

    def _tell(self, session: Session) -> None:
        self._times.setdefault("first_step", self._last_step_s)
        if self._step % 16 == 0 or len(self._durations) < 16:
            session.says["step_s_p99"] = sorted(self._durations)[int(0.99 * (len(self._durations) - 1))]
        # Without a loader of ours nobody can say when an epoch's loop has ended: then no step is taken for overdue early.
        is_inside = any(t.position is not None and t.position.is_stepped for t in self._tracked.values())
        session.say(phase=RankPhase.TRAINING if is_inside else RankPhase.OUTSIDE, step=self._step, step_at_s=self._last_step_s, times_s=self._times)

    # -- snapshots -------------------------------------------------------------------------------------------------

    def _capture(self) -> tuple[PartState, ...]:
        assert self._group is not None
        return state.capture(
            self._tracked.values(),
            state.Context(
                rank=self._group.rank,
                local_rank=self._group.local_rank,
                world_size=self._group.world_size,
                node=process.node_name(),
                step=self._step,
                epoch=self._epoch,
                loss=_number(self._loss),
                metrics={name: number for name, value in self._metrics.items() if (number := _number(value)) is not None},
                config_hash=self._meta.get("config_hash"),
                start_command=self._meta.get("start_command", ""),
                structure=self._structure,
            ),
        )

    def _snapshot(self, session: Session) -> None:
        metrics = {name: _number(value) for name, value in self._metrics.items()}
        if self._loss is not None:
            metrics.setdefault("loss", _number(self._loss))
        facts = {
            "captured_at": self._clock.now_at().isoformat(timespec="milliseconds"),
            "captured_s": self._clock.monotonic_s(),
            "metrics": _finite(metrics),
        }
        session.post(self._step, self._capture(), facts)

    def save(self) -> int:
        """The step just made is durable; call it on every rank, right after `step`.

        Returns:
            The step.

        Raises:
            SaveFailed: It could not be made durable; the error says why. The snapshot stays in memory.
        """
        session = self._open_session()
        if self._step > self.restored_step:  # otherwise it came from disk and nothing was trained since
            if session.posted_step != self._step:
                self._snapshot(session)
            session.wait_until_durable(self._step, wait_s=self._storage_wait_s)
            self._tell(session)
        return self._step

    def close(self) -> None:
        """The last step is durable and this rank has said that it is done. Idempotent."""
        if self._is_closed or self._agreed is None:
            return
        session = self._open_session()
        with session.reporting():
            self.save()
        session.say(phase=RankPhase.DONE)
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        # After an error the objects may be in mid-step: what is in memory from the last boundary is better.
        if kind is None:
            self.close()

    def _at_exit(self, pid: int) -> None:
        is_clean = getattr(sys, "last_type", None) is None
        session = self._open_session()
        if os.getpid() == pid and is_clean and session.says.get("phase") not in (RankPhase.FAILED, RankPhase.STOPPED):
            session.say(phase=RankPhase.DONE, is_unsaved=self._saves_last and not self._is_closed)

    def _open_session(self) -> Session:
        if self._agreed is None or self._session is None:
            raise UsageError(detail="call ckpt.restore() once, after ckpt.track() and before the loop")
        return self._session


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        value = value.detach()
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _finite(metrics: dict[str, float | None]) -> dict[str, float | str | None]:
    """JSON has no NaN and no infinity; the record says so in words."""
    return {name: value if value is None or abs(value) < float("inf") else repr(value) for name, value in metrics.items()}


def _process_start_s() -> float:
    """When this process was started, on the monotonic clock (since boot, as `/proc` counts; a suspend would shift it)."""
    started = process.start_time(os.getpid())
    return (started or 0) / os.sysconf("SC_CLK_TCK")
