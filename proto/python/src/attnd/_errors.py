"""The errors of attnd (proto/err.h) as exceptions."""

from __future__ import annotations

import builtins
import enum
from typing import Dict, Tuple, Type


class ErrorCode(enum.IntEnum):
    """The codes of proto/err.h; they are the same on the wire and in C."""

    OK = 0
    EINVAL = -1
    ENOMEM = -2
    ENOSPC = -3
    EBUSY = -4
    EMSGSIZE = -5
    ENOTSUP = -6
    ESTALE = -7
    EPERM = -8
    ENOENT = -9
    EEXIST = -10
    ETIMEDOUT = -11
    ECANCELED = -12
    ESHUTDOWN = -13
    EPROTO = -14
    EVERSION = -15
    ECONN = -16
    EIO = -17
    ECUDA = -18


class Error(Exception):
    """A call that failed.

    code is an ErrorCode, or a plain int when the daemon is newer than this package; field names the
    argument or message field that is to blame ("" = none), text is one line for a person, detail a
    number that the code defines (the first missing layer of a commit, say; else 0).
    """

    def __init__(self, code: int, field: str, text: str, detail: int = 0) -> None:
        self.code: int = ErrorCode(code) if code in _CODES else code
        self.field = field
        self.text = text
        self.detail = detail
        name = self.code.name if isinstance(self.code, ErrorCode) else f"error {code}"
        told = not field or text.startswith((f"{field}:", f"{field} "))
        super().__init__(f"{name}: {text}" if told else f"{name}: {field}: {text}")

    def __reduce__(self) -> Tuple[Type[Error], Tuple[int, str, str, int]]:
        return type(self), (int(self.code), self.field, self.text, self.detail)


class InvalidError(Error, ValueError):
    """EINVAL: an argument is wrong; field names it."""


class NoSpaceError(Error):
    """ENOSPC: no free blocks, and the step was not to wait, or not any longer."""


class BusyError(Error):
    """EBUSY: busy, or over a limit; try again later."""


class StaleError(Error):
    """ESTALE: a model, sequence, step or session that is no more."""


class TimeoutError(Error, builtins.TimeoutError):
    """ETIMEDOUT: no answer in time; the outcome of a call that changes state is unknown."""


class ConnectionError(Error, builtins.ConnectionError):
    """ECONN: no connection, or it was lost; Client.reconnect mends it."""


_CODES = frozenset(int(code) for code in ErrorCode)

_CLASSES: Dict[int, Type[Error]] = {
    ErrorCode.EINVAL: InvalidError,
    ErrorCode.ENOSPC: NoSpaceError,
    ErrorCode.EBUSY: BusyError,
    ErrorCode.ESTALE: StaleError,
    ErrorCode.ETIMEDOUT: TimeoutError,
    ErrorCode.ECONN: ConnectionError,
}


def make_error(code: int, field: str, text: str, detail: int = 0) -> Error:
    """make_error returns the exception of a code, of its own class where it has one."""
    return _CLASSES.get(code, Error)(code, field, text, detail)


def invalid(field: str, text: str) -> Error:
    """invalid is the exception of an argument that is wrong."""
    return make_error(ErrorCode.EINVAL, field, text)
