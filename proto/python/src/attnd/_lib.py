"""libattnd by ctypes: the structs and functions of attnd.h, as they are there.

The rings need atomic accesses and fences, which Python has not; libattnd has them, and calls by
ctypes let other threads run.  tests/test_layout.py holds the structs against the C compiler's.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, c_bool, c_char, c_char_p, c_float, c_int, c_int32, c_uint8
from ctypes import c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, List, Tuple

from ._errors import Error, ErrorCode, make_error


class ErrInfo(Structure):
    _fields_ = [
        ("code", c_int),
        ("detail", c_int32),
        ("field", c_char * 32),
        ("text", c_char * 192),
    ]


class ConnectOpts(Structure):
    _fields_ = [
        ("client_name", c_char_p),
        ("tenant", c_char_p),
        ("timeout_ms", c_int32),
        ("transport", c_int),
        ("ring_bytes", c_uint64),
        ("spin_us", c_int32),
        ("session", c_uint64),
        ("secret", c_uint8 * 16),
        ("engine", c_void_p),
        ("engine_threads", c_int32),
        ("region_bytes", c_uint64),
    ]


class Limits(Structure):
    _fields_ = [
        ("message_bytes", c_uint32),
        ("in_flight", c_uint32),
        ("step_seqs", c_uint32),
        ("step_rows", c_uint32),
        ("sequences", c_uint32),
    ]


class RopeOpts(Structure):
    _fields_ = [
        ("inv_freq", c_void_p),
        ("num_inv_freq", c_uint32),
        ("attention_factor", c_float),
        ("interleaved", c_bool),
    ]


class LayerOpts(Structure):
    _fields_ = [
        ("scale", c_float),
        ("softcap", c_float),
        ("window_left", c_int32),
        ("window_right", c_int32),
        ("sinks", c_void_p),
        ("alibi_slopes", c_void_p),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        ("rope", RopeOpts),
        ("kv_layer", c_int32),
    ]


class ModelOpts(Structure):
    _fields_ = [
        ("name", c_char_p),
        ("digest", c_uint8 * 32),
        ("dtype", c_int),
        ("kv_dtype", c_int),
        ("layers", c_uint32),
        ("q_heads", c_uint32),
        ("kv_heads", c_uint32),
        ("head_dim", c_uint32),
        ("v_head_dim", c_uint32),
        ("block_tokens", c_uint32),
        ("not_causal", c_bool),
        ("all", LayerOpts),
        ("per_layer", POINTER(LayerOpts)),
    ]


class StepSeqArgs(Structure):
    _fields_ = [
        ("seq", c_uint64),
        ("new_len", c_uint32),
        ("q_len", c_uint32),
        ("reserve", c_uint32),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("tree_mask", c_void_p),
        ("committed", c_uint32),
        ("cached", c_uint32),
    ]


class Accept(Structure):
    _fields_ = [("accepted", c_uint32), ("num_path", c_uint32), ("path", c_void_p)]


class StepOpts(Structure):
    _fields_ = [
        ("deadline_ms", c_uint32),
        ("commit_step", c_uint64),
        ("commit_accept", POINTER(Accept)),
        ("num_commit", c_uint32),
        ("request", POINTER(c_uint64)),
    ]


class BlockMaskArgs(Structure):
    _fields_ = [
        ("q_block", c_uint32),
        ("num_query_blocks", c_uint32),
        ("start", c_void_p),
        ("kv_blocks", c_void_p),
    ]


class BuffersStruct(Structure):
    _fields_ = [
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("max_rows", c_uint32),
        ("max_new_rows", c_uint32),
    ]


class MemoryStruct(Structure):
    _fields_ = [("data", c_void_p), ("bytes", c_uint64)]


class AttendArgs(Structure):
    _fields_ = [
        ("step", c_uint64),
        ("model", c_uint32),
        ("layer", c_uint32),
        ("rows", c_uint32),
        ("new_rows", c_uint32),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("q_stride_token", c_uint32),
        ("q_stride_head", c_uint32),
        ("k_stride_token", c_uint32),
        ("k_stride_head", c_uint32),
        ("v_stride_token", c_uint32),
        ("v_stride_head", c_uint32),
        ("partial", c_bool),
        ("block_mask", POINTER(BlockMaskArgs)),
        ("buffers", POINTER(BuffersStruct)),
        ("stream", c_void_p),
        ("request", POINTER(c_uint64)),
    ]


class RanStruct(Structure):
    _fields_ = [
        ("kernel", c_char * 40),
        ("why", c_char * 56),
        ("splits", c_uint32),
        ("batch_rows", c_uint32),
        ("queue_us", c_uint32),
        ("run_us", c_uint32),
    ]


# The C struct of each class, for the test of layouts.
C_NAMES = {
    ErrInfo: "attnd_errinfo",
    ConnectOpts: "attnd_connect_opts",
    Limits: "attnd_limits",
    RopeOpts: "attnd_rope_opts",
    LayerOpts: "attnd_layer_opts",
    ModelOpts: "attnd_model_opts",
    StepSeqArgs: "attnd_step_seq",
    Accept: "attnd_accept",
    StepOpts: "attnd_step_opts",
    BlockMaskArgs: "attnd_block_mask",
    BuffersStruct: "attnd_buffers",
    MemoryStruct: "attnd_memory",
    AttendArgs: "attnd_attend_args",
    RanStruct: "attnd_ran",
}

TRANSPORTS = ("auto", "nng", "ring")  # attnd_transport
DTYPES = ("f32", "bf16", "f16", "f8e4m3")  # attnd_dtype

_P = c_void_p  # attnd_client *
_INFO = POINTER(ErrInfo)
_ATTEND1 = [_P, POINTER(StepSeqArgs), c_uint32, c_uint32, POINTER(AttendArgs), c_void_p,
            POINTER(RanStruct), _INFO]

# Functions that return an attnd_err and end in an attnd_errinfo *.
_CALLS: List[Tuple[str, List[Any]]] = [
    ("connect", [POINTER(_P), c_char_p, POINTER(ConnectOpts), _INFO]),
    ("reconnect", [_P, _INFO]),
    ("model_open", [_P, POINTER(ModelOpts), POINTER(c_uint32), _INFO]),
    ("model_close", [_P, c_uint32, _INFO]),
    ("seq_create", [_P, c_uint32, POINTER(c_uint64), _INFO]),
    ("seq_create_priority", [_P, c_uint32, c_uint32, POINTER(c_uint64), _INFO]),
    ("seq_fork", [_P, c_uint64, POINTER(c_uint64), POINTER(c_uint32), _INFO]),
    ("seq_truncate", [_P, c_uint64, c_uint32, _INFO]),
    ("seq_free", [_P, c_uint64, _INFO]),
    ("seq_keep", [_P, c_uint64, c_char_p, c_uint64, _INFO]),
    ("seq_attach", [_P, c_uint32, c_char_p, POINTER(c_uint64), POINTER(c_uint32), _INFO]),
    ("step_open", [_P, c_uint32, POINTER(StepSeqArgs), c_uint32, POINTER(StepOpts),
                   POINTER(c_uint64), _INFO]),
    ("attend", [_P, POINTER(AttendArgs), POINTER(RanStruct), _INFO]),
    ("buffers_create", [_P, POINTER(POINTER(BuffersStruct)), c_uint32, c_uint32, c_uint32, c_bool,
                        _INFO]),
    ("memory_create", [_P, POINTER(POINTER(MemoryStruct)), c_uint64, _INFO]),
    ("step_commit", [_P, c_uint64, POINTER(Accept), c_uint32, c_void_p, _INFO]),
    ("step_replay", [_P, c_uint64, c_uint64, c_void_p, _INFO]),
    ("step_cancel", [_P, c_uint64, _INFO]),
    ("cancel", [_P, c_uint64, _INFO]),
    ("decode", _ATTEND1),
    ("prefill", _ATTEND1),
    ("admin", [_P, c_char_p, c_char_p, POINTER(c_void_p), _INFO]),
]


def _load() -> ctypes.CDLL:
    """The library that $ATTND_LIBRARY names; else the wheel's own; else the system's."""
    bundled = Path(__file__).with_name("libattnd.so")
    own = str(bundled) if bundled.exists() else "libattnd.so.0"
    name = os.environ.get("ATTND_LIBRARY") or own
    try:
        lib = ctypes.CDLL(name)
    except OSError as e:
        raise ImportError(f"attnd: {e} (libattnd.so needs libnng and libcjson; $ATTND_LIBRARY may "
                          "name another one)") from e
    for call, argtypes in _CALLS:
        function = getattr(lib, "attnd_" + call)
        function.argtypes = argtypes
        function.restype = c_int
    lib.attnd_close.argtypes = [_P]
    lib.attnd_close.restype = None
    lib.attnd_buffers_free.argtypes = [POINTER(BuffersStruct)]
    lib.attnd_buffers_free.restype = None
    lib.attnd_memory_free.argtypes = [POINTER(MemoryStruct)]
    lib.attnd_memory_free.restype = None
    lib.attnd_free.argtypes = [c_void_p]
    lib.attnd_free.restype = None
    lib.attnd_get_limits.argtypes = [_P]
    lib.attnd_get_limits.restype = POINTER(Limits)
    lib.attnd_get_transport.argtypes = [_P]
    lib.attnd_get_transport.restype = c_int
    lib.attnd_get_session.argtypes = [_P, c_void_p]
    lib.attnd_get_session.restype = c_uint64
    return lib


lib = _load()


def engine(name: str) -> int:
    """engine returns the address of an engine of libattn, which is looked for as $ATTND_ENGINES,
    beside libattnd, and in the system."""
    beside = Path(lib._name).with_name("libattn.so")
    own = str(beside) if beside.exists() else "libattn.so.0"
    try:
        library = ctypes.CDLL(os.environ.get("ATTND_ENGINES") or own)
    except OSError as e:
        raise make_error(ErrorCode.ENOTSUP, "engine", f"{e}; $ATTND_ENGINES may name libattn.so") \
            from e
    try:
        make = getattr(library, "attn_engine_" + name)
    except AttributeError as e:
        raise make_error(ErrorCode.ENOTSUP, "engine", f"{library._name} was built without CUDA") \
            from e
    make.argtypes = []
    make.restype = c_void_p
    return int(make())


def error_of(code: int, info: ErrInfo) -> Error:
    """error_of makes the exception of a call that returned code."""
    return make_error(
        code,
        info.field.decode("ascii", "replace"),
        info.text.decode("utf-8", "replace"),
        info.detail,
    )


def call(function: Any, *args: Any) -> None:
    """call calls a function of _CALLS and raises what it returns."""
    info = ErrInfo()
    code = function(*args, info)
    if code != 0:
        raise error_of(code, info)
