"""From pydantic's errors to lines that a person can act on: place, key, value, what is allowed, nearest valid name."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from maieutic.config import Recipe
from maieutic.yaml12 import KeyPath, dotted


def explain(
    error: ValidationError,
    data: Any,
    origins: Mapping[KeyPath, str],
    name: str,
    model: type[BaseModel] = Recipe,
) -> str:
    """One line an error; errors of the branches of a union are joined into one. ``model``: the schema that hints come from."""
    by_key: dict[KeyPath, list[Any]] = {}
    for item in error.errors(include_url=False):
        by_key.setdefault(_real_path(item["loc"], data, item["type"]), []).append(item)
    lines = [_line(path, items, data, origins, name, model) for path, items in by_key.items()]
    if len(lines) == 1:
        return lines[0]
    return f"{len(lines)} errors in recipe {name}:\n" + "\n".join(f"  - {line}" for line in lines)


def _real_path(loc: tuple[int | str, ...], data: Any, kind: str) -> KeyPath:
    """The part of pydantic's location that is in the data (union branches add made-up parts)."""
    path: list[str | int] = []
    node: Any = data
    for i, part in enumerate(loc):
        in_mapping = isinstance(node, dict) and part in node
        in_list = isinstance(node, list) and isinstance(part, int) and part < len(node)
        if in_mapping or in_list:
            path.append(part)
            node = node[part]
        elif kind == "missing" and i == len(loc) - 1:
            path.append(part)
    return tuple(path)


def _value(path: KeyPath, data: Any) -> Any:
    for part in path:
        data = data[part]
    return data


def _origin(path: KeyPath, origins: Mapping[KeyPath, str], name: str) -> str:
    for end in range(len(path), 0, -1):
        if path[:end] in origins:
            return origins[path[:end]]
    return name


def _line(
    path: KeyPath,
    items: list[Any],
    data: Any,
    origins: Mapping[KeyPath, str],
    name: str,
    root: type[BaseModel] = Recipe,
) -> str:
    head = f"{_origin(path, origins, name)}: {dotted(path) or 'recipe'}"
    first = items[0]
    if first["type"] == "missing":
        return f"{head}: required, but not given"
    value = _value(path, data)
    if first["type"] == "extra_forbidden":
        near = nearest_key(path, root)
        known = section_at(path[:-1], root)
        if near is None and known is not None:
            hint = f"; known keys here: {', '.join(known.model_fields)}"
        else:
            hint = f"; did you mean {near!r}?" if near else ""
        return f"{head}: unknown key (value {_short(value)}){hint}"
    if first["type"] == "value_error":
        return f"{head}: {first['msg'].removeprefix('Value error, ')}"
    wants = list(dict.fromkeys(_wants(i) for i in items))
    choices = [c for i in items if i["type"] == "literal_error" for c in _choices(i)]
    line = f"{head}: {_short(value)} is not valid: expected {' or '.join(wants)}"
    near_values = difflib.get_close_matches(
        value.lower() if isinstance(value, str) else "", choices, n=1, cutoff=0.5
    )
    if near_values:
        line += f"; did you mean {near_values[0]!r}?"
    return line + _type_hint(value, items)


def _wants(item: Any) -> str:
    kind = item["type"]
    ctx = item.get("ctx", {})
    if kind == "literal_error":
        return f"one of {', '.join(repr(c) for c in _choices(item))}"
    if kind == "string_pattern_mismatch" and ":" in ctx.get("pattern", ""):
        return "an import path module:Class"
    plain = {
        "string_type": "text",
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "int_parsing": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
        "list_type": "a list",
        "tuple_type": "a list",
        "dict_type": "a mapping",
        "model_type": "a mapping",
        "model_attributes_type": "a mapping",
        "finite_number": "a finite number",
    }
    if kind in plain:
        return plain[kind]
    bounds = {"greater_than": ">", "greater_than_equal": "≥", "less_than": "<", "less_than_equal": "≤"}
    if kind in bounds:
        return f"a number {bounds[kind]} {next(iter(ctx.values()))}"
    return re.sub(r"^(Input|String|Value) should ", "something that should ", item["msg"])


def _choices(item: Any) -> list[str]:
    return re.findall(r"'([^']*)'", item.get("ctx", {}).get("expected", ""))


def _type_hint(value: Any, items: list[Any]) -> str:
    kinds = {i["type"] for i in items}
    if "bool_type" in kinds and str(value).lower() in ("on", "off", "yes", "no"):
        return f" (write {'true' if str(value).lower() in ('on', 'yes') else 'false'})"
    if "string_type" in kinds and isinstance(value, bool | int | float):
        return " (put it in quotes)"
    if isinstance(value, str) and kinds & {"int_type", "float_type"} and re.fullmatch(r"[\d_.,eE+-]+", value):
        return " (write it without quotes, underscores or commas)"
    return ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def section_at(path: KeyPath, root: type[BaseModel] = Recipe) -> type[BaseModel] | None:
    """The schema section that a key path leads to, None where there is none (free-form options, unknown keys)."""
    model: type[BaseModel] | None = root
    for part in path:
        if isinstance(part, int):
            continue
        if model is None or part not in model.model_fields:
            return None
        model = _model_in(model.model_fields[part].annotation)
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for arg in typing.get_args(annotation):
        found = _model_in(arg)
        if found is not None:
            return found
    return None


def nearest_key(path: KeyPath, root: type[BaseModel] = Recipe) -> str | None:
    """The valid dotted key nearest to an invalid one: the same section first, then the same last name anywhere."""
    *parents, last = path
    section = section_at(tuple(parents), root)
    if section is not None:
        near = difflib.get_close_matches(str(last), list(section.model_fields), n=1, cutoff=0.6)
        if near:
            return dotted((*parents, near[0]))
    by_name = {k.rpartition(".")[2]: k for k in reversed(all_keys(root))}
    if last in by_name:
        here = dotted(tuple(parents))
        same = [k for k in all_keys(root) if k.rpartition(".")[2] == last]
        return max(same, key=lambda k: (bool(here) and k.startswith(here), -k.count("."), -len(k)))
    near = difflib.get_close_matches(str(last), list(by_name), n=1, cutoff=0.75)
    return by_name[near[0]] if near else None


def all_keys(model: type[BaseModel] = Recipe, prefix: str = "") -> list[str]:
    """Every dotted key of the schema; list items count as ``0``."""
    out = []
    for name, spec in model.model_fields.items():
        inner = _model_in(spec.annotation)
        is_list = "list[" in str(spec.annotation) and inner is not None
        key = prefix + name
        out.append(key)
        if inner is not None:
            out += all_keys(inner, f"{key}.0." if is_list else f"{key}.")
    return out
