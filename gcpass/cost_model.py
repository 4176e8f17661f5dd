"""Which prices a plan is made with: the option `cost_model`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import fx

from gcpass.cost import NodeCost, node_cost
from gcpass.errors import InvalidOptionError
from gcpass.hardware import Device
from gcpass.profiled import Profile

__all__ = ["CostModel", "Roofline", "cost_model_of"]


class CostModel(Protocol):
    """Prices the nodes of one region."""

    @property
    def device(self) -> Device:
        """Rates of the device that the region runs on."""

    def price(self, node: fx.Node, bytes_moved: int) -> NodeCost:
        """Return the cost of one execution of a node.

        Args:
            node: of the joint graph.
            bytes_moved: what it reads and writes in memory, see `node_cost`.
        """

    def save(self) -> None:
        """Keep what was found out for later processes."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """Prices from the device's rates alone, see `gcpass.cost`."""

    device: Device

    def price(self, node: fx.Node, bytes_moved: int) -> NodeCost:
        """Return the roofline's cost."""
        return node_cost(node, self.device, bytes_moved=bytes_moved)

    def save(self) -> None:
        """Nothing is found out."""


@dataclass(frozen=True, slots=True)
class UserModel(Roofline):
    """Prices from a user's function, the roofline's where that returns None."""

    seconds: Callable[[fx.Node], float | None]

    def price(self, node: fx.Node, bytes_moved: int) -> NodeCost:
        """Return the user's cost."""
        cost = node_cost(node, self.device, bytes_moved=bytes_moved)
        given = self.seconds(node)
        if given is None:
            return cost
        number = isinstance(given, int | float) and not isinstance(given, bool)
        if not number or not math.isfinite(given) or given < 0:
            raise InvalidOptionError(
                f"cost_model returned {given!r} for {node.name} ({node.target}); it "
                "returns seconds, at least 0, or None",
                option="cost_model",
            )
        return replace(cost, seconds=float(given))


def cost_model_of(option: Any, device: Device, torch_device: torch.device) -> CostModel:
    """Return what prices the nodes of a region.

    Args:
        option: "roofline", "profile", or a function of a node.
        device: the region's, as the table has it.
        torch_device: the same for torch, where "profile" measures.
    """
    if option == "roofline":
        return Roofline(device)
    if option == "profile":
        if torch_device.type not in ("cpu", "cuda"):
            raise InvalidOptionError(
                f"cost_model='profile' measures on cpu and cuda, not on {torch_device}",
                option="cost_model",
            )
        return Profile(nominal=device, torch_device=torch_device)
    return UserModel(device, option)
