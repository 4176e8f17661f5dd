"""Compare the solver with the exact optimum on small random graphs.

    python examples/brute_force.py [--count 500] [--operations 10] [--moves 20000]

Budgets are the least possible peak, and one and two thirds of the way from there to
the peak of the given order. The exact search runs over states (executed, in memory);
a first execution is free, so it looks only at what costs no more extra time than the
optimum. Instances that take more states than the limit are skipped and counted.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import Counter

from gcpass.solvers.bound import floor_lower_bound_bytes
from gcpass.solvers.check import check
from gcpass.solvers.plain import given_peak_bytes, plain_sequence
from gcpass.solvers.problem import Problem
from gcpass.solvers.search import warm_up
from gcpass.solvers.solve import Planner

MOST_STATES = 400_000
ROWS = (
    "instances",
    "solved",
    "optimal",
    "above the optimum",
    "below the optimum",
    "below the bound",
    "bound above the optimum",
    "wrongly infeasible",
    "skipped",
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--operations", type=int, default=10)
    parser.add_argument("--moves", type=int, default=20_000)
    arguments = parser.parse_args()
    warm_up()
    total, thrice, gaps = Counter[str](), Counter[str](), list[float]()
    for seed in range(arguments.count):
        problem = random_graph(seed, arguments.operations)
        low, high = least_peak(problem), given_peak_bytes(problem)
        assert floor_lower_bound_bytes(problem) <= low
        for budget in sorted({low + (high - low) * k // 3 for k in range(3)}):
            found, repeated = compare(problem, budget, arguments.moves, gaps, seed)
            total.update(found)
            if repeated:
                thrice.update(found)
    print(f"{'':26}{'all':>8}{'3 or more':>12}  (executions that the optimum needs)")
    for row in ROWS:
        print(f"{row:26}{total[row]:8}{thrice[row]:12}")
    if gaps:
        print(f"extra time over the optimal plan: at most {100 * max(gaps):.2f} %")


def random_graph(seed: int, most_operations: int) -> Problem:
    """Return a graph of 5 operations or more; two of three are steps of training.

    In those the second half reads results of the first in reverse.
    """
    rng = random.Random(seed)
    count = rng.randint(5, most_operations)
    half, turns, edges = count // 2, seed % 3 > 0, list[tuple[int, int]]()
    for node in range(1, count):
        reads = {node - 1} if turns or rng.random() < 0.7 else set()
        if turns and node > half and rng.random() < 0.8:
            reads.add(max(0, 2 * half - node))
        chance = 0.15 if turns else 0.35
        reads |= {i for i in range(node - 1) if rng.random() < chance}
        edges += [(i, node) for i in sorted(reads)]
    sizes = [rng.randint(1, 3 if seed % 2 else 9) for _ in range(count)]
    costs = [float(rng.randint(1, 9)) for _ in range(count)]
    return plain_sequence(sizes, costs, edges, range(count))


def compare(
    problem: Problem, budget: int, moves: int, gaps: list[float], seed: int
) -> tuple[list[str], bool]:
    """Return the rows to count, and whether three executions are needed."""
    exact = optimum(problem, budget, len(problem.operations), None)
    if exact is None:
        return ["instances", "skipped"], False
    seconds, most = exact
    twice = optimum(problem, budget, 2, seconds) if most > 2 else exact
    repeated = twice is None or twice[0] > seconds
    solution = Planner(problem=problem, moves=moves).solve(budget)
    rows, plan = ["instances"], solution.plan
    if solution.bound_seconds > seconds + 1e-6 and plan is not None:
        rows.append("bound above the optimum")
    if plan is None:
        print(f"seed {seed}, budget {budget}: no plan, optimum {seconds}")
        return [*rows, "wrongly infeasible"], repeated
    check(problem, plan, budget)
    rows.append("solved")
    if plan.cost_seconds < solution.bound_seconds - 1e-6:
        rows.append("below the bound")
    if plan.cost_seconds == seconds:
        rows.append("optimal")
    else:
        above = plan.cost_seconds > seconds
        rows.append("above the optimum" if above else "below the optimum")
        gaps.append(plan.cost_seconds / seconds - 1)
        print(f"seed {seed}, budget {budget}: {plan.cost_seconds}, optimum {seconds}")
    return rows, repeated


def optimum(
    problem: Problem, budget: int, most: int, limit: float | None
) -> tuple[float, int] | None:
    """Return (least seconds, most executions of one operation) within a budget.

    Args:
        problem: a plain sequence where each operation writes one value.
        budget: bytes.
        most: executions of one operation allowed; all of them: no limit.
        limit: seconds above which there is no need to look, None: no limit.

    Returns:
        None when there is no such plan, or it took too many states.
    """
    size, reads, cost = _columns(problem)
    count, base = len(cost), sum(cost)
    capped = most < count
    start = (0, 0, (1,) * count if capped else ())  # executed, live, left to repeat
    best: dict[object, float] = {start: 0.0}
    way: dict[object, tuple[object, int]] = {}
    queue, order = [(0.0, 0, start)], 0
    while queue:
        extra, _, state = heapq.heappop(queue)
        if extra > best[state]:
            continue
        executed, live, left = state
        if executed == (1 << count) - 1:
            return base + extra, _most(way, state)
        if len(best) > MOST_STATES:
            return None
        for op in range(count):
            bit, again = 1 << op, executed >> op & 1
            if live & bit:  # dropping is free
                after, seconds, name = (executed, live & ~bit, left), extra, -1
            elif reads[op] & ~live or size[live | bit] > budget:
                continue
            elif again and capped and not left[op]:
                continue
            else:
                rest = left
                if again and capped:
                    rest = (*left[:op], left[op] - 1, *left[op + 1 :])
                after = (executed | bit, live | bit, rest)
                seconds, name = extra + cost[op] * again, op
            if limit is not None and base + seconds > limit:
                continue
            if seconds < best.get(after, float("inf")):
                best[after] = seconds
                way[after] = (state, name)
                order += 1
                heapq.heappush(queue, (seconds, -order, after))
    return None


def least_peak(problem: Problem) -> int:
    """Return the least peak of any plan, by the same search."""
    size, reads, cost = _columns(problem)
    best, queue = {(0, 0): 0}, [(0, 0, 0)]
    while queue:
        peak, executed, live = heapq.heappop(queue)
        executed = -executed
        if executed == (1 << len(cost)) - 1:
            return peak
        for op in range(len(cost)):
            bit = 1 << op
            after, needed = (executed, live & ~bit), peak
            if not live & bit:
                if reads[op] & ~live:
                    continue
                after = (executed | bit, live | bit)
                needed = max(peak, size[live | bit])
            if needed < best.get(after, 1 << 60):
                best[after] = needed
                heapq.heappush(queue, (needed, -after[0], after[1]))
    raise AssertionError("every order is a plan")


def _columns(problem: Problem) -> tuple[list[int], list[int], list[float]]:
    """Return the bytes of each set of values, what operations read, their seconds."""
    size = [0]
    for value in problem.values:
        size += [value.size_bytes + below for below in size]
    reads = [sum(1 << v for v in op.reads) for op in problem.operations]
    return size, reads, [op.cost_seconds for op in problem.operations]


def _most(way: dict[object, tuple[object, int]], state: object) -> int:
    """Return how often the operation that runs most often does."""
    times = Counter[int]()
    while state in way:
        state, name = way[state]
        times[name] += name >= 0
    return max(times.values(), default=0)


if __name__ == "__main__":
    main()
