"""Text that identifies a user's function, the same in every process."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

__all__ = ["function_text"]


def function_text(function: Callable[..., Any]) -> str:
    """Return what a function is made of: source, defaults, and what it closes over.

    Byte code stands in where the source is out of reach. Arguments of a partial and
    attributes of a callable object count, and an object with a method ``uuid`` counts
    by that alone. Globals that a function reads do not count, and of arrays and other
    objects that keep their state out of ``__dict__`` the type alone does.
    """
    return _text(function, ())


def _text(value: object, outer: tuple[object, ...]) -> str:
    """Return a value's text; `outer` is what it is part of, for what holds itself."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if any(value is other for other in outer):
        return "itself"
    outer = (*outer, value)
    uuid = getattr(value, "uuid", None)
    if callable(uuid) and not isinstance(value, type):
        return f"{_name(type(value))} {uuid()!r}"
    if isinstance(value, Mapping):
        items = ((_text(k, outer), _text(v, outer)) for k, v in value.items())
        return f"{{{sorted(items)}}}"
    if isinstance(value, set | frozenset):
        return f"{{{sorted(_text(item, outer) for item in value)}}}"
    if isinstance(value, list | tuple):
        return f"[{[_text(item, outer) for item in value]}]"
    if isinstance(value, functools.partial):
        parts: list[object] = [value.func, value.args, value.keywords]
    elif isinstance(value, MethodType):
        parts = [value.__func__, value.__self__]
    elif isinstance(value, FunctionType):
        return _function(value, outer)
    elif isinstance(value, type):
        return _name(value)
    else:
        parts = [getattr(value, "__dict__", None), type(value).__dict__.get("__call__")]
    return f"{_name(type(value))} {[_text(part, outer) for part in parts]}"


def _function(function: FunctionType, outer: tuple[object, ...]) -> str:
    inner = inspect.unwrap(function)
    if inner is not function and isinstance(inner, FunctionType):
        return _function(inner, outer)
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):  # typed in an interactive shell
        source = _code(function.__code__)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    values = [cells, function.__defaults__, function.__kwdefaults__]
    return "\0".join([_name(function), source, _text(values, outer)])


def _code(code: CodeType) -> str:
    inner = [_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()}{code.co_names}{inner}"


def _name(value: FunctionType | type) -> str:
    return f"{value.__module__}.{value.__qualname__}"
