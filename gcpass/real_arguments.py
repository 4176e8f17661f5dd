"""Arguments of a call, described for a table and made real for a run."""

from __future__ import annotations

from typing import Any

import torch

from gcpass.sizes import Reader, hint_int

__all__ = ["describe", "plain", "real"]


def describe(value: Any, read: Reader = hint_int) -> object:
    """Return what tells calls apart whose run takes other time or memory.

    Args:
        value: an argument; of tensors layout, dtype and device count.
        read: gives a symbolic size as an int.
    """
    if isinstance(value, torch.Tensor):
        shape = tuple(read(s) for s in value.shape)
        stride = tuple(read(s) for s in value.stride())
        return (shape, stride, str(value.dtype), value.device.type)
    if isinstance(value, (list, tuple)):
        return tuple(describe(item, read) for item in value)
    if isinstance(value, dict):
        return tuple((k, describe(v, read)) for k, v in sorted(value.items()))
    return repr(plain(value, read))


def real(value: Any, read: Reader = hint_int) -> Any:
    """Return real arguments of the same layout, filled with zeros."""
    if isinstance(value, torch.Tensor):
        shape = [read(s) for s in value.shape]
        stride = [read(s) for s in value.stride()]
        device, dtype = value.device, value.dtype
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
    if isinstance(value, (list, tuple)):
        return type(value)(real(item, read) for item in value)
    if isinstance(value, dict):
        return {k: real(v, read) for k, v in value.items()}
    return plain(value, read)


def plain(value: Any, read: Reader = hint_int) -> Any:
    """Return a number for a symbolic one, without adding a guard; else the value."""
    if isinstance(value, torch.SymInt):
        return read(value)
    if isinstance(value, torch.SymFloat):
        return 1.0
    if isinstance(value, torch.SymBool):
        return True
    return value
