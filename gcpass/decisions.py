"""What was decided for a region, and why: plain data, JSON, one line for the log.

The JSON form is versioned and described by ``decisions.schema.json``. Bytes, seconds,
peak, floor, overhead, bound and gap mean what they mean everywhere in gcpass: the peak
counts what a step allocates beyond what was alive when its forward started.

Loads no torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from gcpass.budget import Bytes, parse_budget
from gcpass.errors import GcpassError, InfeasibleBudgetError, InvalidOptionError
from gcpass.size_function import (
    MOST_SIZE,
    largest_value,
    size_function,
)
from gcpass.solvers.problem import Plan
from gcpass.units import format_bytes

__all__ = ["Decision", "PlannedSymbol", "RegionPlan", "ScopeDecision", "ValueDecision"]
__all__ += ["plan_digest"]

SCHEMA_VERSION: Final = 1

MOST_SEARCHED = 8
"""Symbols of a plan whose largest values are looked for in the compile."""

QUICK_EFFORT = 200_000
"""Of these searches together, see `MOST_EFFORT`: a fifth of a second's work."""

MOST_NAMED = 3
"""Symbols in the line for the log."""

FUNCTION_ERRORS = (GcpassError, RecursionError, ArithmeticError, TypeError, KeyError)
"""What making or evaluating a function of sizes may raise."""

log = logging.getLogger(__name__)

Decision = Literal["saved", "recomputed", "temporary", "output", "gradient", "input"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDecision:
    """What happens to one value (a storage) of the joint graph.

    Attributes:
        name: of the node that owns the storage.
        module_path: innermost module that computes it ("transformer.h.0.mlp"); "" for
            the outermost module and where it is unknown.
        source: the user's line that computes it ("gpt2/modeling_gpt2.py:123"), ""
            where it is unknown.
        shape: sizes; a symbolic size is text. () for what is no tensor.
        dtype: "float32"; "" for what is no tensor.
        size_bytes: bytes it takes while it is materialized.
        flops: of one execution of its operation, 0 without one.
        cost_seconds: of one execution of its operation, 0 without one.
        decision: "saved": kept from the forward for the backward; "recomputed":
            computed in the backward although the forward did or could compute it;
            "temporary": used by one of the two only; "output" and "gradient": leave
            the region; "input": comes from outside, tangents included.
        reason: why, for people.
        recompute_positions: indices in the plan's sequence of its executions after the
            first. The first is among them where the backward runs it although the
            forward could.
        symbolic_size_bytes: `size_bytes` as a function of the plan's symbols; "" where
            none decides or the function is unknown.
        symbolic_flops: `flops` likewise.
    """

    name: str
    module_path: str
    source: str
    shape: tuple[int | str, ...]
    dtype: str
    size_bytes: int
    flops: int
    cost_seconds: float
    decision: Decision
    reason: str
    recompute_positions: tuple[int, ...]
    symbolic_size_bytes: str = ""
    symbolic_flops: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeDecision:
    """What became of one ``gcpass.region`` or pattern, see `gcpass.scopes`.

    Attributes:
        name: the user's name for it, or the pattern or module path; "" without one.
        requested: the limit or the policy in words.
        limit_bytes: the limit on the bytes it saves, None for a policy.
        fastest_saved_bytes: what it saves without a budget and regions.
        saved_bytes: what it saves; outputs do not count.
    """

    name: str
    requested: str
    limit_bytes: int | None
    fastest_saved_bytes: int
    saved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSymbol:
    """A size, or another number, for which one plan serves several values.

    Attributes:
        name: torch's, "s77".
        planned: the value that the plan was made for.
        source: where it comes from ("L['x'].size()[0]"), "" for a size that only
            running the program tells.
        least: its lower bound as known after planning, None without one. Outside of
            its bounds torch compiles, and gcpass plans, anew.
        most: its upper bound likewise.
        largest: the largest value at which the predicted peak is within the region's
            budget, the other symbols as planned; None without a budget, where no value
            or every one is, and where finding it takes long (`RegionPlan.largest`).
    """

    name: str
    planned: int
    source: str
    least: int | None
    most: int | None
    largest: int | None = None

    def between(self) -> tuple[int, int]:
        """Return the least and the largest value to look at."""
        least = min(0, self.planned) if self.least is None else self.least
        return least, MOST_SIZE if self.most is None else self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlan:
    """The plan of one compiled region, in numbers, and what it does to each value.

    Plans are equal when they decide the same: times and the cache do not count.

    Attributes:
        schema_version: of the JSON form.
        region: the compile id, "0/0".
        requested: the budget as the user wrote it.
        budget_bytes: this region's share of it, None for no limit.
        others_bytes: held meanwhile by other executions of regions in the same step.
        executions: how often a step runs the region.
        fastest_peak_bytes: peak of the fastest plan without a budget.
        fastest_held_bytes: what that plan holds between forward and backward.
        floor_bytes: the least peak that gcpass reaches.
        predicted_peak_bytes: peak of the plan.
        scheduled_peak_bytes: peak of the program that will run, None if unknown.
        scheduled_note: why it is unknown, "" when it is known.
        saved_bytes: of the values kept from the forward for the backward.
        held_bytes: alive between forward and backward: saved values and outputs.
        overhead: predicted step time over that of the fastest plan, minus 1.
        overhead_flops: the same for FLOPs.
        bound: no plan within the budget has less overhead (proven).
        gap_points: percentage points between `overhead` and `bound`.
        solver: name of the method that built the plan.
        termination: why the solver stopped.
        limit: the limit that stopped it, None if none did.
        rounds: how often a generated program was read.
        solve_time_s: seconds spent on planning.
        verify_time_s: seconds spent on reading generated programs.
        recomputations: executions beyond the first of each operation.
        digest: equal on all ranks and processes that decided the same.
        from_cache: a compile cache answered; the plan was made earlier.
        symbolic_peak_bytes: `predicted_peak_bytes` as a function of the symbols, in
            sympy's notation; the number where there are none, "" where it is unknown.
        symbolic_flops: of one step with this plan, likewise.
        symbolic_note: why the functions are unknown, "" where they are not.
        symbols: the sizes that may change without another plan, and what they were.
        scopes: parts with a limit or a policy, in the order of the joint graph.
        values: in the order of the joint graph.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    region: str
    requested: str
    budget_bytes: int | None
    others_bytes: int
    executions: int
    fastest_peak_bytes: int
    fastest_held_bytes: int
    floor_bytes: int
    predicted_peak_bytes: int
    scheduled_peak_bytes: int | None
    scheduled_note: str
    saved_bytes: int
    held_bytes: int
    overhead: float
    overhead_flops: float
    bound: float
    gap_points: float
    solver: str
    termination: str
    limit: str | None
    rounds: int
    solve_time_s: float = field(compare=False)
    verify_time_s: float = field(compare=False)
    recomputations: int
    digest: str
    from_cache: bool = field(default=False, compare=False)
    symbolic_peak_bytes: str = ""
    symbolic_flops: str = ""
    symbolic_note: str = ""
    symbols: tuple[PlannedSymbol, ...] = ()
    scopes: tuple[ScopeDecision, ...] = ()
    values: tuple[ValueDecision, ...]

    @property
    def peak_bytes(self) -> int:
        """The peak that counts: the scheduled one where it is known."""
        if self.scheduled_peak_bytes is None:
            return self.predicted_peak_bytes
        return self.scheduled_peak_bytes

    @property
    def step_peak_bytes(self) -> int:
        """The peak of the step while the region runs."""
        return self.others_bytes + self.peak_bytes

    def peak_at(self, **sizes: int) -> int:
        """Return the predicted peak at other sizes, in bytes.

        Args:
            sizes: of symbols, by name ("s77"); the others are as planned.

        Raises:
            InvalidOptionError: there is no such symbol, or its range excludes the size.
            GcpassError: the peak as a function of sizes is unknown, and why.
        """
        return self._at(self.symbolic_peak_bytes, sizes)

    def flops_at(self, **sizes: int) -> int:
        """Return the FLOPs of a step with this plan at other sizes, see `peak_at`."""
        return self._at(self.symbolic_flops, sizes)

    def largest(self, symbol: str, budget: int | str) -> int:
        """Return the largest value of a symbol at which this plan keeps to a budget.

        What counts is the region's predicted peak; `others_bytes` are not in it.

        Args:
            symbol: its name; the other symbols are as planned.
            budget: bytes, or text like "12GiB".

        Raises:
            InvalidOptionError: there is no such symbol, the budget is not in bytes, or
                every value keeps to it.
            InfeasibleBudgetError: no value in the symbol's range keeps to it.
            GcpassError: the peak as a function of sizes is unknown, and why, or the
                search was given up after about a second.
        """
        limit = parse_budget(budget, option="budget")
        if not isinstance(limit, Bytes):
            raise InvalidOptionError(f"budget {budget!r} is not bytes", option="budget")
        chosen = self._symbol(symbol)
        found = self._largest(chosen, limit.size_bytes)
        if found is None:
            least = {chosen.name: chosen.between()[0]}
            raise InfeasibleBudgetError(
                budget_bytes=limit.size_bytes, floor_bytes=self.peak_at(**least)
            )
        if found == MOST_SIZE:
            raise InvalidOptionError(
                f"no largest {symbol}: at {MOST_SIZE}, too, the peak keeps to "
                f"{budget!r}",
                option="symbol",
            )
        return found

    def with_largest(self) -> RegionPlan:
        """Return the plan with `PlannedSymbol.largest` found where that is quick."""
        if self.budget_bytes is None or not self.symbolic_peak_bytes:
            return self
        if len(self.symbols) > MOST_SEARCHED:
            return self
        symbols = tuple(
            dataclasses.replace(s, largest=self._quick_largest(s, self.budget_bytes))
            for s in self.symbols
        )
        return dataclasses.replace(self, symbols=symbols)

    def _quick_largest(self, symbol: PlannedSymbol, limit: int) -> int | None:
        effort = QUICK_EFFORT // len(self.symbols)
        try:
            found = self._largest(symbol, limit, effort)
        except FUNCTION_ERRORS:
            log.debug("no largest %s", symbol.name, exc_info=True)
            return None
        return None if found == MOST_SIZE else found

    def _largest(
        self, symbol: PlannedSymbol, limit: int, effort: int | None = None
    ) -> int | None:
        function = size_function(self._known(self.symbolic_peak_bytes))
        others = {s.name: s.planned for s in self.symbols if s is not symbol}
        return largest_value(
            function, symbol.name, others, limit, symbol.between(), effort
        )

    def _at(self, text: str, sizes: Mapping[str, int]) -> int:
        for name, size in sizes.items():
            symbol = self._symbol(name)
            least, most = symbol.between()
            if not least <= size <= most:
                end = f"least {least}" if size < least else f"most {most}"
                raise InvalidOptionError(
                    f"{name} is at {end} where this plan is used, got {size}; other "
                    "sizes are planned anew",
                    option=name,
                )
        planned = {symbol.name: symbol.planned for symbol in self.symbols}
        return size_function(self._known(text)).at({**planned, **sizes})

    def _symbol(self, name: str) -> PlannedSymbol:
        for symbol in self.symbols:
            if symbol.name == name:
                return symbol
        names = [f"{s.name} ({s.source})" for s in self.symbols]
        known = f"has {', '.join(names)}" if names else "is for static sizes"
        raise InvalidOptionError(f"no symbol {name!r}: the plan {known}", option=name)

    def _known(self, text: str) -> str:
        if not text:
            why = self.symbolic_note or "an earlier release wrote this plan"
            raise GcpassError(f"unknown as a function of sizes: {why}")
        return text

    def as_cached(self, region: str | None = None) -> RegionPlan:
        """Return the plan marked as found in a cache.

        Args:
            region: the compile id in this process; None keeps the recorded one.
        """
        return dataclasses.replace(
            self, from_cache=True, region=self.region if region is None else region
        )

    def summary(self) -> str:
        """Return one line for the log."""
        kind = "predicted" if self.scheduled_peak_bytes is None else "scheduled"
        return ", ".join(
            [
                f"region {self.region}: requested {self.requested}{self._share()}",
                f"{kind} peak {format_bytes(self.peak_bytes)}",
                f"floor {format_bytes(self.floor_bytes)}",
                f"overhead {100 * self.overhead:.1f} % "
                f"(at most {self.gap_points:.1f} points from optimal)",
                f"{self.recomputations} recomputations",
                *self._ranges(),
                f"solved in {self.solve_time_s:.1f} s by {self.solver}"
                f"{' (from the cache)' * self.from_cache}",
            ]
        )

    def _ranges(self) -> list[str]:
        ranges = [self._range(symbol) for symbol in self.symbols[:MOST_NAMED]]
        more = len(self.symbols) - len(ranges)
        return [*ranges, f"and {more} more sizes"] if more else ranges

    @staticmethod
    def _range(symbol: PlannedSymbol) -> str:
        most = "" if symbol.largest is None else f" (at most {symbol.largest})"
        return f"for {symbol.name} = {symbol.planned}{most}"

    def _share(self) -> str:
        if self.budget_bytes is None:
            return ""
        share = f" = {format_bytes(self.budget_bytes)}"
        if self.others_bytes:
            share += f" beside {format_bytes(self.others_bytes)} of others in the step"
        return share

    def to_json(self) -> str:
        """Return the JSON form, fields in the order above, one line per value.

        Raises:
            ValueError: a number is not finite.
        """
        fields = [
            f"  {_json(n)}: {_json(v)}"
            for n, v in _items(self)
            if n not in ("symbols", "scopes", "values")
        ]
        for name, rows in (("symbols", self.symbols), ("scopes", self.scopes)):
            fields.append(f'  "{name}": {_json([dict(_items(row)) for row in rows])}')
        values = ",\n".join(f"    {_json(dict(_items(v)))}" for v in self.values)
        fields.append(f'  "values": [\n{values}\n  ]')
        return "{\n" + ",\n".join(fields) + "\n}\n"

    @staticmethod
    def from_json(text: str) -> RegionPlan:
        """Return the plan that `to_json` wrote; unknown fields are ignored.

        Raises:
            GcpassError: the text is no plan, or one of another schema version.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise GcpassError(f"no decisions of gcpass: {error}") from error
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version is None:
            raise GcpassError("no decisions of gcpass: there is no schema_version")
        if version != SCHEMA_VERSION:
            raise GcpassError(
                f"decisions of schema version {version!r}; this gcpass reads version "
                f"{SCHEMA_VERSION}: use the release that wrote them"
            )
        return _validated(text)


def plan_digest(plan: Plan, names: Sequence[str]) -> str:
    """Return 64 hexadecimal digits, equal in every process for equal decisions.

    Args:
        plan: its sequence and boundary count.
        names: of the saved nodes, in graph order.
    """
    content = json.dumps([plan.boundary, list(plan.sequence), list(names)])
    return hashlib.sha256(content.encode()).hexdigest()


def _items(
    data: RegionPlan | PlannedSymbol | ScopeDecision | ValueDecision,
) -> Iterator[tuple[str, Any]]:
    return ((f.name, getattr(data, f.name)) for f in dataclasses.fields(data))


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def _validated(text: str) -> RegionPlan:
    from pydantic import TypeAdapter, ValidationError  # slow to load, rarely needed

    try:
        return TypeAdapter(RegionPlan).validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise GcpassError(
            f"no decisions of gcpass: {place}: {first['msg']}, got {first['input']!r}"
        ) from error
