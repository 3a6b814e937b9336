"""Builds libattnd from the tree's C sources into the package, so that a wheel needs nothing but
libnng and libcjson.  An sdist carries those sources along, under csrc."""

import os
import re
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
ROOT = HERE / "csrc" if (HERE / "csrc").is_dir() else HERE.parents[1]
C_FILES = sorted(
    path
    for path in [*(ROOT / "proto").iterdir(), *(ROOT / "proto/client").iterdir()]
    if path.suffix in (".c", ".h", ".map")
)
SOURCES = [os.path.relpath(p, HERE) for p in C_FILES if p.suffix == ".c" and p.name != "example.c"]
VERSION = re.search(r"project\(attnd VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]


class BuildLibrary(build_ext):
    """The "extension" is a plain shared library, which ctypes loads: no Python in it."""

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext):
        return []

    def build_extension(self, ext):
        # Objects of sources outside of this folder would land outside of the build folder.
        objects = self.compiler.compile(
            ext.sources,
            output_dir=str(Path(self.build_temp).resolve()),
            include_dirs=ext.include_dirs,
            macros=ext.define_macros,
            extra_postargs=ext.extra_compile_args,
        )
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            libraries=ext.libraries,
            extra_postargs=ext.extra_link_args,
        )


class AnyPython(bdist_wheel):
    """One wheel for every Python of a platform."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


class SourcesToo(sdist):
    def make_release_tree(self, base_dir, files):
        # Sources of the "extension" outside of this folder would land outside of the tree.
        super().make_release_tree(base_dir, [f for f in files if not f.startswith("..")])
        for path in [*C_FILES, ROOT / "CMakeLists.txt", ROOT / "LICENSE"]:
            to = Path(base_dir, "csrc", path.relative_to(ROOT))
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)


setup(
    version=VERSION,
    ext_modules=[
        Extension(
            "attnd.libattnd",
            SOURCES,
            include_dirs=[str(ROOT)],
            define_macros=[("_GNU_SOURCE", None)],
            libraries=["nng", "cjson", "pthread", "m"],
            extra_compile_args=["-std=c11", "-O3"],
            extra_link_args=[f"-Wl,--version-script={ROOT / 'proto/client/attnd.map'}"],
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPython, "sdist": SourcesToo},
)
