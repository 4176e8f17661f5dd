"""Train a model within a byte budget for peak memory, by ``torch.compile``.

Importing this package does not import torch: the command line and the solvers run
without it. Every public name loads its module on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # At run time `gcpass.backend` is the module gcpass/backend.py, which can be
    # called; a type checker knows callables only, so it is shown the function.
    from gcpass.backend import enable, partitioner, plans
    from gcpass.backend import make_backend as backend
    from gcpass.cost import register_cost
    from gcpass.errors import (
        GcpassError,
        GradientMismatchError,
        InfeasibleBudgetError,
        InfeasibleRegionError,
        InvalidOptionError,
        InvalidProblemError,
        MissingCompilerError,
        SolverError,
        UnsupportedGraphError,
        UnsupportedTorchError,
    )
    from gcpass.gradient_check import GradientReport, check
    from gcpass.measured import measure
    from gcpass.regions import region

    __version__: str

__all__ = [
    "GcpassError",
    "GradientMismatchError",
    "GradientReport",
    "InfeasibleBudgetError",
    "InfeasibleRegionError",
    "InvalidOptionError",
    "InvalidProblemError",
    "MissingCompilerError",
    "SolverError",
    "UnsupportedGraphError",
    "UnsupportedTorchError",
    "__version__",
    "backend",
    "check",
    "enable",
    "measure",
    "partitioner",
    "plans",
    "region",
    "register_cost",
]

_MODULE_OF = {
    "GradientReport": "gcpass.gradient_check",
    "check": "gcpass.gradient_check",
    "enable": "gcpass.backend",
    "measure": "gcpass.measured",
    "partitioner": "gcpass.backend",
    "plans": "gcpass.backend",
    "region": "gcpass.regions",
    "register_cost": "gcpass.cost",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name == "backend":
        return import_module("gcpass.backend")
    if name in __all__:
        return getattr(import_module(_MODULE_OF.get(name, "gcpass.errors")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib import metadata  # here: most imports of gcpass never ask

    try:
        return metadata.version("gcpass")
    except metadata.PackageNotFoundError:  # a checkout on the path, not installed
        return "0+unknown"
