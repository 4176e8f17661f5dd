"""What the backend tells the partitioner, which Inductor calls in between."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass, field

from gcpass.decisions import RegionPlan
from gcpass.solvers.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the backend knows about a compilation that the graph does not say.

    Attributes:
        key: of the sidecar that shows the plan after a cache hit.
        made: plans made for it; none when a compile cache had the result.
        problems: the problem of each.
    """

    key: str
    made: list[RegionPlan] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


current_request: contextvars.ContextVar[Request | None] = contextvars.ContextVar(
    "gcpass_request", default=None
)
