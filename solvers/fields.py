"""Typed access to parsed JSON: every way to be wrong is a message with its place.

`json.loads` takes what JSON does not have (NaN, Infinity) and gives dictionaries of
anything; `parse` and `Record` turn that into checked numbers, text, flags and ids, or
raise. Why not pydantic: the solvers depend on numpy, networkx and ortools only, and an
instance of 30,000 operations is read in a second this way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import NoReturn, TypeGuard

from gcpass.solvers.errors import InvalidProblemError

_SHOWN = 60  # characters of a wrong value in a message


def parse(text: str) -> object:
    """Return the content of a JSON document.

    Raises:
        InvalidProblemError: the text is no JSON, or holds NaN or Infinity.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidProblemError(f"no JSON: {error}") from error


class Record:
    """A JSON object at a place of a document ("operations[3]")."""

    def __init__(
        self, data: object, place: str, known: Collection[str] | None = None
    ) -> None:
        """Take a JSON object.

        Args:
            data: a parsed value.
            place: where it stands, for messages; "" for the whole document.
            known: names of its fields; None: further ones are of no interest.

        Raises:
            InvalidProblemError: ``data`` is no object, or has a field that is not
                known.
        """
        self.place = place
        if not isinstance(data, dict):
            self._fail("an object", data)
        self.data: dict[str, object] = data
        if known is None:
            return
        for name in self.data:
            if name not in known:
                raise InvalidProblemError(
                    f"{self._at(name)}: unknown field; there are {', '.join(known)}"
                )

    def get(self, name: str) -> object:
        """Return a field that must be there."""
        if name not in self.data:
            raise InvalidProblemError(f"{self._at(name)}: missing")
        return self.data[name]

    def integer(self, name: str, default: int | None = None, least: int = 0) -> int:
        """Return an integer of at least ``least``; required without a default."""
        if default is not None and name not in self.data:
            return default
        value = self.get(name)
        if not is_integer(value) or value < least:
            self._fail(f"an integer >= {least}", value, name)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number >= 0 as a float; required without a default."""
        if default is not None and name not in self.data:
            return default
        value = self.get(name)
        number = as_float(value)
        if number is None or number < 0:
            self._fail("a finite number >= 0", value, name)
        return number

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = self.data.get(name, default)
        if not isinstance(value, bool):
            self._fail("true or false", value, name)
        return value

    def text(self, name: str) -> str:
        """Return a string that must be there."""
        value = self.get(name)
        if not isinstance(value, str):
            self._fail("text", value, name)
        return value

    def choice(
        self, name: str, choices: Collection[str], default: str | None = None
    ) -> str:
        """Return one of several strings; required without a default."""
        if default is not None and name not in self.data:
            return default
        value = self.get(name)
        if not isinstance(value, str) or value not in choices:
            self._fail(f"one of {', '.join(choices)}", value, name)
        return value

    def array(self, name: str) -> list[object]:
        """Return an array that must be there."""
        value = self.get(name)
        if not isinstance(value, list):
            self._fail("an array", value, name)
        return value

    def ids(self, name: str, count: int | None) -> list[int]:
        """Return an array of ids in [0, count); None: any id from 0 on."""
        found: list[int] = []
        for i, value in enumerate(self.array(name)):
            if not is_integer(value) or value < 0:
                self._fail("an id >= 0", value, f"{name}[{i}]")
            if count is not None and value >= count:
                self._fail(f"an id in [0, {count})", value, f"{name}[{i}]")
            found.append(value)
        return found

    def _at(self, name: str) -> str:
        return ".".join(part for part in (self.place, name) if part)

    def _fail(self, expected: str, value: object, name: str = "") -> NoReturn:
        place = self._at(name) or "document"
        raise InvalidProblemError(f"{place}: expected {expected}, got {shown(value)}")


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def as_float(value: object) -> float | None:
    """Return a number as a float, None for what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def shown(value: object) -> str:
    """Return a value as it stands in a message, shortened."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
