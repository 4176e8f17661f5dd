"""Arguments of a call, described for a table and made real for a run."""

from __future__ import annotations

from typing import Any

import torch

from gcpass.sizes import hint_int

__all__ = ["describe", "plain", "real"]


def describe(value: Any) -> object:
    """Return what tells calls apart whose run takes other time or memory.

    Args:
        value: an argument; of tensors layout, dtype and device count.
    """
    if isinstance(value, torch.Tensor):
        shape = tuple(hint_int(s) for s in value.shape)
        stride = tuple(hint_int(s) for s in value.stride())
        return (shape, stride, str(value.dtype), value.device.type)
    if isinstance(value, (list, tuple)):
        return tuple(describe(item) for item in value)
    if isinstance(value, dict):
        return tuple((k, describe(v)) for k, v in sorted(value.items()))
    return repr(plain(value))


def real(value: Any) -> Any:
    """Return real arguments of the same layout, filled with zeros."""
    if isinstance(value, torch.Tensor):
        shape = [hint_int(s) for s in value.shape]
        stride = [hint_int(s) for s in value.stride()]
        device, dtype = value.device, value.dtype
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
    if isinstance(value, (list, tuple)):
        return type(value)(real(item) for item in value)
    if isinstance(value, dict):
        return {k: real(v) for k, v in value.items()}
    return plain(value)


def plain(value: Any) -> Any:
    """Return a number for a symbolic one, without adding a guard; else the value."""
    if isinstance(value, torch.SymInt):
        return hint_int(value)
    if isinstance(value, torch.SymFloat):
        return 1.0
    if isinstance(value, torch.SymBool):
        return True
    return value
