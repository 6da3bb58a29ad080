"""Between torch tensors and the bytes of a part. The only module of this package that imports torch."""

from __future__ import annotations

from typing import Any

import torch

from ridethrough.errors import StateNotExpressible
from ridethrough.format import tree
from ridethrough.format.part import TensorSpec

_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def spec_of(name: str, tensor: torch.Tensor) -> tuple[str, str, tuple[int, ...]]:
    """Name, data type and shape as `part.lay_out` wants them.

    Raises:
        StateNotExpressible: A kind of tensor that plain bytes cannot hold.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "_local_tensor"):
        raise StateNotExpressible(path=name, detail="a DTensor (sharded state is not supported yet)")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        raise StateNotExpressible(path=name, detail=f"a tensor with layout {tensor.layout}, quantized, nested or on meta")
    if tensor.dtype not in _CODES:
        raise StateNotExpressible(path=name, detail=f"a tensor of {tensor.dtype}")
    return name, _CODES[tensor.dtype], tuple(tensor.shape)


def view_tensor(buffer: Any, base: int, spec: TensorSpec) -> torch.Tensor:
    """The tensor that lies in a writable buffer; shares its memory."""
    dtype = _DTYPES[spec.dtype]
    if spec.end == spec.begin:
        return torch.empty(spec.shape, dtype=dtype)
    raw = torch.frombuffer(buffer, dtype=torch.uint8, count=spec.end - spec.begin, offset=base + spec.begin)
    return raw.view(dtype).reshape(spec.shape)


def is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal type, shape and bits; NaNs and signed zeroes included."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    a, b = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (first, second))
    return bool(torch.equal(a, b))


class Gatherer:
    """Collects the tensors of a state while its tree is encoded."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: Any, path: str) -> Any:
        """The tree of a state; its tensors are in `tensors` under the names the tree uses.

        Raises:
            StateNotExpressible: Names the path of what has no place.
        """
        return tree.encode(value, path, self._leaf)

    def _leaf(self, path: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return {"~": "tensor", "v": self._add(path, value.detach())}
        if isinstance(value, torch.dtype):
            return {"~": "torch", "v": ["dtype", str(value).removeprefix("torch.")]}
        if isinstance(value, torch.device):
            return {"~": "torch", "v": ["device", str(value)]}
        if isinstance(value, torch.Size):
            return {"~": "torch", "v": ["size", list(value)]}
        kind = type(value)
        if kind.__module__ == "numpy":
            return self._numpy(path, value)
        return NotImplemented

    def _numpy(self, path: str, value: Any) -> Any:
        if type(value).__name__ == "ndarray":
            try:
                return {"~": "array", "v": self._add(path, torch.from_numpy(value.copy()))}
            except TypeError as error:
                raise StateNotExpressible(path=path, detail=f"a NumPy array of {value.dtype}") from error
        if hasattr(value, "dtype") and value.dtype.kind in "biufc":
            return {"~": "numpy", "v": [value.dtype.str, value.tobytes().hex()]}
        return NotImplemented

    def _add(self, path: str, tensor: torch.Tensor) -> str:
        name = path
        while name in self.tensors:  # a key with a slash in it can look like a path
            name += "'"
        spec_of(name, tensor)
        self.tensors[name] = tensor
        return name
