"""Functions to fuzz and the types of their arguments, read from the declarations of the native core."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import flatout
from flatout.native import _host

STUB = Path(flatout.native.__file__).with_name("_host.pyi")


@dataclass(frozen=True)
class Signature:
    """Function with its arguments as ``(name, type)``."""

    name: str
    arguments: tuple[tuple[str, str], ...]
    function: Callable[..., Any]
    keywords: frozenset[str] = frozenset()
    """Names of keyword-only arguments."""
    receiver: str = ""
    """Class of the object of a method."""
    required: int = 99
    """Number of arguments before those with a default."""
    makes_int: bool = False
    """True if the function returns a number that later calls may take."""


def operators() -> list[Signature]:
    """Return every operator of ``torch.ops.flatout``, from its schema."""
    found = []
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace == "flatout":
            arguments = tuple((a.name, str(a.real_type)) for a in schema.arguments)
            keywords = frozenset(a.name for a in schema.arguments if a.kwarg_only)
            function = getattr(getattr(torch.ops.flatout, name), schema.overload_name or "default")
            makes_int = [str(returned.type) for returned in schema.returns] == ["int"]
            found.append(Signature(f"torch.ops.flatout.{name}", arguments, function, keywords, makes_int=makes_int))
    return sorted(found, key=lambda signature: signature.name)


def host_functions() -> list[Signature]:
    """Return every function, class and method of ``flatout.native._host``, from its stub."""
    found = []
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.append(_signature(f"_host.{node.name}", node, getattr(_host, node.name)))
        elif isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    found.append(_method(node.name, method))
    return found


def _method(owner: str, node: ast.FunctionDef) -> Signature:
    if node.name == "__init__":
        return _signature(f"_host.{owner}", node, getattr(_host, owner))
    if any(isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in node.decorator_list):
        return Signature(f"_host.{owner}.{node.name}", (), lambda self: getattr(self, node.name), receiver=owner)

    def call(self: Any, *args: Any) -> Any:
        return getattr(self, node.name)(*args)

    return _signature(f"_host.{owner}.{node.name}", node, call, owner)


def _signature(name: str, node: ast.FunctionDef, function: Callable[..., Any], receiver: str = "") -> Signature:
    declared = [*node.args.posonlyargs, *node.args.args]
    arguments = [(a.arg, ast.unparse(a.annotation)) for a in declared if a.annotation is not None]
    if node.args.vararg is not None:
        arguments += [(f"exception{i}", "object") for i in range(3)]
    required = len(arguments) - len(node.args.defaults)
    return Signature(name, tuple(arguments), function, receiver=receiver, required=required)


def undeclared() -> list[str]:
    """Return the public names of ``flatout.native._host`` that its stub does not declare."""
    declared = set(re.findall(r"^(?:class|def) (\w+)|^(\w+):", STUB.read_text(), re.MULTILINE))
    names = {name for pair in declared for name in pair if name}
    return [name for name in dir(_host) if not name.startswith("_") and name not in names]
