"""The choices of a cut problem along the price of a byte, and the bound they prove.

For a price lam the minimum cut is a point (saved bytes, seconds) on the lower convex
hull of all choices, and ``dual(lam) - lam * cap`` is a lower bound on the seconds of
every choice within a cap. Two neighbouring points are two lines over lam; where they
cross lies the next price to try: M. Eisner and D. Severance, J. ACM 23(4), 1976,
doi:10.1145/321978.321982.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from gcpass.solvers.cut import CutProblem, CutResult

MAX_FLOWS = 40  # per frontier; more breakpoints are closer than plans can be built
MAX_STEPS = 40  # prices per cap; 3 to 10 suffice on transformers and CNNs


@dataclass(slots=True, eq=False)
class Frontier:
    """Points of one cut problem, found as caps ask for them.

    Attributes:
        network: the cut problem.
        points: choices found, from the most saved bytes to the fewest.
    """

    network: CutProblem
    points: list[CutResult] = field(init=False)
    _lines: list[tuple[float, float]] = field(init=False)  # (lam, dual seconds)
    _closed: set[tuple[int, int]] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        more, less = self.network.fastest(), self.network.least()
        self.points = [] if more is None or less is None else [more]
        self._lines = [] if more is None else [(0.0, more.dual_seconds)]
        if more is not None and less is not None:
            if less.saved_bytes < more.saved_bytes:
                self.points.append(less)

    def can_fit(self, cap_bytes: int) -> bool:
        """Whether some choice saves at most `cap_bytes`."""
        return bool(self.points) and self.points[-1].saved_bytes <= cap_bytes

    def bound(
        self, cap_bytes: int, *, enough: float = 0.0, precision: float = 0.0
    ) -> float:
        """Return seconds that every choice within the cap takes at least.

        Args:
            cap_bytes: a cap that some choice fits.
            enough: stop where no price can prove more than this.
            precision: seconds that are not worth another price.
        """
        self._refine(cap_bytes, enough, precision)
        return self._proven(cap_bytes)

    def neighbours(
        self, cap_bytes: int, *, precision: float = 0.0
    ) -> tuple[CutResult, CutResult]:
        """Return the cheapest choice known to fit a cap, and the next that does not.

        When all fit both are the same. Raises nothing: some choice must fit.
        """
        self._refine(cap_bytes, 0.0, precision)
        at = self._first_fitting(cap_bytes)
        return self.points[max(0, at - 1)], self.points[at]

    def _first_fitting(self, cap_bytes: int) -> int:
        fits = (i for i, p in enumerate(self.points) if p.saved_bytes <= cap_bytes)
        return next(fits)

    def _proven(self, cap_bytes: int) -> float:
        lines = (dual - lam * cap_bytes for lam, dual in self._lines)
        return max(0.0, *lines) if self._lines else 0.0

    def _refine(self, cap_bytes: int, enough: float, precision: float) -> None:
        """Add points until the two around the cap are neighbours on the hull."""
        for _ in range(MAX_STEPS):
            at = self._first_fitting(cap_bytes)
            if at == 0:
                return
            more, less = self.points[at - 1], self.points[at]
            pair = (more.saved_bytes, less.saved_bytes)
            lam = crossing(more, less)
            limit = more.cost_seconds + lam * (more.saved_bytes - cap_bytes)
            proven = self._proven(cap_bytes)
            if pair in self._closed or limit <= max(proven, enough) + precision:
                return
            middle = self.network.solve(lam)
            assert middle is not None, "another choice was found before"
            self._lines.append((lam, middle.dual_seconds))
            better = cost_at(middle, lam) < cost_at(more, lam) - precision
            if better and _strictly_between(more, middle, less):
                self.points.insert(at, middle)
            else:
                self._closed.add(pair)


def cost_at(choice: CutResult, lam: float) -> float:
    """Return the seconds of a choice when a saved byte costs `lam`."""
    return choice.cost_seconds + lam * choice.saved_bytes


def frontier(
    network: CutProblem,
    *,
    cap_lo: int = 0,
    cap_hi: int | None = None,
    flows: int = MAX_FLOWS,
) -> list[CutResult]:
    """Return choices along the price, from the one that saves most to the least.

    These are vertices of the lower convex hull of (saved bytes, cost), with those of
    the two ends. Where `flows` does not suffice the widest gaps are refined first.

    Args:
        network: the cut problem.
        cap_lo: bytes; pairs of neighbours that both save less are not refined.
        cap_hi: bytes; likewise for pairs that both save more; None: no limit.
        flows: number of minimum cuts to compute at most.
    """
    ends = [network.fastest(), network.least()]
    chain = [result for result in ends if result is not None]
    done: set[tuple[int, int]] = set()
    for _ in range(flows - len(ends)):
        gap = _widest_gap(chain, done, cap_lo, cap_hi)
        if gap is None:
            break
        left, right = chain[gap], chain[gap + 1]
        done.add((left.saved_bytes, right.saved_bytes))
        middle = network.solve(crossing(left, right))
        if middle is not None and _strictly_between(left, middle, right):
            chain.insert(gap + 1, middle)
    if len(chain) == 2 and chain[0].saved_bytes == chain[1].saved_bytes:
        chain.pop()
    return chain


def crossing(more: CutResult, less: CutResult) -> float:
    """Return the price per byte at which the two choices cost the same."""
    saved_bytes = more.saved_bytes - less.saved_bytes
    return max(0.0, less.cost_seconds - more.cost_seconds) / saved_bytes


def _widest_gap(
    chain: Sequence[CutResult],
    done: set[tuple[int, int]],
    cap_lo: int,
    cap_hi: int | None,
) -> int | None:
    best, best_area = None, 0.0
    for i, (left, right) in enumerate(itertools.pairwise(chain)):
        if left.saved_bytes <= cap_lo or (left.saved_bytes, right.saved_bytes) in done:
            continue
        if cap_hi is not None and right.saved_bytes > cap_hi:
            continue
        width = left.saved_bytes - right.saved_bytes
        area = width * (right.cost_seconds - left.cost_seconds)
        if area > best_area:
            best, best_area = i, area
    return best


def _strictly_between(left: CutResult, middle: CutResult, right: CutResult) -> bool:
    return left.saved_bytes > middle.saved_bytes > right.saved_bytes
