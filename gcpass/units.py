"""Bytes as text: the units that gcpass reads, and the form in which it prints.

kB, MB, GB and TB are powers of 1000; KiB, MiB, GiB and TiB are powers of 1024. The
prefix letter may have either case (``kB`` is ``KB``, ``giB`` is ``GiB``); the ``i``
and the ``B`` may not, because ``Gb`` commonly means gigabit.
"""

from __future__ import annotations

import difflib

_BYTES_PER_UNIT = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
UNITS = tuple(_BYTES_PER_UNIT)

_PRINTED_UNITS = ("KiB", "MiB", "GiB", "TiB")


def bytes_per_unit(unit: str) -> int | None:
    """Return the bytes in one ``unit``, None when it is no unit.

    >>> bytes_per_unit("GB"), bytes_per_unit("giB"), bytes_per_unit("potatoes")
    (1000000000, 1073741824, None)
    """
    return _BYTES_PER_UNIT.get(_canonical(unit))


def nearest_unit(unit: str) -> str | None:
    """Return the valid unit that looks most like ``unit``, None when none does.

    >>> nearest_unit("gib"), nearest_unit("potatoes")
    ('GiB', None)
    """
    by_folded = {known.casefold(): known for known in UNITS}
    near = difflib.get_close_matches(unit.casefold(), by_folded, n=1)
    return by_folded[near[0]] if near else None


def format_bytes(size_bytes: int) -> str:
    """Return a size for people, in powers of 1024.

    >>> format_bytes(123), format_bytes(1536), format_bytes(-(2**30))
    ('123 B', '1.50 KiB', '-1.00 GiB')
    """
    if abs(size_bytes) < 1024:
        return f"{size_bytes} B"
    amount = float(size_bytes)
    for unit in _PRINTED_UNITS:
        amount /= 1024
        if abs(round(amount, 2)) < 1024:  # rounded: "1024.00 KiB" is never printed
            return f"{amount:.2f} {unit}"
    return f"{amount:.2f} {_PRINTED_UNITS[-1]}"


def _canonical(unit: str) -> str:
    if len(unit) < 2:
        return unit
    prefix = unit[0].upper()
    return ("k" if prefix == "K" and unit[1:] == "B" else prefix) + unit[1:]
