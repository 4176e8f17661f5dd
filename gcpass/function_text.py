"""Text that identifies a user's function, the same in every process."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["function_text"]


def function_text(function: Callable[..., Any]) -> str:
    """Return a function's name and source, with simple values that it closes over.

    Its byte code stands in where the source is out of reach. Globals that it reads are
    not part of the text.
    """
    function = inspect.unwrap(function)
    name = f"{getattr(function, '__module__', '')}.{_qualified_name(function)}"
    cells = getattr(function, "__closure__", None) or ()
    values = [repr(c.cell_contents) for c in cells if _is_simple(c.cell_contents)]
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):  # typed in an interactive shell, or not a function
        code = getattr(function, "__code__", None)
        source = "" if code is None else f"{code.co_code.hex()}{code.co_names}"
        constants = () if code is None else code.co_consts
        values += [repr(value) for value in constants if _is_simple(value)]
    return "\0".join([name, source, *values])


def _qualified_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def _is_simple(value: object) -> bool:
    return isinstance(value, int | float | str | None)
