"""Methods without a knob: they have one plan, and it fits or it does not.

- **store everything**: no recomputation, what frameworks do by default. Only what the
  problem forbids to save is recomputed.
- **minimum cut**: the fastest plan. Where fusion makes saving a value dearer than
  computing it again inside the reading kernel, or values have cheap sources, the
  cheapest cut between forward and backward recomputes although memory is free.
  Horace He and Shangdi Yu, "Transcending Runtime-Memory Tradeoffs in Checkpointing by
  being Fusion Aware", MLSys 2023. Without a toll on saving it stores everything.

Neither looks at the budget.
"""

from __future__ import annotations

from gcpass.solvers.classics.choose import cheapest_of, solution, trivial_bound_seconds
from gcpass.solvers.classics.emit import everything, saving
from gcpass.solvers.cut import boundary_cut
from gcpass.solvers.errors import SolverError
from gcpass.solvers.problem import Problem, Solution
from gcpass.solvers.turn import turned


def store_everything(problem: Problem, budget_bytes: int | None) -> Solution:
    """Return the plan without recomputation, INFEASIBLE when its peak is too high.

    Raises:
        SolverError: the constraints exclude every plan.
    """
    step = turned(problem)
    saved = everything(step.training)
    plan = saving(step, saved, "store everything")
    return cheapest_of(problem, (plan,), budget_bytes)


def min_cut(problem: Problem, budget_bytes: int | None) -> Solution:
    """Return the fastest plan, INFEASIBLE when its peak is too high.

    The bound is that of the cut: no plan, of any peak, costs less. For a plain
    sequence, which has no boundary to cut, it is the trivial one.

    Raises:
        SolverError: the constraints exclude every plan, or ortools is missing.
    """
    step = turned(problem)
    cut = boundary_cut(step.training).fastest()
    if cut is None:
        raise SolverError("no set of saved values satisfies the constraints")
    plan = saving(step, frozenset(cut.saved), "minimum cut")
    fits = budget_bytes is None or plan.peak_bytes <= budget_bytes
    bound = trivial_bound_seconds(problem) + (0.0 if step.plain else cut.dual_seconds)
    return solution(problem, plan if fits else None, plan.peak_bytes, bound)
