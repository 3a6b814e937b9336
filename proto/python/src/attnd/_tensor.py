"""Arrays in and out: what the caller has, as addresses and strides; what attnd has, as arrays.

Taken are NumPy arrays, everything that speaks DLPack (torch, JAX), and everything with the buffer
protocol (memoryview, array.array, mmap) of three dimensions.  No element is ever copied here.
"""

from __future__ import annotations

import ctypes
import operator
import sys
from typing import Any, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import numpy.typing as npt

from . import _dlpack
from ._errors import invalid

try:
    import ml_dtypes

    _BF16: Any = np.dtype(ml_dtypes.bfloat16)
except ImportError:
    _BF16 = np.dtype(np.uint16)

Array = npt.NDArray[Any]

NUMPY = {"f32": np.dtype(np.float32), "bf16": _BF16, "f16": np.dtype(np.float16)}
_ITEM_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
_U32 = 2**32 - 1


class Tensor(NamedTuple):
    """A tensor of the caller's, checked.  It holds the memory."""

    address: int
    stride_token: int  # elements, as libattnd takes them
    stride_head: int
    owner: object


def _dtype_name(dtype: np.dtype[Any]) -> str:
    """_dtype_name returns "f32", "bf16" (bfloat16 or uint16), "f16", or NumPy's name."""
    if dtype.isnative:
        if dtype == np.uint16 or dtype.name == "bfloat16":
            return "bf16"
        for name, known in NUMPY.items():
            if dtype == known:
                return name
    return str(dtype)


def _look(field: str, obj: Any) -> _dlpack.Imported:
    if not isinstance(obj, np.ndarray):
        if hasattr(obj, "__dlpack__"):
            return _dlpack.import_tensor(field, obj)
        try:
            obj = np.asarray(memoryview(obj))
        except TypeError:
            raise TypeError(
                f"{field}: {type(obj).__name__} is no NumPy array and has neither DLPack nor the "
                "buffer protocol"
            ) from None
    item = obj.itemsize
    if any(s % item for s in obj.strides):
        raise invalid(field, "strides are not multiples of an element")
    return _dlpack.Imported(
        obj.__array_interface__["data"][0],
        _dtype_name(obj.dtype),
        obj.shape,
        tuple(s // item for s in obj.strides),
        obj.flags.writeable,
        obj,
    )


def _stride(field: str, what: str, stride: int, packed: int, count: int) -> int:
    """_stride returns the stride of a dimension of count elements; one that is never walked, or
    that is what contiguous memory has, is 0 for libattnd."""
    if count <= 1 or stride == packed:
        return 0
    if not 0 < stride <= _U32:
        raise invalid(field, f"stride {stride} between {what}; make it contiguous")
    return stride


def take(
    field: str, obj: Any, dtype: str, shape: Tuple[int, int, int], out: bool = False
) -> Tensor:
    """take checks a tensor [rows, heads, dim].  An output must be writable and contiguous."""
    if type(obj) is np.ndarray and obj.dtype is NUMPY[dtype] and obj.shape == shape:
        flags = obj.flags  # what most arrays are like takes no longer way
        if flags.c_contiguous and flags.aligned and (flags.writeable or not out):
            return Tensor(obj.__array_interface__["data"][0], 0, 0, obj)
    t = _look(field, obj)
    if t.dtype != dtype:
        raise invalid(field, f"type {t.dtype}, it must be {dtype}")
    if t.shape != shape:
        raise invalid(field, f"shape {list(t.shape)}, it must be {list(shape)}")
    rows, heads, dim = shape
    if 0 in shape:
        return Tensor(t.address, 0, 0, t.capsule)
    if dim > 1 and t.strides[2] != 1:
        raise invalid(field, f"stride {t.strides[2]} in the last dimension, it must be 1")
    stride_head = _stride(field, "heads", t.strides[1], dim, heads)
    stride_token = _stride(field, "rows", t.strides[0], heads * dim, rows)
    if t.address % _ITEM_BYTES[dtype]:
        raise invalid(field, "the memory is not aligned to an element")
    if out and (stride_head or stride_token):
        raise invalid(field, "an output must be contiguous")
    if out and not t.writable:
        raise invalid(field, "the memory is read-only")
    return Tensor(t.address, stride_token, stride_head, t.capsule)


def take_lse(obj: Any, shape: Tuple[int, int]) -> Tensor:
    """take_lse checks an output float32 [q_heads, rows]."""
    t = _look("lse", obj)
    if t.shape != shape:
        raise invalid("lse", f"shape {list(t.shape)}, it must be {list(shape)}")
    contiguous = (shape[1] <= 1 or t.strides[1] == 1) and (
        shape[0] <= 1 or t.strides[0] == shape[1]
    )
    if t.dtype != "f32" or not contiguous or not t.writable or t.address % 4:
        raise invalid("lse", "it must be float32, contiguous and writable")
    return Tensor(t.address, 0, 0, t.capsule)


def is_torch(obj: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(obj, torch.Tensor)


def to_torch(array: Array) -> Any:
    """to_torch makes a fresh output of ours a torch tensor of the same memory."""
    torch = sys.modules["torch"]
    bf16 = _dtype_name(array.dtype) == "bf16"
    return torch.from_dlpack(_dlpack.Bfloat16(array) if bf16 else array)


def at_address(address: Optional[int], dtype: np.dtype[Any], shape: Tuple[int, ...], owner: object,
               writable: bool) -> Array:
    """at_address is an array of memory that owner keeps: it lives as long as any view of it."""
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0 or not address:
        return np.empty(shape, dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    memory._attnd_owner = owner  # type: ignore[attr-defined]
    array: Array = np.frombuffer(memoryview(memory), dtype).reshape(shape)
    array.flags.writeable = writable
    return array


def integers(field: str, values: Any, dtype: type, count: int) -> Array:
    """integers makes a contiguous array [count] of whole numbers that fit dtype."""
    array = np.asarray(values)
    if array.shape != (count,):
        raise invalid(field, f"shape {list(array.shape)}, it must be [{count}]")
    if count and array.dtype.kind not in "iu":
        raise invalid(field, f"{array.dtype} holds no whole numbers")
    bounds = np.iinfo(dtype)
    if count and (int(array.min()) < bounds.min or int(array.max()) > bounds.max):
        raise invalid(field, f"a value outside {bounds.min} to {bounds.max}")
    return np.ascontiguousarray(array, dtype)


def floats(field: str, values: Optional[Sequence[float]], count: int) -> Optional[Array]:
    """floats makes a contiguous float32 array [count]."""
    if values is None:
        return None
    array = np.ascontiguousarray(values, np.float32)
    if array.shape != (count,):
        raise invalid(field, f"shape {list(array.shape)}, it must be [{count}]")
    return array


def tree_mask(mask: Any, n: int) -> Array:
    """tree_mask packs a mask [n, n] (row i sees new token j) into words [n, ceil(n / 64)]."""
    array = np.asarray(mask)
    if array.shape != (n, n) or array.dtype != np.bool_:
        raise invalid("tree_mask", f"it must be of bool and [{n}, {n}]")
    wide = np.zeros((n, (n + 63) // 64 * 64), np.bool_)
    wide[:, :n] = array
    return np.packbits(wide, axis=1, bitorder="little").view("<u8")


def unsigned(field: str, value: int, most: int = _U32) -> int:
    """unsigned checks a whole number: ctypes would cut it silently."""
    number = operator.index(value)
    if not 0 <= number <= most:
        raise invalid(field, f"{number} is not from 0 to {most}")
    return number


def milliseconds(field: str, seconds: float, most: int) -> int:
    """milliseconds rounds up, so that a small time is not none."""
    if not 0 <= seconds <= most / 1000:
        raise invalid(field, f"{seconds} s is not from 0 to {most / 1000}")
    return int(np.ceil(seconds * 1000))
