"""YAML as people expect it: the 1.2 core schema, no duplicate keys, and the line of every key.

PyYAML resolves YAML 1.1, in which ``1e-6`` is a string and ``off``, ``on``, ``yes`` and ``no`` are booleans. Recipes say
``lr: 1e-6`` and ``gates: off`` and mean a float and the word.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from maieutic.errors import RecipeError

KeyPath = tuple[str | int, ...]

_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own mechanism)


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = node.value
    if text.startswith(("0o", "0x")):
        return int(text, 0)
    return int(text, 10)


# Order matters: "12" matches both int and float, the first wins.
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_constructor("tag:yaml.org,2002:int", _int)

_PLAIN_TAGS = {f"tag:yaml.org,2002:{t}" for t in ("null", "bool", "int", "float", "str")}


def load(text: str, name: str) -> tuple[Any, dict[KeyPath, int]]:
    """Parse one document: the data, and the 1-based line of every key and list item by its path.

    ``name`` (usually the file) begins every error. Raises :class:`RecipeError` for what is not YAML, has more than one
    document, a duplicate or non-text key, a tag beyond the core schema, or an alias that contains itself.
    """
    lines: dict[KeyPath, int] = {}
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        data = None if node is None else _build(loader, node, (), lines, name, ())
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        problem = getattr(e, "problem", None) or str(e)
        raise RecipeError(f"{where}: not valid YAML: {problem}") from e
    finally:
        loader.dispose()
    return data, lines


def _build(
    loader: _Loader,
    node: yaml.Node,
    path: KeyPath,
    lines: dict[KeyPath, int],
    name: str,
    open_nodes: tuple[int, ...],
) -> Any:
    where = f"{name}:{node.start_mark.line + 1}"
    if id(node) in open_nodes:
        raise RecipeError(f"{where}: {dotted(path)}: an alias contains itself")
    open_nodes = (*open_nodes, id(node))
    if isinstance(node, yaml.MappingNode):
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None or key_node.tag != "tag:yaml.org,2002:str":
                raise RecipeError(
                    f"{name}:{line}: under {dotted(path) or 'the top level'}: key {key!r} is not text: put it in quotes"
                )
            here = (*path, key)
            if key in out:
                raise RecipeError(
                    f"{name}:{line}: {dotted(here)}: key given twice (first on line {lines[here]})"
                )
            lines[here] = line
            out[key] = _build(loader, value_node, here, lines, name, open_nodes)
        return out
    if isinstance(node, yaml.SequenceNode):
        items = []
        for i, item in enumerate(node.value):
            lines[*path, i] = item.start_mark.line + 1
            items.append(_build(loader, item, (*path, i), lines, name, open_nodes))
        return items
    if node.tag not in _PLAIN_TAGS:
        raise RecipeError(f"{where}: {dotted(path)}: YAML tag {node.tag!r} is not supported")
    return loader.construct_object(node, deep=True)


def dotted(path: KeyPath) -> str:
    """``('students', 0, 'model')`` → ``students.0.model``."""
    return ".".join(str(p) for p in path)


class _Dumper(yaml.SafeDumper):
    """Block style without anchors; a string that YAML 1.1 *or* 1.2 would read as something else is quoted."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    ambiguous = any(p.match(text) for p in (_NULL, _BOOL, _INT, _FLOAT))
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if ambiguous else None)


_Dumper.add_representer(str, _represent_str)


def dump(data: Any) -> str:
    """Deterministic YAML in the data's own key order, read back by :func:`load` to equal data."""
    return yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110, default_flow_style=False
    )
