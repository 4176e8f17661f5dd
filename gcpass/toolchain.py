"""What gcpass needs from the machine: torch, ortools, a C++ compiler, its headers.

Torch-free, so that ``gcpass doctor`` can speak about a torch that does not import.
Each check returns what it found as a line of text, or raises with what to install.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib import import_module, metadata
from pathlib import Path

from gcpass.errors import (
    GcpassError,
    MissingCompilerError,
    SolverError,
    UnsupportedTorchError,
)

SUPPORTED_TORCH = ((2, 11), (2, 15))  # at least the first, below the second
ENTRY_POINT_GROUP = "torch_dynamo_backends"
ENTRY_POINT = "gcpass.backend:gcpass"

_INSTALL_COMPILER = (
    "Debian/Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; "
    "macOS: xcode-select --install"
)
_INSTALL_HEADERS = (
    "Debian/Ubuntu: apt-get install python3-dev; Fedora: dnf install python3-devel"
)


def require_torch() -> str:
    """Return the version of the installed torch.

    Raises:
        UnsupportedTorchError: torch is missing or outside `SUPPORTED_TORCH`.
    """
    least, below = (".".join(map(str, version)) for version in SUPPORTED_TORCH)
    wanted = f"torch>={least},<{below}"
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise UnsupportedTorchError(
            f'torch is not installed: pip install "{wanted}"'
        ) from None
    major, minor = (int(part) for part in version.split(".")[:2])
    if not SUPPORTED_TORCH[0] <= (major, minor) < SUPPORTED_TORCH[1]:
        raise UnsupportedTorchError(
            f'gcpass needs {wanted} and found {version}: pip install "{wanted}"'
        )
    return version


def require_ortools() -> str:
    """Return the version of the installed ortools, having loaded its solver.

    Raises:
        SolverError: ortools is missing, or its native library does not load.
    """
    try:
        import_module("ortools.sat.python.cp_model")
        return metadata.version("ortools")
    except (ImportError, OSError) as error:
        raise SolverError(
            f'ortools cannot be used ({error}): pip install "ortools>=9.12"'
        ) from error


def require_cpp_compiler(
    search: Sequence[str | None] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> str:
    """Return the path of the C++ compiler that Inductor's CPU backend would use.

    Args:
        search: commands in order of preference, as in Inductor's ``cpp.cxx``; None
            in it stands for a compiler that Inductor installs when asked to.
            Inductor's default when None.
        environ: ``CXX`` and ``PATH`` are read.

    Raises:
        MissingCompilerError: none of them is on the path.
    """
    if search is None:
        search = (None, environ.get("CXX", _default_compiler()))
    for command in search:
        if command is None and _inductor_installs_one(environ):
            return "g++ (installed by Inductor)"
        found = command and shutil.which(command, path=environ.get("PATH"))
        if found:
            return found
    raise MissingCompilerError(
        missing="C++ compiler",
        searched=[command for command in search if command],
        install=_INSTALL_COMPILER,
    )


def require_python_headers() -> str:
    """Return the path of ``Python.h``, which Inductor's C++ wrapper includes.

    Raises:
        MissingCompilerError: the headers of this Python are not installed.
    """
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        raise MissingCompilerError(
            missing="Python headers",
            searched=[str(header)],
            install=_INSTALL_HEADERS,
        )
    return str(header)


def require_entry_point() -> str:
    """Return the entry point by which torch finds ``backend="gcpass"``.

    Raises:
        GcpassError: it is not registered, or another package took the name.
    """
    found = metadata.entry_points(group=ENTRY_POINT_GROUP, name="gcpass")
    values = sorted({entry.value for entry in found})
    if not values:
        raise GcpassError(
            'torch does not know backend="gcpass": install the package (pip install .)'
        )
    if values != [ENTRY_POINT]:
        raise GcpassError(
            f'backend="gcpass" is {", ".join(values)} and should be {ENTRY_POINT}: '
            "uninstall the package that claims the name"
        )
    return values[0]


def _default_compiler() -> str:
    return {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")


def _inductor_installs_one(environ: Mapping[str, str]) -> bool:
    wanted = bool(environ.get("TORCH_INDUCTOR_INSTALL_GXX"))
    return wanted and sys.platform == "linux"
