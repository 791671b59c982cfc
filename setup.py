"""Only what pyproject.toml cannot say: how the compiled kernels are built.

Where they cannot be, kvir installs without them and runs on the reference kernels.
"""

import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

compiled = runpy.run_path(str(Path(__file__).with_name("kernels") / "cpu" / "build.py"))


class BuildKernels(build_ext):
    """Compiles with kernels/cpu/build.py: one source file, several instruction sets."""

    def build_extension(self, ext: Extension) -> None:
        try:
            compiled["build"](Path(self.get_ext_fullpath(ext.name)).resolve())
        except compiled["BuildError"] as error:
            raise CompileError(str(error)) from error


setup(
    ext_modules=[
        Extension(
            "kvir.kernels.cpu._ops",
            sources=[str(Path("kernels", "cpu", name)) for name in compiled["SOURCES"]],
            depends=[str(path) for path in sorted(Path("kernels", "cpu").glob("*.h"))],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
