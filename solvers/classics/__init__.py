"""The classic methods of the literature, behind one interface, to compare and teach.

Each takes a problem and a limit of the peak in bytes (None: no limit) and returns a
`gcpass.solvers.problem.Solution`: INFEASIBLE without a plan when the method has none
within the limit, a plan that `gcpass.solvers.check` accepts otherwise. They work on
training problems and, through `gcpass.solvers.turn`, on plain sequences. What gcpass
plans with is `gcpass.solvers.solve`; of these it asks Revolve and rotor, where others
leave a gap.
"""

from __future__ import annotations

from collections.abc import Callable

from gcpass.solvers.classics.checkmate import checkmate
from gcpass.solvers.classics.fixed import min_cut, store_everything
from gcpass.solvers.classics.greedy import greedy
from gcpass.solvers.classics.knapsack import knapsack
from gcpass.solvers.classics.revolve import revolve
from gcpass.solvers.classics.rotor import rotor
from gcpass.solvers.classics.segments import per_segment, sqrt_l
from gcpass.solvers.problem import Problem, Solution

Method = Callable[[Problem, int | None], Solution]

METHODS: dict[str, Method] = {
    "store_everything": store_everything,
    "per_segment": per_segment,
    "sqrt_l": sqrt_l,
    "revolve": revolve,
    "rotor": rotor,
    "greedy": greedy,
    "knapsack": knapsack,
    "min_cut": min_cut,
    "checkmate": checkmate,
}
