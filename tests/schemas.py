"""A validator for the few JSON schema keywords that the shipped schemas use."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

_KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}
_KEYWORDS = {
    "$defs", "$ref", "$schema", "additionalProperties", "anyOf", "const", "default",
    "description", "enum", "items", "minimum", "properties", "required", "title",
    "type",
}  # fmt: skip


def load(package: str, name: str) -> dict[str, Any]:
    """Return a schema that a package ships."""
    found: dict[str, Any] = json.loads(files(package).joinpath(name).read_text("utf-8"))
    return found


def fits(value: Any, rule: dict[str, Any], root: dict[str, Any]) -> bool:
    """Return whether a parsed document keeps to a schema."""
    assert rule.keys() <= _KEYWORDS, f"not understood: {rule.keys() - _KEYWORDS}"
    if "$ref" in rule:
        return fits(value, root["$defs"][rule["$ref"].rsplit("/", 1)[1]], root)
    if "anyOf" in rule:
        return any(fits(value, option, root) for option in rule["anyOf"])
    kind = type(value)  # true is a boolean, not an integer
    if kind not in _KINDS[rule["type"]]:
        return False
    if value not in rule.get("enum", [value]) or value != rule.get("const", value):
        return False
    if "minimum" in rule and not value >= rule["minimum"]:
        return False
    if kind is list:
        return all(fits(item, rule["items"], root) for item in value)
    if kind is dict:
        inner = rule["properties"]
        return set(rule["required"]) <= value.keys() <= inner.keys() and all(
            fits(item, inner[name], root) for name, item in value.items()
        )
    return True
