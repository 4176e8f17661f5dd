"""Scopes: the operations to which ``gcpass.region`` or a path pattern applies.

"Region" is the user's word for them. In this code a region is what Dynamo hands over
at once, so what is marked in one is called a **scope**. All operations of a compiled
region that are marked with an equal scope share it, and its one limit; a name keeps
scopes apart that are equal otherwise.

Loads no torch: nodes are read by their attributes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from gcpass.budget import Bytes, Fraction, parse_budget
from gcpass.errors import InvalidOptionError
from gcpass.units import format_bytes

ANNOTATION = "gcpass.region"  # key in node.meta["custom"]

Policy = Literal["save", "recompute"]

_POLICIES: Mapping[object, Policy] = {"save": "save", "recompute": "recompute"}
_FIELDS = frozenset({"memory_budget", "policy"})

# Steps of a module's path that come from wrappers, not from the user's names.
_WRAPPERS = frozenset({"_modules", "_orig_mod", "__self__"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What the user asked for a part of a compiled region: a limit or a policy.

    Attributes:
        name: the user's name, or the pattern; "" for none.
        limit: on the bytes saved by what is written in the scope; a fraction is one of
            the bytes that the fastest plan saves from it.
        policy: "save" or "recompute"; None exactly if there is a limit.
    """

    name: str
    limit: Bytes | Fraction | None = None
    policy: Policy | None = None

    @property
    def requested(self) -> str:
        """What was asked for, in words."""
        if isinstance(self.limit, Bytes):
            return format_bytes(self.limit.size_bytes)
        if isinstance(self.limit, Fraction):
            return f"{100 * self.limit.of_peak:g} % of the saved bytes"
        return str(self.policy)


def make_scope(name: object, memory_budget: object, policy: object) -> Scope:
    """Return the scope with this limit or this policy.

    Raises:
        InvalidOptionError: both or none are given, or one is not understood.
    """
    if not isinstance(name, str):
        raise _error(f"takes a text as name, got {name!r}")
    if (memory_budget is None) == (policy is None):
        given = f"memory_budget={memory_budget!r}, policy={policy!r}"
        raise _error(f"takes either memory_budget or policy, got {given}", name)
    if policy is not None:
        if not isinstance(policy, str) or policy not in _POLICIES:
            raise _error(f"policy is 'save' or 'recompute', got {policy!r}", name)
        return Scope(name=name, policy=_POLICIES[policy])
    limit = parse_budget(memory_budget)
    if not isinstance(limit, Bytes | Fraction):
        raise _error(
            'memory_budget is bytes (4096, "512MiB") or a fraction in (0, 1] of the '
            f"bytes saved from it without a limit, got {memory_budget!r}",
            name,
        )
    return Scope(name=name, limit=limit)


def parse_patterns(value: object) -> tuple[Scope, ...]:
    """Return the scopes of the option ``regions``, in the order in which they win.

    Args:
        value: pattern of module paths -> "save", "recompute", or a mapping with
            memory_budget or policy. None: no patterns.

    Raises:
        InvalidOptionError: a rule is not understood; names its pattern.
    """
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise _error(f"takes a dict of patterns, got {value!r}", option="regions")
    return tuple(_pattern_scope(pattern, rule) for pattern, rule in value.items())


def scope_of(node: Any, patterns: Sequence[Scope]) -> Scope | None:
    """Return the scope that a node is marked with, None without a mark.

    The innermost ``with gcpass.region`` wins over patterns, and the first pattern that
    a module around the node matches over later ones. Each module that a policy's
    pattern matches is a scope of its own, while a limit is on all of them together.
    """
    text = (node.meta.get("custom") or {}).get(ANNOTATION)
    if text is not None:
        return make_scope(*json.loads(text))
    paths = module_paths(node) if patterns else ()
    for scope in patterns:
        matched = [path for path in paths if fnmatchcase(path, scope.name)]
        if matched:
            return scope if scope.policy is None else replace(scope, name=matched[0])
    return None


def module_paths(node: Any) -> tuple[str, ...]:
    """Return the modules around a node, outermost first: "h", "h.0", "h.0.mlp".

    Dynamo's "L['self'].h._modules['0'].mlp" is "h.0.mlp", the outermost module "".
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not isinstance(stack, Mapping):
        return ()
    return tuple(map(_path, stack.values()))


def _path(entry: Any) -> str:
    text = str(entry[0] if isinstance(entry, (list, tuple)) else entry)
    text = re.sub(r"^[LG]\[['\"][^'\"]*['\"]\]", "", text)
    text = re.sub(r"\[['\"]?([^'\"\]]*)['\"]?\]", r".\1", text)
    return ".".join(p for p in text.split(".") if p and p not in _WRAPPERS)


def _pattern_scope(pattern: object, rule: object) -> Scope:
    if isinstance(rule, str):
        return make_scope(pattern, None, rule)
    if not isinstance(rule, Mapping) or not rule.keys() <= _FIELDS:
        raise _error(
            "takes 'save', 'recompute', {'memory_budget': ...} or {'policy': ...}, "
            f"got {rule!r}",
            pattern,
        )
    return make_scope(pattern, rule.get("memory_budget"), rule.get("policy"))


def _error(
    problem: str, name: object = "", *, option: str = "region"
) -> InvalidOptionError:
    which = f"{option} {name!r}" if name else option
    return InvalidOptionError(f"{which}: {problem}", option=option)
