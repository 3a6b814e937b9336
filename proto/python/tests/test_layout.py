"""The structs and codes of the package against the C headers, by the C compiler."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import attnd
import pytest
from attnd import _lib
from conftest import ROOT


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_structs_are_those_of_the_header(tmp_path: Path) -> None:
    lines, want = [], []
    for python, c in _lib.C_NAMES.items():
        lines.append(f'printf("{c} %zu\\n", sizeof({c}));')
        want.append(f"{c} {ctypes.sizeof(python)}")
        for field in python._fields_:
            member: Any = getattr(python, field[0])
            at = f"offsetof({c}, {field[0]}), sizeof((({c} *)0)->{field[0]})"
            lines.append(f'printf("{c}.{field[0]} %zu %zu\\n", {at});')
            want.append(f"{c}.{field[0]} {member.offset} {member.size}")
    program = "#include <stddef.h>\n#include <stdio.h>\n#include <proto/client/attnd.h>\n"
    source = tmp_path / "layout.c"
    source.write_text(program + "int main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n")
    subprocess.run(["cc", "-I", str(ROOT), "-o", tmp_path / "layout", source], check=True)
    said = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True)
    assert said.stdout.splitlines() == want


def test_codes_are_those_of_the_header() -> None:
    text = (ROOT / "proto/err.h").read_text()
    codes = {name: int(code) for name, code in re.findall(r"XX\((\w+), (-?\d+), \"", text)}
    assert len(codes) > 10
    assert codes == {code.name: int(code) for code in attnd.ErrorCode}


def test_names_are_in_the_order_of_the_header() -> None:
    text = (ROOT / "proto/dtype.h").read_text()
    dtypes = re.findall(r"ATTND_(\w+) = (\d)", text)
    assert [name.lower() for name, _ in sorted(dtypes, key=lambda d: d[1])] == list(_lib.DTYPES)
    header = (ROOT / "proto/client/attnd.h").read_text()
    assert [t.lower() for t in re.findall(r"ATTND_TRANSPORT_(\w+),", header)] == list(
        _lib.TRANSPORTS
    )


def test_every_function_of_the_header_is_there() -> None:
    header = (ROOT / "proto/client/attnd.h").read_text()
    declared = set(re.findall(r"^(?:[\w *]+?)\b(attnd_\w+)\(", header, re.M))
    bound = {"attnd_" + name for name, _ in _lib._CALLS}
    bound |= {"attnd_close", "attnd_buffers_free", "attnd_memory_free", "attnd_free"}
    bound |= {"attnd_get_limits", "attnd_get_transport", "attnd_get_session"}
    # A thread of Python's takes the place of attends with a callback.
    assert declared - bound == {"attnd_attend_start", "attnd_poll", "attnd_attend_cb"}
