"""One frozen options object, validated where the user's options come in.

`parse_options` takes what ``torch.compile(options=...)`` hands over: the options of
gcpass by name, and any other name as an option of Inductor, passed through after a
check. Dashes are underscores, as in Inductor. Nothing is dropped silently: a
misspelt name or an ill-typed value raises, naming the nearest valid option.

Torch-free: the names and defaults of Inductor's options come from the caller.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo

from gcpass.budget import Budget, Minimum, parse_budget
from gcpass.errors import InvalidOptionError
from gcpass.function_text import function_text
from gcpass.scopes import Scope, parse_patterns
from gcpass.units import format_bytes

__all__ = ["Budget", "Options", "format_bytes", "parse_budget", "parse_options"]

_ENVIRONMENT = {"memory_budget": "GCPASS_MEMORY_BUDGET", "dump": "GCPASS_DUMP_DIR"}

_RESERVED = {
    "guard_filter_fn": "torch.compile reads it itself",
    "use_aoti": "torch.compile reads it itself",
    "custom_partitioner_fn": "gcpass sets it; use gcpass.partitioner to combine passes",
}


class Options(BaseModel):
    """What the user asked for. Equal options have equal fingerprints, and vice versa.

    Attributes:
        memory_budget: upper limit on the peak memory of a step, see `gcpass.budget`.
        calls_per_step: how often a step runs each compiled region, where that is known
            before the first step: its layers are compiled one by one, say.
        on_infeasible: under the floor, raise ("error") or take the floor ("min").
        solver: every method and the best plan ("auto"), Lagrangian cut and integer
            program only ("min_cut"), or eviction only ("greedy").
        time_limit_s: seconds that solving one region may take, above 0.
        dump: folder for the decisions of every region, None for no dump.
        codegen: build the graphs with Inductor, or run them operation by operation.
        verify: read the peak of the generated program and solve again when it is
            over the budget.
        check_gradients: compare the first step of every region with eager.
        cost_model: what prices operations: the device's rates ("roofline"), times
            measured on it ("profile"), or a function that takes a node of the joint
            graph and returns the seconds of one execution, None for the roofline's.
        strict: raise when a solver fails, instead of falling back with a warning.
        regions: limits and policies by module path, see `gcpass.scopes`.
        mode: as in ``torch.compile(mode=...)``.
        inductor: options for Inductor, (name, value), by name.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    memory_budget: int | float | str | None = None
    calls_per_step: int = Field(default=1, ge=1)
    on_infeasible: Literal["error", "min"] = "error"
    solver: Literal["auto", "min_cut", "greedy"] = "auto"
    time_limit_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    dump: str | None = None
    codegen: Literal["inductor", "eager"] = "inductor"
    verify: bool = True
    check_gradients: bool = False
    cost_model: Literal["roofline", "profile"] | Callable[..., Any] = Field(
        default="roofline",
        description="'roofline', 'profile' or a function of a node",
    )
    strict: bool = False
    regions: tuple[Scope, ...] = Field(
        default=(), description='{"pattern": "save" or {"memory_budget": 0.1}}'
    )
    mode: Literal[
        "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    ] = "default"
    inductor: tuple[tuple[str, object], ...] = ()

    @field_validator("memory_budget", mode="before")
    @classmethod
    def _check_budget(cls, value: object) -> object:
        parse_budget(value)
        return value

    @field_validator("regions", mode="before")
    @classmethod
    def _check_regions(cls, value: object) -> object:
        return parse_patterns(value)

    @property
    def budget(self) -> Budget:
        """What `memory_budget` means."""
        return parse_budget(self.memory_budget)

    @property
    def takes_floor(self) -> bool:
        """Whether the floor is taken where the budget is below it."""
        return self.on_infeasible == "min" or isinstance(self.budget, Minimum)

    def fingerprint(self) -> str:
        """Return 64 hexadecimal digits, the same in every process for equal options.

        Two spellings of one budget are equal. Objects among Inductor's options count
        by their ``uuid()`` or their qualified name; Inductor's own cache key covers
        them in full.
        """
        content: dict[str, object] = dict(self)
        content["memory_budget"] = repr(self.budget)
        content["regions"] = repr(self.regions)
        if callable(self.cost_model):
            content["cost_model"] = function_text(self.cost_model)
        text = json.dumps(_canonical(content), separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    # Compared by fingerprint: field by field, a budget of 1 (byte) would equal 1.0
    # (the whole peak), and lists among Inductor's options would not hash.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Options):
            return NotImplemented
        return self.fingerprint() == other.fingerprint()

    def __hash__(self) -> int:
        return hash(self.fingerprint())


_OWN = {k: v for k, v in Options.model_fields.items() if k != "inductor"}


def parse_options(
    options: Mapping[str, object] | None,
    *,
    mode: str | None = None,
    inductor_keys: Callable[[], Mapping[str, object]],
    environ: Mapping[str, str] = os.environ,
) -> Options:
    """Return the validated options; ``options`` is not changed.

    Args:
        options: as the user gave them, None for none.
        mode: as the user gave it to ``torch.compile``, None for none.
        inductor_keys: returns the default value of each of Inductor's options, by
            name. Called only when a name is none of gcpass's own.
        environ: defaults for the budget (``GCPASS_MEMORY_BUDGET``) and the dump
            folder (``GCPASS_DUMP_DIR``); an explicit option wins, None included.

    Raises:
        InvalidOptionError: a name is unknown, reserved or given twice, or a value is
            not one that its option takes.
    """
    given = _with_underscores(options or {})
    if mode is not None:
        if "mode" in given:
            raise InvalidOptionError(
                "mode is given both to torch.compile and in options; give it once",
                option="mode",
            )
        given["mode"] = mode
    own = {name: value for name, value in given.items() if name in _OWN}
    foreign = {name: value for name, value in given.items() if name not in _OWN}
    if isinstance(own.get("dump"), os.PathLike):
        own["dump"] = os.fspath(own["dump"])  # type: ignore[call-overload]
    defaults = _environment_defaults(environ)
    inductor = _check_inductor(foreign, inductor_keys()) if foreign else ()
    try:
        return Options.model_validate({**defaults, **own, "inductor": inductor})
    except ValidationError as error:
        raise _explain(error) from None


def _with_underscores(options: Mapping[str, object]) -> dict[str, object]:
    given: dict[str, object] = {}
    for key, value in options.items():
        name = str(key).replace("-", "_")
        if name in given:
            raise InvalidOptionError(f"option {name!r} is given twice", option=name)
        if name in _RESERVED:
            raise InvalidOptionError(
                f"option {name!r} is reserved: {_RESERVED[name]}", option=name
            )
        given[name] = value
    return given


def _environment_defaults(environ: Mapping[str, str]) -> dict[str, object]:
    texts = {name: environ.get(variable) for name, variable in _ENVIRONMENT.items()}
    found: dict[str, object] = {n: t for n, t in texts.items() if t and t.strip()}
    if "memory_budget" in found:  # here, so that the message names the variable
        parse_budget(found["memory_budget"], option=_ENVIRONMENT["memory_budget"])
    return found


def _check_inductor(
    foreign: Mapping[str, object], defaults: Mapping[str, object]
) -> tuple[tuple[str, object], ...]:
    for name, value in foreign.items():
        if name not in defaults:
            raise _unknown(name, defaults)
        if not _fits(value, defaults[name]):
            default = defaults[name]
            raise _ill_typed(name, type(default).__name__, default, value)
    return tuple(sorted(foreign.items()))


def _fits(value: object, default: object) -> bool:
    """Return whether an option of Inductor takes ``value``, judged by its default.

    None always passes: Inductor declares several options as "int or None", which a
    default of 2 does not show. So does everything where the default is None.
    """
    if value is None or default is None:
        return True
    if isinstance(value, bool) or isinstance(default, bool):
        return type(value) is type(default)
    if isinstance(default, float):
        return isinstance(value, int | float)
    if isinstance(default, list | tuple):
        return isinstance(value, list | tuple)
    return isinstance(value, type(default))


def _explain(error: ValidationError) -> InvalidOptionError:
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidOptionError):
        return cause
    name = str(first["loc"][0])
    field, value = _OWN[name], first["input"]
    choices = [str(choice) for choice in get_args(field.annotation)]
    near = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return _ill_typed(name, _expected(field), field.default, value, hint)


def _ill_typed(
    name: str, expected: str, default: object, value: object, hint: str = ""
) -> InvalidOptionError:
    return InvalidOptionError(
        f"option {name!r} takes {expected} (default {default!r}), got {value!r} "
        f"({type(value).__name__}){hint}",
        option=name,
    )


def _unknown(name: str, inductor: Mapping[str, object]) -> InvalidOptionError:
    public = [key for key in inductor if not key.startswith("_")]
    near = difflib.get_close_matches(name, _OWN, n=1)
    near = near or difflib.get_close_matches(name, public, n=1)
    if not near:
        known = f"gcpass has {', '.join(_OWN)}, and takes Inductor's options"
    elif near[0] in _OWN:
        field = _OWN[near[0]]
        known = (
            f"did you mean {near[0]!r} ({_expected(field)}, default {field.default!r})?"
        )
    else:
        default = inductor[near[0]]
        known = (
            f"did you mean Inductor's {near[0]!r} ({type(default).__name__}, default "
            f"{default!r})?"
        )
    return InvalidOptionError(f"unknown option {name!r}; {known}", option=name)


def _expected(field: FieldInfo) -> str:
    annotation = field.annotation
    if field.description:
        return field.description
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(annotation))
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return f"{name} above 0" if field.metadata else name


def _canonical(value: object) -> object:
    """Return plain data that tells options apart and is the same in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return [type(value).__name__, repr(value)]
    if isinstance(value, Mapping):
        return sorted(
            ([str(k), _canonical(v)] for k, v in value.items()), key=json.dumps
        )
    if isinstance(value, set | frozenset):
        return sorted((_canonical(item) for item in value), key=json.dumps)
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    uuid = getattr(value, "uuid", None)
    identity = uuid() if callable(uuid) and not isinstance(value, type) else None
    named = value if hasattr(value, "__qualname__") else type(value)
    return [named.__module__, named.__qualname__, repr(identity)]
