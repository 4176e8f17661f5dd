"""The edited timeline against simulation from scratch, and the network under it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from gcpass.solvers.check import check
from gcpass.solvers.edit import can_remove, insert, place_all, place_with_gap, remove
from gcpass.solvers.liveness import make_plan, simulate
from gcpass.solvers.moment import needed_operations
from gcpass.solvers.network import NONE, IntArray, Network, Numbering, network_of
from gcpass.solvers.problem import OpId, Origin, Phase, Problem
from gcpass.solvers.timeline import (
    BARRED_BYTES,
    Timeline,
    at_or_before,
    can_run,
    empty_slot,
    last_read,
    new_timeline,
    next_read,
    peak_bytes,
    peak_slot,
    sequence_of,
    total_cost,
)
from tests.problems import Builder, random_plain, random_problem

SLOTS = 256
EDITS = 200  # tried, per problem
COLUMNS = (
    *("operation", "earlier", "later", "first", "times"),
    *("end", "virtual", "reach", "in_place", "peak", "added"),
)


def problems(count: int) -> list[Problem]:
    """Return plain sequences and training problems without and with fusion, in turn."""
    return [
        random_plain(seed, 4 + seed % 9)
        if seed % 4 == 0
        else random_problem(seed, 4 + seed % 25, fused=seed % 4 > 1)
        for seed in range(count)
    ]


def read_tangents_only(problem: Problem) -> bool:
    """Whether every tangent is read; one that is not has a test of its own."""
    readers = problem.readers()
    return all(
        value.origin is not Origin.TANGENT or readers[v]
        for v, value in enumerate(problem.values)
    )


def ready(problem: Problem) -> tuple[Network, Numbering, Timeline]:
    """Return a network, its numbering and the given order on a timeline."""
    net, numbering = network_of(problem)
    line = new_timeline(net, SLOTS)
    place_all(net, line, np.arange(len(net.cost), dtype=np.int64))
    return net, numbering, line


def bytes_at(line: Timeline, slot: int) -> int:
    """Return the bytes alive at a slot: the leaf and what was added above it."""
    node = slot + len(line.operation)
    total = int(line.peak[node])
    while node > 1:
        node //= 2
        total += int(line.added[node])
    return total


def occupied(line: Timeline) -> list[int]:
    return [int(s) for s in np.flatnonzero(line.operation != NONE)]


def assert_agrees(
    problem: Problem, net: Network, numbering: Numbering, line: Timeline
) -> None:
    """Compare every slot, the peak and the cost with a simulation, and the links."""
    numbers = sequence_of(line)
    sequence, boundary = numbering.sequence(numbers)
    profile = simulate(problem, sequence, boundary)
    plan = make_plan(problem, sequence, boundary, "test")
    values = problem.values
    barred = sum(
        x.saved and not values[x.value].savable and not values[x.value].held
        for x in profile.instances
    )
    if barred:
        assert BARRED_BYTES * barred <= peak_bytes(line) < BARRED_BYTES * (barred + 1)
    else:
        check(problem, plan, None)
        assert peak_bytes(line) == plan.peak_bytes == profile.peak_bytes
    slots = occupied(line)
    found = [bytes_at(line, slot) for slot in slots]
    if net.turn != NONE:
        at_turn = found.pop(boundary)
        assert at_turn // BARRED_BYTES == barred
    assert found == list(profile.memory_bytes)
    assert total_cost(net, line) == pytest.approx(profile.cost_seconds, rel=1e-12)
    highest = max(bytes_at(line, slot) for slot in range(SLOTS))
    assert bytes_at(line, peak_slot(line)) == peak_bytes(line) == highest
    assert all(bytes_at(line, s) < highest for s in range(peak_slot(line)))
    assert sorted(line.slots[: line.number[0]].tolist()) == slots
    assert all(line.slots[line.place[slot]] == slot for slot in slots)
    assert Counter(numbers.tolist()) == dict(enumerate(line.times.tolist()))


def state(line: Timeline) -> dict[str, IntArray]:
    """Return a copy of all columns but the order in which slots are listed."""
    return {name: getattr(line, name).copy() for name in COLUMNS}


def assert_same(before: dict[str, IntArray], line: Timeline) -> None:
    for name, column in before.items():
        np.testing.assert_array_equal(getattr(line, name), column, err_msg=name)


def try_edit(net: Network, line: Timeline, rng: random.Random) -> bool:
    """Insert, remove or shift an execution at random, when that is valid."""
    kind = rng.choice(("insert", "remove", "shift"))
    slot = rng.choice(occupied(line))
    op = int(line.operation[slot])
    if kind == "remove":
        if can_remove(net, line, slot):
            remove(net, line, slot)
            return True
        return False
    if kind == "insert":
        op = rng.randrange(len(net.cost))
    target = empty_slot(line, -1, 1 + rng.randrange(SLOTS))
    if target == NONE or op == net.turn or not can_run(net, line, target, op):
        return False
    if kind == "insert" and (net.once[op] or line.number[0] > SLOTS // 2):
        return False
    insert(net, line, target, op)
    if kind == "insert":
        return True
    if can_remove(net, line, slot):
        remove(net, line, slot)
        return True
    remove(net, line, target)
    return False


def test_edits_agree_with_simulation() -> None:
    edits = barred = 0
    for seed, problem in enumerate(problems(60)):
        if not read_tangents_only(problem):
            continue
        rng = random.Random(seed)
        net, numbering, line = ready(problem)
        assert_agrees(problem, net, numbering, line)
        for attempt in range(EDITS):
            if try_edit(net, line, rng):
                edits += 1
                barred += peak_bytes(line) >= BARRED_BYTES
                if attempt % 4 == 0:
                    assert_agrees(problem, net, numbering, line)
        assert_agrees(problem, net, numbering, line)
    assert edits > 2000
    assert barred > 100


@pytest.mark.parametrize("seed", [1038, 1342, 1795, 1801])
def test_what_is_written_in_place_follows_every_edit(seed: int) -> None:
    # Here a kernel comes to read through other virtual values, and nothing else moves;
    # with 1801 nothing can be virtual at all.
    largest = 3 if seed % 2 else 9
    problem = random_problem(seed, 4 + seed % 20, fused=True, largest_bytes=largest)
    rng = random.Random(seed)
    net, numbering, line = ready(problem)
    assert_agrees(problem, net, numbering, line)
    for _ in range(EDITS):
        if try_edit(net, line, rng):
            assert_agrees(problem, net, numbering, line)


def test_an_edit_and_its_reverse_leave_no_trace() -> None:
    reversed_edits = 0
    for seed, problem in enumerate(problems(45)):
        rng = random.Random(seed)
        net, _, line = ready(problem)
        for _ in range(EDITS // 2):
            before = state(line)
            slot, op = rng.randrange(SLOTS), rng.randrange(len(net.cost))
            if line.operation[slot] != NONE:
                if can_remove(net, line, slot):
                    op = int(line.operation[slot])
                    remove(net, line, slot)
                    insert(net, line, slot, op)
                    reversed_edits += 1
            elif op != net.turn and can_run(net, line, slot, op):
                insert(net, line, slot, op)
                remove(net, line, slot)
                reversed_edits += 1
            assert_same(before, line)
            try_edit(net, line, rng)
    assert reversed_edits > 1000


def test_placing_anew_gives_the_same_bytes() -> None:
    for seed, problem in enumerate(problems(30)):
        rng = random.Random(seed)
        net, _, line = ready(problem)
        for _ in range(EDITS):
            try_edit(net, line, rng)
        numbers = sequence_of(line)
        found = [bytes_at(line, slot) for slot in occupied(line)]
        other = new_timeline(net, 2 * SLOTS)
        place_all(net, other, numbers)
        assert [bytes_at(other, slot) for slot in occupied(other)] == found
        assert peak_bytes(other) == peak_bytes(line)
        assert total_cost(net, other) == total_cost(net, line)
        position, gap = rng.randrange(len(numbers)), 1 + rng.randrange(40)
        place_with_gap(net, line, numbers, position, gap)
        slots = occupied(line)
        np.testing.assert_array_equal(sequence_of(line), numbers)
        assert [bytes_at(line, slot) for slot in slots] == found
        assert slots[position] - (slots[position - 1] if position else NONE) > gap


def test_lookups_agree_with_a_scan() -> None:
    for seed, problem in enumerate(problems(24)):
        rng = random.Random(seed)
        net, _, line = ready(problem)
        for _ in range(EDITS):
            try_edit(net, line, rng)
        low, high = sorted(rng.sample(range(SLOTS), 2))
        for op in range(len(net.cost)):
            runs = [s for s in occupied(line) if line.operation[s] == op]
            assert line.first[op] == runs[0]
            before = [s for s in runs if s <= high]
            assert at_or_before(line, op, high) == max(before, default=NONE)
        for value in range(len(net.size)):
            readers = net.readers[net.readers_from[value] : net.readers_from[value + 1]]
            reads = [s for s in occupied(line) if line.operation[s] in readers]
            inside = [s for s in reads if low < s < high]
            assert last_read(net, line, value, low, high) == max(inside, default=low)
            after = [s for s in reads if s > low]
            assert next_read(net, line, value, low) == min(after, default=SLOTS)
        for slot in occupied(line):
            numbers = [int(line.operation[s]) for s in occupied(line) if s != slot]
            assert can_remove(net, line, slot) == is_complete(net, numbers)


def is_complete(net: Network, numbers: list[int]) -> bool:
    """Whether everything runs, and nothing before what it reads."""
    written: set[int] = set()
    for op in numbers:
        if not written.issuperset(
            net.writer[net.reads[net.reads_from[op] : net.reads_from[op + 1]]].tolist()
        ):
            return False
        written.add(op)
    return len(written) == len(net.cost)


@pytest.mark.parametrize("seed", range(60))
def test_a_network_is_its_problem(seed: int) -> None:
    problem = problems(60)[seed]
    net, numbering = network_of(problem)
    ops = problem.operations
    needed = needed_operations(problem)
    assert {o for o in numbering.operations if o != NONE} == needed
    for op_id, number in enumerate(numbering.operation_of):
        assert (number != NONE) == (op_id in needed)
        if number == NONE:
            continue
        assert numbering.operations[number] == op_id
        op = ops[op_id]
        assert net.cost[number] == op.cost_seconds
        assert net.workspace[number] == op.workspace_bytes
        assert net.once[number] == (not op.recomputable)
        reads = net.reads[net.reads_from[number] : net.reads_from[number + 1]].tolist()
        for value in op.reads:
            is_input = problem.values[value].origin is Origin.INPUT
            assert is_input or numbering.value_of[value] in reads
        writes = net.writes[net.writes_from[number] : net.writes_from[number + 1]]
        for value in op.writes:
            assert numbering.value_of[value] in writes
    for data, number in zip(problem.values, numbering.value_of, strict=True):
        if number != NONE:
            assert net.size[number] == data.size_bytes
            assert net.held[number] == data.held
    assert is_complete(net, list(range(len(net.cost))))
    assert net.size.sum() == sum(problem.values[v].size_bytes for v in kept(numbering))


def kept(numbering: Numbering) -> list[int]:
    return [v for v, number in enumerate(numbering.value_of) if number != NONE]


def random_order(
    net: Network, rng: random.Random, repeats: int, draws_first: bool
) -> list[int]:
    """Return a random sequence that the network's reads and `once` allow."""
    numbers: list[int] = []
    done: set[int] = set()
    while len(done) < len(net.cost):
        can = [
            op
            for op in range(len(net.cost))
            if (op not in done or (repeats > 0 and not net.once[op]))
            and done.issuperset(
                net.writer[
                    net.reads[net.reads_from[op] : net.reads_from[op + 1]]
                ].tolist()
            )
        ]
        drawing = [op for op in can if net.once[op] and op != net.turn]
        op = rng.choice(drawing if draws_first and drawing else can)
        repeats -= op in done
        done.add(op)
        numbers.append(op)
    return numbers


@pytest.mark.parametrize("draws_first", [False, True])
def test_a_sequence_of_the_network_is_a_plan_and_back(draws_first: bool) -> None:
    """Only values that must not cross may stand in the way, and those weigh much."""
    crossing = 0
    for seed in range(200):
        rng = random.Random(seed)
        problem = random_problem(seed, 5 + seed % 10)
        savable = replace(
            problem, values=tuple(replace(v, savable=True) for v in problem.values)
        )
        net, numbering = network_of(savable)
        numbers = random_order(net, rng, seed % 5, draws_first)
        array = np.array(numbers, dtype=np.int64)
        sequence, boundary = numbering.sequence(array)
        check(savable, make_plan(savable, sequence, boundary, "test"), None)
        np.testing.assert_array_equal(numbering.numbers(sequence, boundary), array)
        crossing += 0 < boundary < len(sequence)
    assert crossing > 100


def test_a_tangent_that_nothing_reads() -> None:
    """It is there between the two sides only: 9 bytes besides 2, then 2 and 1."""
    b = Builder()
    x, y = b.value(1, Origin.INPUT), b.value(2)
    b.run([x], [y], 1.0)
    b.value(9, Origin.TANGENT)
    b.run([y], [b.value(1, held=True)], 1.0, Phase.BACKWARD)
    problem = b.problem()
    net, numbering, line = ready(problem)
    sequence, boundary = numbering.sequence(sequence_of(line))
    assert make_plan(problem, sequence, boundary, "test").peak_bytes == 11
    assert peak_bytes(line) == 11
    assert net.turn == 1


def test_a_plain_sequence_has_no_turn() -> None:
    problem = random_plain(3)
    net, numbering = network_of(problem)
    assert net.turn == numbering.turn == NONE
    numbers = np.arange(len(net.cost), dtype=np.int64)
    assert numbering.sequence(numbers) == (tuple(OpId(int(i)) for i in numbers), 0)


def test_an_empty_problem_is_an_empty_network() -> None:
    net, numbering = network_of(Problem(operations=(), values=()))
    line = new_timeline(net, SLOTS)
    place_all(net, line, np.zeros(0, dtype=np.int64))
    assert peak_bytes(line) == 0
    assert total_cost(net, line) == 0.0
    assert numbering.sequence(sequence_of(line)) == ((), 0)


def test_three_repeats_by_hand() -> None:
    """a, b = f(a), c = g(b), a again, d = h(a, c): sizes 4, 2, 1, 8.

    a lives at step 1, dies behind b: 4, 6, 3, then a beside c 5, and 13 with d.
    """
    b = Builder()
    a, v, c, d = (b.value(k) for k in (4, 2, 1, 8))
    for reads, written in (([], a), ([a], v), ([v], c), ([a, c], d)):
        b.run(reads, [written], 1.0, Phase.BACKWARD)
    net, _ = network_of(b.problem())
    line = new_timeline(net, 64)
    place_all(net, line, np.arange(4, dtype=np.int64))
    assert [bytes_at(line, slot) for slot in occupied(line)] == [*(4, 6, 7, 13)]
    third, fourth = int(line.first[2]), int(line.first[3])
    insert(net, line, fourth - 1, 0)
    assert [bytes_at(line, s) for s in occupied(line)] == [*(4, 6, 3, 5, 13)]
    insert(net, line, third - 1, 0)  # nothing reads it before a runs again: 4 + 2
    assert [bytes_at(line, s) for s in occupied(line)] == [*(4, 6, 6, 3, 5, 13)]
    assert [can_remove(net, line, s) for s in occupied(line)] == [
        *(False, False, True, False, True, False)
    ]
