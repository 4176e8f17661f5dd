"""Compilation of inner loops, when numba is installed.

The loops over `gcpass.solvers.timeline` are plain Python over numpy arrays. With numba
they run some hundred times faster and compute the same: integers of 64 bits, the four
operations on floats (and powers, where annealing cools), no fast-math, no random
numbers but our own. Without numba a time limit is reached after less work.

What numba compiled is kept on disk in a folder of its own, named after the sources:
numba itself notices a change of the file that holds a function, but not of another
file whose functions were compiled into it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

COMPILED = importlib.util.find_spec("numba") is not None  # the extra "fast"


def compiled(function: F) -> F:
    """Return the function, compiled by numba if that is installed."""
    if not COMPILED:
        return function
    numba = importlib.import_module("numba")
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = _cache_folder()  # read when a function is decorated
    try:
        fast = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = before
    return cast(F, fast)


@cache
def _cache_folder() -> str:
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        source = file.read_bytes()
        if b"@compiled" in source:
            digest.update(source)
    name = f"gcpass/numba-{digest.hexdigest()[:16]}"
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(home) / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that cannot be written to
        folder = Path(tempfile.mkdtemp(prefix="gcpass-numba-"))
    return str(folder)
