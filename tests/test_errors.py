"""Errors: fields hold the data, messages say what to do, pickling keeps both."""

import copy
import pickle

import pytest

from gcpass import errors
from gcpass.errors import (
    GcpassError,
    GradientMismatchError,
    InfeasibleBudgetError,
    InfeasibleRegionError,
    InvalidOptionError,
    InvalidProblemError,
    MissingCompilerError,
    SolverError,
    UnsupportedGraphError,
    UnsupportedTorchError,
)

EXAMPLES = [
    GcpassError("a"),
    InvalidProblemError("b"),
    SolverError("c"),
    InfeasibleBudgetError(
        budget_bytes=1024, floor_bytes=4096, alive=["mm", "relu"], held_bytes=2048
    ),
    UnsupportedGraphError("effects meet", operations=["print_1", "print_2"]),
    InvalidOptionError("option 'x' is wrong", option="x"),
    UnsupportedTorchError("too old"),
    GradientMismatchError("1 of 2 tensors differ", mismatches=[("w", 0.5, 1e-5)]),
    MissingCompilerError(
        missing="C++ compiler", searched=["g++"], install="apt-get install g++"
    ),
    InfeasibleRegionError(
        region="head", budget_bytes=1024, floor_bytes=4096, alive=["mask"]
    ),
]


def test_every_error_has_an_example() -> None:
    assert {type(e).__name__ for e in EXAMPLES} == set(errors.__all__)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_pickling_keeps_message_and_fields(error: GcpassError) -> None:
    copies = [pickle.loads(pickle.dumps(error, p)) for p in range(6)]
    for twin in [*copies, copy.deepcopy(error)]:
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)


def test_infeasible_budget_says_what_to_do() -> None:
    message = str(EXAMPLES[3])
    assert "1024 bytes (1.00 KiB)" in message
    assert "4096 bytes (4.00 KiB)" in message
    assert "hold 2048 bytes" in message
    assert "mm, relu" in message
    assert "memory_budget=4096 or more" in message
    assert 'on_infeasible="min"' in message


def test_infeasible_budget_leaves_out_what_is_empty() -> None:
    message = str(InfeasibleBudgetError(budget_bytes=1, floor_bytes=2))
    assert "Earlier regions" not in message
    assert "Alive" not in message


def test_unsupported_graph_names_the_first_operations() -> None:
    names = [f"op_{i}" for i in range(10)]
    error = UnsupportedGraphError("too odd", operations=names)
    assert error.operations == tuple(names)
    assert "op_7 and 2 more." in str(error)
    assert "op_8" not in str(error)
    assert "more" not in str(UnsupportedGraphError("too odd", operations=names[:8]))


def test_invalid_option_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="wrong"):
        raise EXAMPLES[5]
