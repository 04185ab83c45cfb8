"""Diff of a script's files. Only changes that are surely right are written, and the files stay as they are."""

from __future__ import annotations

import ast
import difflib
import os
import tokenize
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from flatout.advise.causes import Cause, workers_to_use

Lines = list[str]
Edit = Callable[[Lines, ast.Module, int], Lines | None]
"""``edit(lines, tree, line)`` returns the changed lines of a file; None if nothing can surely be written."""

_TRAINS = {"backward", "step"}
"""Methods whose calls mark code that trains."""

_SIMPLE = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign)


def diff_of(causes: Iterable[Cause], folder: Path, device: str) -> str:
    """Return a unified diff that removes causes; empty if nothing can surely be written.

    Args:
        causes: what is to be removed.
        folder: the script's folder. Files elsewhere are not changed.
        device: device type of the training.
    """
    edits: dict[str, Edit] = {
        "evaluation_with_gradients": _without_gradients,
        "starved_loader": _with_workers,
        "fp32_matmuls": _autocast_on(device),
    }
    wanted: dict[Path, list[tuple[int, Edit]]] = {}
    for cause in causes:
        file, _, line = cause.where.rpartition(":")
        if cause.is_sure and cause.code in edits and (folder / file).is_file():
            wanted.setdefault(folder / file, []).append((int(line), edits[cause.code]))
    return "".join(_diff_of_file(path, changes) for path, changes in wanted.items())


def _diff_of_file(path: Path, changes: Sequence[tuple[int, Edit]]) -> str:
    try:
        with tokenize.open(path) as file:
            before = file.read().splitlines(keepends=True)
        after = before
        # An edit moves the lines below its place only, so that the places above stay valid.
        for line, edit in sorted(changes, key=lambda change: -change[0]):
            edited = edit(list(after), ast.parse("".join(after)), line)
            if edited is not None and _parses(edited):
                after = edited
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""
    name = os.path.relpath(path)
    made = difflib.unified_diff(before, after, name, name)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in made)


def _parses(lines: Lines) -> bool:
    try:
        ast.parse("".join(lines))
    except SyntaxError:
        return False
    return True


def _with_workers(lines: Lines, tree: ast.Module, line: int) -> Lines | None:
    """Give a ``DataLoader(...)`` workers, and pinned memory if there is a GPU."""
    call = _loader_at(tree, line)
    given = {} if call is None else {keyword.arg: keyword.value for keyword in call.keywords}
    arguments = [] if call is None else [*call.args, *given.values()]
    if not arguments or None in given or ("num_workers" in given and not _is_zero(given["num_workers"])):
        return None
    wanted = {"num_workers": str(workers_to_use()), "persistent_workers": "True"}
    if torch.cuda.is_available():
        wanted["pin_memory"] = "True"
    changes = [(*_place(given[name]), text) for name, text in wanted.items() if name in given]
    if added := "".join(f", {name}={text}" for name, text in wanted.items() if name not in given):
        _, last, end = max(map(_place, arguments), key=lambda place: (place[1], place[2]))
        changes.append(((last, end), last, end, added))
    for (first, start), last, end, text in sorted(changes, reverse=True):
        if first != last:
            return None
        encoded = lines[last - 1].encode()
        lines[last - 1] = (encoded[:start] + text.encode() + encoded[end:]).decode()
    return lines


def _loader_at(tree: ast.Module, line: int) -> ast.Call | None:
    """Return the call of ``DataLoader`` at a line; None if there are several."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _covers(node, line)]
    calls = [node for node in nodes if ast.unparse(node.func).rpartition(".")[2] == "DataLoader"]
    return calls[0] if len(calls) == 1 else None


def _is_zero(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value == 0


def _place(node: ast.expr) -> tuple[tuple[int, int], int, int]:
    """Return the first line and column, counted in bytes, and the last ones."""
    return (node.lineno, node.col_offset), node.end_lineno or node.lineno, node.end_col_offset or node.col_offset


def _without_gradients(lines: Lines, tree: ast.Module, line: int) -> Lines | None:
    """Turn gradients off in the function around a line, or in a loop or a statement of a function that trains."""
    around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and _covers(node, line)]
    around = [node for node in around if not _trains(node) and not isinstance(node, ast.ClassDef)]
    functions = [node for node in around if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    if not _imports_torch(tree) or not around:
        return None
    if functions:
        first = functions[-1].lineno - 1  # below other decorators, which may return no function
        lines.insert(first, f"{_indent(lines[first])}@torch.no_grad()\n")
        return lines
    loops = [node for node in around if isinstance(node, (ast.For, ast.While))]
    return _wrapped(lines, (loops or around[-1:])[0], "torch.no_grad()")


def _autocast_on(device: str) -> Edit:
    """Return an edit that runs the statement at a line in bf16."""

    def edit(lines: Lines, tree: ast.Module, line: int) -> Lines | None:
        found = [node for node in ast.walk(tree) if isinstance(node, _SIMPLE) and _covers(node, line)]
        if len(found) != 1 or _trains(found[0]) or not _imports_torch(tree):
            return None
        return _wrapped(lines, found[0], f'torch.autocast("{device}", dtype=torch.bfloat16)')

    return edit


def _wrapped(lines: Lines, node: ast.stmt, context: str) -> Lines | None:
    """Put a statement into a ``with`` block; None for text that would change with its indentation."""
    first, last = node.lineno - 1, node.end_lineno or node.lineno
    texts = [part for part in ast.walk(node) if isinstance(part, (ast.JoinedStr, ast.Constant))]
    if any(part.lineno != part.end_lineno for part in texts) or lines[first][: node.col_offset].strip():
        return None
    inner = [f"    {line}" if line.strip() else line for line in lines[first:last]]
    return [*lines[:first], f"{_indent(lines[first])}with {context}:\n", *inner, *lines[last:]]


def _trains(node: ast.AST) -> bool:
    calls = (part.func for part in ast.walk(node) if isinstance(part, ast.Call))
    return any(isinstance(function, ast.Attribute) and function.attr in _TRAINS for function in calls)


def _covers(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _imports_torch(tree: ast.Module) -> bool:
    imports = (node for node in tree.body if isinstance(node, ast.Import))
    return any(name.name == "torch" and name.asname is None for node in imports for name in node.names)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]
