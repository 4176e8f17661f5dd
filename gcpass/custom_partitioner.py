"""The partitioner as Inductor knows it: a callable that is part of its cache keys."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from gcpass.cost import cost_registry_fingerprint
from gcpass.errors import GcpassError
from gcpass.options import Options
from gcpass.partition import partition
from gcpass.regions import scopes_fingerprint
from gcpass.solvers.shares import Share
from gcpass.torch_private import CustomPartitionerFn

# Inductor asks a partitioner for its cache key before there is a graph.
NO_REGIONS = (
    'regions need torch.compile(..., backend="gcpass"): compile caches would not tell '
    "them apart where Inductor is the backend"
)


class Partitioner(CustomPartitionerFn):
    """Immutable: it is copied and pickled into Inductor's cache keys.

    Args:
        options: the user's.
        share: of a step with several executions, None where this one is alone.
        scopes: `scopes_fingerprint` of the graph to come, None if it is not known.
        counting: see `gcpass.partition.partition`.
    """

    def __init__(
        self,
        options: Options,
        share: Share | None = None,
        scopes: str | None = None,
        *,
        counting: bool = False,
    ) -> None:
        self._options = options
        self._share = share
        self._scopes = scopes
        self._counting = counting
        self._fingerprint = _fingerprint(
            options, share, scopes or "", "counting" * counting
        )

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **arguments: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split the joint graph, see `gcpass.partition.partition`."""
        if self._scopes is None and scopes_fingerprint(gm, ()):
            raise GcpassError(NO_REGIONS)
        return partition(
            gm,
            joint_inputs,
            self._options,
            self._share,
            counting=self._counting,
            num_fwd_outputs=arguments["num_fwd_outputs"],
            static_lifetime_input_indices=arguments.get(
                "static_lifetime_input_indices"
            ),
        )

    def uuid(self) -> str:
        """Return what identifies every decision of this partitioner."""
        return self._fingerprint

    def __reduce__(self) -> tuple[Any, ...]:
        return (str, (self._fingerprint,))

    def __deepcopy__(self, memo: object) -> Partitioner:
        return self


def _fingerprint(options: Options, *parts: object) -> str:
    """Return a digest of everything that decides a plan besides the graph."""
    digest = hashlib.sha256()
    for part in (
        options.fingerprint(),
        *map(repr, parts),
        _source_digest(),
        cost_registry_fingerprint(),
        torch.__version__,
        str(os.cpu_count()),
    ):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _source_digest() -> str:
    """Return a digest of gcpass's own sources: another version, another plan."""
    global _sources
    if not _sources:
        digest = hashlib.sha256()
        root = Path(__file__).parent
        for folder in (root, root / "solvers", root / "solvers" / "classics"):
            for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*.json")):
                digest.update(path.name.encode())
                digest.update(path.read_bytes())
        _sources = digest.hexdigest()
    return _sources


_sources = ""
