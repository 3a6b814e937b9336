"""The client of attnd, the attention daemon of an inference server.

    import attnd

    with attnd.connect("ipc:///run/attnd/attnd.sock") as client:
        model = client.open_model("demo", layers=2, q_heads=8, kv_heads=2, head_dim=64, dtype="f32")
        seq = model.sequence()
        with client.step([seq.append(20)]) as step:  # a prompt of 20 tokens
            for layer in range(2):
                out = step.attend(layer, q, k, v)    # [20, 8, 64]
            step.commit()

The daemon keeps K and V; per layer it gets q, k and v of the new tokens and gives back the
attention output.  What a call means is said in proto/client/attnd.h and proto/proto_wire.h.
"""

from ._client import Client, Limits, Request, Session, connect
from ._dlpack import Bfloat16
from ._errors import BusyError, ConnectionError, Error, ErrorCode, InvalidError, NoSpaceError
from ._errors import StaleError, TimeoutError
from ._model import Layer, Model, Rope, Sequence
from ._step import BlockMask, Buffers, Ran, Step, StepSeq

__all__ = [
    "Bfloat16",
    "BlockMask",
    "Buffers",
    "BusyError",
    "Client",
    "ConnectionError",
    "Error",
    "ErrorCode",
    "InvalidError",
    "Layer",
    "Limits",
    "Model",
    "NoSpaceError",
    "Ran",
    "Request",
    "Rope",
    "Sequence",
    "Session",
    "StaleError",
    "Step",
    "StepSeq",
    "TimeoutError",
    "connect",
]
