from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from lab import digest
from parts import Holder, capture, classify, restore
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ridethrough.errors import StateMismatch, StateNotExpressible, UsageError
from ridethrough.train import state
from ridethrough.types import StateClass


def round_trip(value: Any) -> Any:
    fresh = Holder()
    restore({"holder": Holder(value)}, {"holder": fresh})
    return fresh.value


def bits(dtype: torch.dtype, count: int = 24) -> torch.Tensor:
    """Every bit pattern is as good as another: NaNs, infinities, denormals and signed zeroes among them."""
    generator = torch.Generator().manual_seed(3)
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype) if dtype is not torch.bool else raw > 127


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    tensor = bits(dtype).reshape(4, 6)
    assert digest(round_trip(tensor)) == digest(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_without_dimensions_comes_back(dtype: torch.dtype) -> None:
    tensor = bits(dtype, 1).reshape(())
    assert digest(round_trip(tensor)) == digest(tensor)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_empty_tensor_comes_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    found = round_trip(torch.empty(shape, dtype=dtype))
    assert (found.dtype, tuple(found.shape)) == (dtype, shape)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).reshape(3, 4).t(),
        torch.arange(12)[::3],
        torch.ones(1).expand(5),
        torch.arange(8.0).reshape(1, 2, 2, 2).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "strided", "expanded", "channels last"],
)
def test_tensor_comes_back_whatever_its_strides(tensor: torch.Tensor) -> None:
    assert torch.equal(round_trip(tensor), tensor)


@pytest.mark.parametrize(
    "value",
    [
        (1, "two", 3.0, None, True),
        {"a": {1: "int key", (2, 3): "tuple key", None: "none key"}},
        [float("inf"), float("-inf"), -0.0],
        b"\x00\xff",
        torch.Size([2, 3]),
        torch.float16,
        torch.device("cpu"),
        2**200,
    ],
    ids=repr,
)
def test_value_comes_back_with_its_type(value: Any) -> None:
    found = round_trip(value)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("value", [np.float32(1.5), np.int64(-3), np.bool_(True)], ids=repr)
def test_numpy_scalar_comes_back_with_its_type(value: Any) -> None:
    found = round_trip(value)
    assert (type(found), found) == (type(value), value)


def test_numpy_array_comes_back() -> None:
    array = np.arange(6, dtype=np.uint32).reshape(2, 3)
    assert digest(round_trip(array)) == digest(array)


def test_keys_that_look_like_paths_do_not_collide() -> None:
    value = {"a/b": torch.tensor([1.0]), "a": {"b": torch.tensor([2.0])}}
    assert digest(round_trip(value)) == digest(value)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"schedule": {"anneal": lambda x: x}}, "holder/value/schedule/anneal"),
        ([1, {"x": {1, 2}.__iter__()}], "holder/value/1/x"),
        ({"sparse": torch.eye(3).to_sparse()}, "holder/value/sparse"),
        ({"objects": np.array([object()])}, "holder/value/objects"),
    ],
    ids=["function", "iterator", "sparse tensor", "array of objects"],
)
def test_value_that_has_no_place_is_refused_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(StateNotExpressible, match=f"state at {path} "):
        capture({"holder": Holder(value)})


def test_object_without_a_state_is_refused_by_its_name() -> None:
    with pytest.raises(UsageError, match=r"track\(tokenizer=…\): dict has no state_dict\(\) and load_state_dict\(\)"):
        classify({"tokenizer": {}})


# -- structure ---------------------------------------------------------------------------------------------------------


def net(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(collections.OrderedDict(layers or {"a": nn.Linear(2, 3), "b": nn.Linear(3, 1)}))


@pytest.mark.parametrize(
    "changed",
    [
        net(a=nn.Linear(2, 3), c=nn.Linear(3, 1)),
        net(a=nn.Linear(2, 4), b=nn.Linear(4, 1)),
        net(a=nn.Linear(2, 3), b=nn.Linear(3, 1), c=nn.Dropout()),
        net(a=nn.Linear(2, 3), b=nn.Linear(3, 1)).double(),
        net(a=nn.Linear(2, 3), b=nn.Bilinear(3, 1, 1)),
    ],
    ids=["renamed module", "other shape", "additional module", "other type", "other class"],
)
def test_model_whose_structure_has_changed_is_refused_by_name(changed: nn.Module) -> None:
    with pytest.raises(StateMismatch, match="does not fit model: its structure has changed"):
        restore({"model": net()}, {"model": changed})


def test_optimizer_with_its_parameters_in_another_order_is_refused_by_name() -> None:
    """Two layers of one shape: the state would load without complaint into the wrong ones."""

    def job(order: int) -> dict[str, Any]:
        model = net(a=nn.Linear(2, 2), b=nn.Linear(2, 2))
        optimizer = torch.optim.Adam(list(model.parameters())[::order])
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    with pytest.raises(StateMismatch, match="does not fit optimizer: its structure has changed"):
        restore(job(1), job(-1))


def test_optimizer_of_another_kind_is_refused_by_name() -> None:
    model = net()
    with pytest.raises(StateMismatch, match="does not fit optimizer"):
        restore(
            {"model": model, "optimizer": torch.optim.Adam(model.parameters())},
            {"model": model, "optimizer": torch.optim.AdamW(model.parameters())},
        )


class CastsItsState(torch.optim.SGD):
    """Keeps its momentum in float32 beside bfloat16 weights; `Optimizer.load_state_dict` casts it to the weights' type."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for state_of_one in self.state.values():
            state_of_one["momentum_buffer"] = state_of_one["momentum_buffer"].float() + 1e-4


def test_optimizer_that_casts_its_state_on_loading_is_refused_by_name() -> None:
    def job() -> dict[str, Any]:
        model = nn.Linear(2, 2).bfloat16()
        optimizer = CastsItsState(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    with pytest.raises(StateMismatch, match="does not fit optimizer: optimizer/state/0/momentum_buffer is not what was saved"):
        restore(job(), job())


class Forgets(nn.Linear):
    """A module that changes what it loads."""

    def _load_from_state_dict(self, found: dict[str, Any], prefix: str, *rest: Any) -> None:
        found[f"{prefix}weight"] = found[f"{prefix}weight"] * 0.5
        super()._load_from_state_dict(found, prefix, *rest)


def test_model_that_changes_what_it_loads_is_refused_by_the_tensor() -> None:
    with pytest.raises(StateMismatch, match="does not fit model: model/weight is not what was saved"):
        restore({"model": Forgets(2, 2)}, {"model": Forgets(2, 2)})


def test_object_that_is_not_tracked_any_more_is_refused_by_name() -> None:
    with pytest.raises(StateMismatch, match="does not fit average: in the checkpoint but not tracked here"):
        restore({"model": net(), "average": Holder(1)}, {"model": net()})


def test_object_that_was_not_tracked_before_is_refused_by_name() -> None:
    with pytest.raises(StateMismatch, match="does not fit average: it was not tracked when this checkpoint was made"):
        restore({"model": net()}, {"model": net(), "average": Holder(1)})


def test_load_that_fails_is_told_with_the_objects_name_and_the_reason() -> None:
    class Broken(Holder):
        def load_state_dict(self, found: dict[str, Any]) -> None:
            raise KeyError("betas")

    with pytest.raises(StateMismatch, match="does not fit holder: KeyError: 'betas'"):
        restore({"holder": Holder(1)}, {"holder": Broken()})


def test_compiled_model_loads_what_the_plain_one_saved() -> None:
    plain, other = net(), net()
    restore({"model": plain}, {"model": torch.compile(other, backend="eager")})
    assert digest(other.state_dict()) == digest(plain.state_dict())


def test_tied_weights_come_back_tied() -> None:
    def tied() -> nn.Sequential:
        model = net(a=nn.Linear(3, 3), b=nn.Linear(3, 3))
        model.b.weight = model.a.weight
        return model

    saved, fresh = tied(), tied()
    restore({"model": saved}, {"model": fresh})
    assert fresh.b.weight is fresh.a.weight
    assert digest(fresh.state_dict()) == digest(saved.state_dict())


class Versioned(nn.Linear):
    """A module that reads the version of its own format when it loads."""

    _version = 5
    found: Any = None

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any) -> None:
        self.found = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_format_version_of_a_module_is_known_on_loading() -> None:
    fresh = net(a=Versioned(2, 2))
    restore({"model": net(a=Versioned(2, 2))}, {"model": fresh})
    assert fresh.a.found == 5


# -- classes -----------------------------------------------------------------------------------------------------------


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(8))


def job() -> dict[str, Any]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader}


def presence(objects: dict[str, Any]) -> dict[str, str]:
    return {name: row["presence"] for name, row in state.classes(classify(objects), config_hash="abc", world_size=1).items()}


def test_complete_job_has_all_six_classes_present() -> None:
    assert presence(job()) == {found.value: "present" for found in StateClass}


@pytest.mark.parametrize(
    ("name", "missing"),
    [("model", StateClass.MODEL), ("optimizer", StateClass.OPTIMIZER), ("scheduler", StateClass.SCHEDULER), ("data", StateClass.DATA)],
)
def test_class_that_is_not_tracked_is_named_missing(name: str, missing: StateClass) -> None:
    objects = job()
    del objects[name]
    assert [found for found, how in presence(objects).items() if how == "missing"] == [missing.value]


def test_missing_class_says_how_to_add_it() -> None:
    assert state.classes(classify({"model": net()}), config_hash=None, world_size=1)["optimizer"]["detail"] == "track(optimizer=…)"


def test_iterable_dataset_without_a_state_is_reported_unprotectable() -> None:
    assert presence({**job(), "data": DataLoader(Endless(), batch_size=2)})["data"] == "unprotectable"


def test_one_loader_that_cannot_be_protected_marks_the_class() -> None:
    assert presence({**job(), "more": DataLoader(Endless(), batch_size=2)})["data"] == "unprotectable"


def test_iterable_dataset_with_a_state_is_present() -> None:
    class Resumable(Endless):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, found: dict[str, Any]) -> None:
            pass

    assert presence({**job(), "data": DataLoader(Resumable(), batch_size=2)})["data"] == "present"


def test_unknown_config_is_said_to_be_unknown() -> None:
    assert "config hash unknown" in state.classes(classify(job()), config_hash=None, world_size=1)["metrics"]["detail"]


def test_grad_scaler_counts_as_optimizer_state() -> None:
    rows = state.classes(classify({**job(), "scaler": torch.amp.GradScaler("cpu")}), config_hash=None, world_size=1)
    assert "scaler (GradScaler)" in rows["optimizer"]["detail"]
