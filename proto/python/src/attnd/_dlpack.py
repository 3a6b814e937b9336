"""DLPack capsules: reading one, and making one of a NumPy array that holds bfloat16.

NumPy speaks DLPack itself, but knows no bfloat16, neither in nor out.  The structs are those of
dlpack.h, versions 0.8 ("dltensor") and 1 ("dltensor_versioned").
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64
from ctypes import c_void_p, py_object
from typing import Any, Dict, NamedTuple, Optional, Tuple

import numpy as np

from ._errors import invalid

CPU = 1  # kDLCPU
READ_ONLY = 1  # a flag of DLManagedTensorVersioned
CODES = {(2, 32): "f32", (2, 16): "f16", (4, 16): "bf16"}  # kDLFloat, kDLBfloat


class DLTensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class DLManagedTensor(Structure):
    _fields_ = [("tensor", DLTensor), ("manager_ctx", c_void_p), ("deleter", c_void_p)]


class DLManagedTensorVersioned(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager_ctx", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", DLTensor),
    ]


_api = ctypes.pythonapi
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _api)
)
_get_pointer = ctypes.PYFUNCTYPE(c_void_p, c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
_new = ctypes.PYFUNCTYPE(py_object, c_void_p, ctypes.c_char_p, c_void_p)(("PyCapsule_New", _api))


class Imported(NamedTuple):
    address: int
    dtype: str  # "f32", "bf16", "f16", or DLPack's own numbers
    shape: Tuple[int, ...]
    strides: Tuple[int, ...]  # elements
    writable: bool
    capsule: object  # keeps the memory


def _capsule_of(field: str, obj: Any) -> object:
    try:
        try:
            return obj.__dlpack__(max_version=(1, 0))
        except TypeError:  # from before DLPack 1
            return obj.__dlpack__()
    except (BufferError, RuntimeError, ValueError) as e:  # a gradient is wanted, say
        raise invalid(field, str(e)) from e


def import_tensor(field: str, obj: Any) -> Imported:
    """import_tensor looks into a capsule of obj.  It does not consume it: the capsule, which the
    result holds, gives the memory back when it goes."""
    if obj.__dlpack_device__()[0] != CPU:
        raise invalid(field, "a tensor of another device than the CPU")
    capsule = _capsule_of(field, obj)
    writable = True
    if _is_valid(id(capsule), b"dltensor_versioned"):
        at = _get_pointer(id(capsule), b"dltensor_versioned")
        versioned = DLManagedTensorVersioned.from_address(at)
        if versioned.major != 1:
            raise invalid(field, f"DLPack {versioned.major} is not understood")
        writable = not versioned.flags & READ_ONLY
        t = versioned.tensor
    elif _is_valid(id(capsule), b"dltensor"):
        t = DLManagedTensor.from_address(_get_pointer(id(capsule), b"dltensor")).tensor
    else:
        raise invalid(field, "__dlpack__ gave no DLPack capsule")
    dtype = CODES.get((t.code, t.bits)) if t.lanes == 1 else None
    shape = tuple(t.shape[i] for i in range(t.ndim))
    return Imported(
        (t.data or 0) + t.byte_offset,
        dtype or f"DLPack type {t.code} of {t.bits} bits and {t.lanes} lanes",
        shape,
        _strides_of(t, shape),
        writable,
        capsule,
    )


def _strides_of(t: DLTensor, shape: Tuple[int, ...]) -> Tuple[int, ...]:
    if t.strides:
        return tuple(t.strides[i] for i in range(t.ndim))
    strides = [1] * len(shape)  # NULL is C order
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * shape[i]
    return tuple(strides)


# ---- out

# What capsules point into, by the address of the struct, until its deleter is called.
_exported: Dict[int, Tuple[Any, ...]] = {}


def _delete(managed: int) -> None:
    _exported.pop(managed, None)


def _capsule_gone(capsule: int) -> None:
    if _is_valid(capsule, b"dltensor"):  # a consumer would have renamed it
        _delete(_get_pointer(capsule, b"dltensor"))


_delete_c = ctypes.CFUNCTYPE(None, c_void_p)(_delete)
_capsule_gone_c = ctypes.PYFUNCTYPE(None, c_void_p)(_capsule_gone)


def export_bfloat16(array: np.ndarray[Any, Any]) -> object:
    """export_bfloat16 makes a capsule of an array of 2-byte elements, without a copy."""
    shape = (c_int64 * array.ndim)(*array.shape)
    strides = (c_int64 * array.ndim)(*(s // array.itemsize for s in array.strides))
    managed = DLManagedTensor()
    managed.tensor = DLTensor(
        data=array.__array_interface__["data"][0],
        device_type=CPU,
        ndim=array.ndim,
        code=4,
        bits=16,
        lanes=1,
        shape=shape,
        strides=strides,
    )
    managed.deleter = ctypes.cast(_delete_c, c_void_p)
    at = ctypes.addressof(managed)
    _exported[at] = (managed, shape, strides, array)
    capsule: object = _new(at, b"dltensor", ctypes.cast(_capsule_gone_c, c_void_p))
    return capsule


class Bfloat16:
    """Hands an array of bfloat16, held as ml_dtypes.bfloat16 or as uint16, to DLPack.

        torch.from_dlpack(attnd.Bfloat16(out))

    No copy is made.  It also stands for q, k, v and out wherever those are taken.
    """

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        if array.dtype != np.uint16 and array.dtype.name != "bfloat16":
            raise invalid("array", f"{array.dtype} is neither bfloat16 nor uint16")
        if not array.flags.writeable:
            raise invalid("array", "DLPack's old form, which all understand, has no read-only")
        if any(s % array.itemsize for s in array.strides):
            raise invalid("array", "strides are not multiples of an element")
        self.array = array

    def __dlpack__(self, *, stream: Optional[int] = None, **_: Any) -> object:
        return export_bfloat16(self.array)

    def __dlpack_device__(self) -> Tuple[int, int]:
        return CPU, 0
