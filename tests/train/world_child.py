"""One rank of a job over several nodes: real collectives, DDP and the whole checkpointer; only the keeper is played.

Snapshots of the steps that the test wants durable go straight to the tier, as the persister of the rank's node would
write them.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist
from lab import digest, rng_digest, seed_everything
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from fake_link import FakeLink
from ridethrough.errors import RideThroughError
from ridethrough.format.seal import save_id
from ridethrough.format.tensors import view_tensor
from ridethrough.seam.fs import PosixFileSystem
from ridethrough.snapshot import link as links
from ridethrough.snapshot.plan import Plan
from ridethrough.snapshot.post import PartState
from ridethrough.store.commit import PartSave, commit_part
from ridethrough.train import checkpointer
from ridethrough.train.session import Session

EPOCHS, BATCH = 2, 12
SAMPLES = BATCH * 3 * 4


class PlayedKeeper(FakeLink):
    """Memory, and ports that nobody listens at."""

    hello: dict[str, Any] = {}  # noqa: RUF012

    def request(self, op: str, **_: Any) -> dict[str, Any]:
        return {"launch": 1} if op == "launch" else {}


class DirectSession(Session):
    """Saves at once what is to be saved."""

    wanted: tuple[int, ...] = ()

    def begin(self, plan: Plan, *, launch: int, slot_count: int) -> None:
        self._plan = plan

    def recover(self) -> None:
        pass

    def is_asked_to_stop(self, step: int) -> bool:
        return False

    def wait_until_durable(self, step: int, *, wait_s: float) -> None:
        dist.barrier()

    def post(self, step: int, parts: tuple[PartState, ...], facts: Any) -> None:
        self.posted_step = step
        plan = self._plan
        assert plan is not None
        if step not in self.wanted:
            return
        for part in parts:
            is_mine = part.name in plan.parts_to_write(frozenset()) and (part.name.startswith("rank") or self._rank == plan.local_ranks[0])
            if is_mine:
                self._commit(plan, step, part)
        dist.barrier()

    def _commit(self, plan: Plan, step: int, part: PartState) -> None:
        payload = bytearray(part.layout.size_bytes)
        payload[: len(part.layout.header)] = part.layout.header
        for spec in part.layout.tensors:
            view_tensor(payload, len(part.layout.header), spec).copy_(part.tensors[spec.name])
        save = PartSave(
            run_uid=plan.run_uid,
            attempt=plan.attempt,
            parent=plan.parent,
            step=step,
            save_id=save_id(plan.run_uid, plan.attempt.nonce, step),
            part=part.name,
            node=plan.node,
            roster_digest=plan.roster.digest,
            payload=memoryview(payload),
            tree=part.tree,
            meta=plan.meta,
        )
        commit_part(PosixFileSystem(), plan.run_dir, save)


class Noisy(Dataset[Any]):
    """Samples that are different every time they are asked for."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.randn(4) + index / SAMPLES, index


def run(environment: dict[str, str], log: str, run_dir: str, tells: str, until: int, save: tuple[int, ...]) -> None:
    """The life of a rank.

    Args:
        environment: As its launcher and its node would set it.
        log: File for what it prints.
        run_dir: Run directory, as this node sees it.
        tells: File for what it tells.
        until: The step at which its power is cut; 0: never.
        save: Steps to make durable.
    """
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    DirectSession.wanted = save
    keeper = PlayedKeeper()
    keeper.board(links.CONTROL).write({"peer_port": 1000})
    keeper.board(links.COURIER).write({"port": 2000})
    checkpointer.Session = DirectSession  # type: ignore[misc]
    checkpointer.attach = lambda *_, **__: keeper  # type: ignore[assignment,return-value]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    net: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
    if os.environ.get("WORLD_IS_DDP", "1") == "1":
        net = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    seed_everything(50 + rank)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data = Noisy()
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, seed=3))
    ckpt = checkpointer.Checkpointer(run_dir, every_n_train_steps=1, storage_wait_s=5, save_last=False)
    ckpt.track(model=net, optimizer=optimizer, scheduler=scheduler, data=loader)
    with open(tells, "a", buffering=1) as file:

        def tell(**line: Any) -> None:
            file.write(json.dumps({"rank": rank, "ranks": ranks, **line}) + "\n")

        try:
            restored = ckpt.restore()
        except RideThroughError as error:
            tell(error=error.code, message=str(error))
            os._exit(error.exit_code)
        plan = ckpt._session._plan  # type: ignore[union-attr]
        tell(restored=restored, is_shared=plan.is_shared, nodes=plan.nodes, addresses=plan.addresses, key=plan.key, seq=plan.attempt.seq)
        for epoch in ckpt.epochs(EPOCHS):
            for x, index in loader:
                optimizer.zero_grad()
                net(x).pow(2).mean().backward()
                optimizer.step()
                scheduler.step()
                ckpt.step()
                module = getattr(net, "module", net)
                common = digest([dict(module.named_parameters()), optimizer.state_dict(), scheduler.get_last_lr()])
                tell(
                    step=ckpt.global_step, epoch=epoch, samples=index.tolist(), common=common, own=digest([module.state_dict(), x]), rng=rng_digest()
                )
                if ckpt.global_step == until:
                    dist.barrier()
                    os._exit(0)  # the power is cut
    dist.destroy_process_group()
