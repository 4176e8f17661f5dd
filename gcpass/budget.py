"""The grammar of ``memory_budget``, an upper limit on the peak memory of a step.

========================  =====================================================
``None``, ``"none"``      no limit
``12884901888``           bytes, an int above 0; the same digits as text
``"12GiB"``, ``"800 kB"`` bytes, a number and a unit (see `gcpass.units`)
``0.5``, ``"0.5"``        fraction in (0, 1] of the peak of the fastest plan
``"60%"``                 the same in percent
``"min"``                 the least reachable peak
``"auto"``                what the device has free, less a reserve
========================  =====================================================

Text with a decimal point is a fraction and text without one is bytes: ``"1.0"`` is
the whole peak, ``"1"`` is one byte. A float above 1 is refused rather than taken for
bytes. Words have either case; spaces around number and unit do not count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeAlias

from gcpass.errors import InvalidOptionError
from gcpass.units import UNITS, bytes_per_unit, nearest_unit

_TEXT = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))\s*(%|[a-z]*)", re.ASCII | re.I)
_LARGEST_BYTES = 2**63 - 1  # solvers count bytes in signed 64-bit integers
_FORMS = (
    'an int (bytes), text with a unit ("12GiB"), a float in (0, 1] (fraction of the '
    'fastest plan\'s peak), "min", "auto" or None'
)


@dataclass(frozen=True, slots=True)
class Unlimited:
    """No limit: the fastest plan."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """At most ``size_bytes`` (1 or more)."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class Fraction:
    """At most ``of_peak`` (in (0, 1]) times the peak of the fastest plan."""

    of_peak: float


@dataclass(frozen=True, slots=True)
class Minimum:
    """The least reachable peak."""


@dataclass(frozen=True, slots=True)
class Auto:
    """What the device has free when the region is first compiled, less a reserve."""


Budget: TypeAlias = Unlimited | Bytes | Fraction | Minimum | Auto

_WORDS: dict[str, Budget] = {"none": Unlimited(), "min": Minimum(), "auto": Auto()}


def parse_budget(value: object, *, option: str = "memory_budget") -> Budget:
    """Return what ``value`` means by the grammar above.

    Args:
        value: the budget as the user wrote it.
        option: name of the option or environment variable, for the message.

    Raises:
        InvalidOptionError: ``value`` is not in the grammar; says what is.
    """
    if value is None:
        return Unlimited()
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _error(option, value, f"takes {_FORMS}")
    if isinstance(value, str):
        return _parse_text(value, option)
    if isinstance(value, int):
        return _bytes(value, value, option)
    return _fraction(value, value, option)


def _parse_text(text: str, option: str) -> Budget:
    word = _WORDS.get(text.strip().casefold())
    if word is not None:
        return word
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise _error(option, text, f"takes {_FORMS}")
    digits, unit = match.groups()
    number = Decimal(digits)
    if unit == "%":
        return _fraction(float(number / 100), text, option)
    if unit:
        return _bytes(int(number * _unit_size(unit, text, option)), text, option)
    if "." in digits:
        return _fraction(float(number), text, option)
    return _bytes(int(number), text, option)


def _unit_size(unit: str, text: str, option: str) -> int:
    size = bytes_per_unit(unit)
    if size is None:
        near = nearest_unit(unit)
        hint = f"did you mean {near!r}? Units" if near else "units"
        raise _error(option, text, f"has no unit {unit!r}; {hint}: {', '.join(UNITS)}")
    return size


def _bytes(size_bytes: int, value: object, option: str) -> Bytes:
    if size_bytes < 1:
        raise _error(option, value, "must be at least 1 byte; None is no limit")
    if size_bytes > _LARGEST_BYTES:
        raise _error(option, value, "is more than 2**63 - 1 bytes; None is no limit")
    return Bytes(size_bytes)


def _fraction(of_peak: float, value: object, option: str) -> Fraction:
    if not 0.0 < of_peak <= 1.0:  # also refuses NaN
        raise _error(
            option,
            value,
            "is a fraction and must be in (0, 1]; for bytes use an int or text with a "
            'unit ("12GiB")',
        )
    return Fraction(of_peak)


def _error(option: str, value: object, problem: str) -> InvalidOptionError:
    return InvalidOptionError(
        f"option {option!r} {problem} (default None), got {value!r} "
        f"({type(value).__name__})",
        option=option,
    )
