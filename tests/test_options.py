"""Options: the budget's grammar, names and types, defaults, identity."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gcpass.budget import Auto, Budget, Bytes, Fraction, Minimum, Unlimited
from gcpass.errors import InvalidOptionError
from gcpass.options import Options, parse_budget, parse_options
from gcpass.units import UNITS, bytes_per_unit, format_bytes

INDUCTOR = {
    "max_autotune": False,
    "compile_threads": 2,
    "epsilon": 0.5,
    "cpp.cxx": (None, "g++"),
    "post_grad_custom_pre_pass": None,
    "_hidden_memory_budgets": 1,
}


def parse(
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
    **environ: str,
) -> Options:
    return parse_options(
        options, mode=mode, inductor_keys=lambda: INDUCTOR, environ=environ
    )


def message_of(options: Mapping[str, object], **environ: str) -> str:
    with pytest.raises(InvalidOptionError) as caught:
        parse(options, **environ)
    return str(caught.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, Unlimited()),
        ("none", Unlimited()),
        (1, Bytes(1)),
        (2**40, Bytes(2**40)),
        ("1", Bytes(1)),  # text without a decimal point is bytes
        (" 1073741824 ", Bytes(2**30)),
        ("512MiB", Bytes(512 * 2**20)),
        ("12GB", Bytes(12 * 10**9)),
        ("1.5 GiB", Bytes(3 * 2**29)),
        ("800 kB", Bytes(800_000)),
        ("800 KB", Bytes(800_000)),
        ("2kiB", Bytes(2048)),
        ("123B", Bytes(123)),
        (".5TiB", Bytes(2**39)),
        ("0.7 B", None),
        (0.5, Fraction(0.5)),
        (1.0, Fraction(1.0)),
        ("0.5", Fraction(0.5)),
        ("1.0", Fraction(1.0)),
        ("60%", Fraction(0.6)),
        ("100 %", Fraction(1.0)),
        ("min", Minimum()),
        ("MIN", Minimum()),
        ("auto", Auto()),
    ],
)
def test_budget(value: object, expected: Budget | None) -> None:
    if expected is None:
        with pytest.raises(InvalidOptionError):
            parse_budget(value)
    else:
        assert parse_budget(value) == expected


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (0, "at least 1 byte"),
        (-1, "at least 1 byte"),
        (2**63, "2\\*\\*63 - 1"),
        (0.0, "in \\(0, 1\\]"),
        (-0.5, "in \\(0, 1\\]"),
        (1.5, "for bytes use an int or text with a unit"),
        (12e9, "for bytes use an int or text with a unit"),
        (float("nan"), "in \\(0, 1\\]"),
        (float("inf"), "in \\(0, 1\\]"),
        (True, "got True \\(bool\\)"),
        ([1], "got \\[1\\] \\(list\\)"),
        ("", "takes an int"),
        ("lots", "takes an int"),
        ("nan", "takes an int"),
        ("1e9", "did you mean|no unit|takes an int"),
        ("-5GiB", "at least 1 byte"),
        ("0", "at least 1 byte"),
        ("150%", "in \\(0, 1\\]"),
        ("2.0", "in \\(0, 1\\]"),
        ("12 potatoes", "no unit 'potatoes'; units: B, kB, MB"),
        ("12gb", "did you mean 'GB'"),
        ("12 GBytes", "no unit 'GBytes'"),
    ],
)
def test_budget_errors_name_value_and_remedy(value: object, says: str) -> None:
    with pytest.raises(InvalidOptionError, match=says) as caught:
        parse_budget(value)
    assert "memory_budget" in str(caught.value)
    assert "default None" in str(caught.value)
    assert repr(value) in str(caught.value)
    assert caught.value.option == "memory_budget"


@given(st.integers(1, 2**20), st.sampled_from(UNITS), st.sampled_from(["", " "]))
def test_whole_numbers_of_units_are_exact(number: int, unit: str, space: str) -> None:
    size = bytes_per_unit(unit)
    assert size is not None
    assert parse_budget(f"{number}{space}{unit}") == Bytes(number * size)


@given(st.integers(-(2**60), 2**60))
def test_formatted_bytes_are_within_rounding(size_bytes: int) -> None:
    number, unit = format_bytes(size_bytes).split(" ")
    scale = bytes_per_unit(unit)
    assert scale is not None
    # Half of the last printed digit; a float holds 53 bits of larger sizes.
    assert abs(float(number) * scale - size_bytes) <= 0.00501 * scale
    assert abs(float(number)) < 1024 or unit == "TiB"


def test_format_bytes_never_prints_1024_of_a_unit() -> None:
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(2**20 - 1) == "1.00 MiB"


def test_defaults() -> None:
    assert parse() == parse({}) == Options()
    assert Options().budget == Unlimited()
    assert Options().mode == "default"


def test_own_and_foreign_names_part_and_the_input_stays() -> None:
    given = {
        "memory-budget": 0.5,
        "max-autotune": True,
        "cpp.cxx": ["clang++"],
        "compile_threads": None,
    }
    before = dict(given)
    options = parse(given, mode="max-autotune")
    assert given == before
    assert options.budget == Fraction(0.5)
    assert options.mode == "max-autotune"
    assert options.inductor == (
        ("compile_threads", None),
        ("cpp.cxx", ["clang++"]),
        ("max_autotune", True),
    )


def test_inductor_is_asked_only_for_foreign_names() -> None:
    def fail() -> Mapping[str, object]:
        raise AssertionError("asked")

    options = {"memory_budget": "min", "dump": Path("plan")}
    parsed = parse_options(options, inductor_keys=fail, environ={})
    assert parsed.dump == "plan"
    with pytest.raises(AssertionError, match="asked"):
        parse_options({"max_autotune": True}, inductor_keys=fail, environ={})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"memory-buget": 1},
            "unknown option 'memory_buget'; did you mean 'memory_budget' "
            "(int | float | str | None, default None)?",
        ),
        (
            {"max_autotun": True},
            "unknown option 'max_autotun'; did you mean Inductor's 'max_autotune' "
            "(bool, default False)?",
        ),
        ({"zzz": 1}, "unknown option 'zzz'; gcpass has memory_budget, calls_per_step"),
        ({"_hidden_memory_budget": 1}, "unknown option '_hidden_memory_budget'"),
        ({"inductor": ()}, "unknown option 'inductor'"),
        (
            {"solver": "mincut"},
            "option 'solver' takes one of 'auto', 'min_cut', 'greedy' (default "
            "'auto'), got 'mincut' (str); did you mean 'min_cut'?",
        ),
        ({"on_infeasible": None}, "one of 'error', 'min' (default 'error'), got None"),
        ({"calls_per_step": 0}, "takes int above 0 (default 1), got 0 (int)"),
        ({"calls_per_step": 2.0}, "takes int above 0 (default 1), got 2.0 (float)"),
        ({"time_limit_s": 0}, "float above 0 (default 60.0), got 0 (int)"),
        ({"time_limit_s": float("inf")}, "float above 0 (default 60.0), got inf"),
        ({"time_limit_s": True}, "float above 0 (default 60.0), got True (bool)"),
        ({"time_limit_s": "5"}, "float above 0 (default 60.0), got '5' (str)"),
        ({"verify": 1}, "option 'verify' takes bool (default True), got 1 (int)"),
        ({"dump": 3}, "option 'dump' takes str | None (default None), got 3 (int)"),
        ({"mode": "fast"}, "option 'mode' takes one of 'default', 'reduce-overhead'"),
        ({"max_autotune": 1}, "'max_autotune' takes bool (default False), got 1 (int)"),
        ({"compile_threads": True}, "takes int (default 2), got True (bool)"),
        ({"compile_threads": "2"}, "takes int (default 2), got '2' (str)"),
        ({"epsilon": "x"}, "takes float (default 0.5), got 'x' (str)"),
        ({"cpp.cxx": "g++"}, "takes tuple (default (None, 'g++')), got 'g++' (str)"),
        ({"guard_filter_fn": None}, "reserved: torch.compile reads it itself"),
        ({"use-aoti": True}, "reserved: torch.compile reads it itself"),
        ({"custom_partitioner_fn": None}, "reserved: gcpass sets it"),
        ({"a-b": 1, "a_b": 2}, "option 'a_b' is given twice"),
    ],
)
def test_option_errors(options: Mapping[str, object], says: str) -> None:
    assert says in message_of(options)


def test_a_mode_is_given_once() -> None:
    with pytest.raises(InvalidOptionError, match="give it once"):
        parse({"mode": "default"}, mode="default")


def test_an_int_is_taken_for_a_float_and_anything_for_no_default() -> None:
    assert parse({"time_limit_s": 3}).time_limit_s == 3.0
    assert parse({"epsilon": 1}).inductor == (("epsilon", 1),)
    assert parse({"post_grad_custom_pre_pass": print}).inductor


def test_environment_gives_defaults_only() -> None:
    environ = {"GCPASS_MEMORY_BUDGET": "60%", "GCPASS_DUMP_DIR": "plans"}
    assert parse(None, None, **environ).budget == Fraction(0.6)
    assert parse(None, None, **environ).dump == "plans"
    explicit = parse({"memory_budget": None, "dump": None}, None, **environ)
    assert explicit == Options()
    assert parse(None, None, GCPASS_MEMORY_BUDGET=" ", GCPASS_DUMP_DIR="") == Options()


def test_environment_error_names_the_variable() -> None:
    message = message_of({}, GCPASS_MEMORY_BUDGET="12 potatoes")
    assert "GCPASS_MEMORY_BUDGET" in message


def test_identity_tells_one_byte_from_the_whole_peak() -> None:
    assert Options(memory_budget=1) != Options(memory_budget=1.0)
    assert Options(memory_budget="1KiB") == Options(memory_budget=1024)
    assert hash(Options(memory_budget="1KiB")) == hash(Options(memory_budget=1024))
    assert Options() != "options"


def test_fingerprint_changes_with_every_option() -> None:
    changed: list[dict[str, object]] = [
        {},
        {"memory_budget": 0.5},
        {"calls_per_step": 2},
        {"on_infeasible": "min"},
        {"solver": "greedy"},
        {"time_limit_s": 1.0},
        {"dump": "plan"},
        {"codegen": "eager"},
        {"verify": False},
        {"check_gradients": True},
        {"strict": True},
        {"cost_model": "profile"},
        {"regions": {"a": "save", "b": "recompute"}},
        {"regions": {"b": "recompute", "a": "save"}},  # the first that matches wins
        {"regions": {"a": {"memory_budget": 0.5}}},
        {"mode": "max-autotune"},
        {"max_autotune": True},
        {"max_autotune": False},
        {"compile_threads": 1},
        {"cpp.cxx": ("1",)},
        {"cpp.cxx": (1,)},
    ]
    assert len({parse(c).fingerprint() for c in changed}) == len(changed)
    assert {name for c in changed for name in c} >= set(Options.model_fields) - {
        "inductor"
    }


def test_fingerprint_is_the_same_in_every_process() -> None:
    passes: list[object] = [{"b", "a", "c"}, {"y": 1, "x": [2]}, len, Path]
    options = parse({"memory_budget": "2GiB", "cpp.cxx": passes})
    code = (
        "import sys; from pathlib import Path; from gcpass.options import *; "
        "print(Options(memory_budget=2**31, inductor=(('cpp.cxx', "
        "[{'c', 'b', 'a'}, {'x': [2], 'y': 1}, len, Path]),)).fingerprint())"
    )
    for seed in ("1", "2"):
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.strip() == options.fingerprint()


def test_fingerprint_asks_an_object_for_its_uuid() -> None:
    class Pass:
        def __init__(self, key: bytes) -> None:
            self.key = key

        def uuid(self) -> bytes:
            return self.key

    def fingerprint(key: bytes) -> str:
        return parse({"post_grad_custom_pre_pass": Pass(key)}).fingerprint()

    assert fingerprint(b"1") == fingerprint(b"1")
    assert fingerprint(b"1") != fingerprint(b"2")


def test_options_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Options().verify = False  # type: ignore[misc]
