"""Diff of a script's files. The diff has only changes that are surely correct, and the files do not change."""

from __future__ import annotations

import ast
import difflib
import io
import multiprocessing
import tokenize
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import torch

from flatout.advise.causes import Cause, workers_to_use

Lines = list[str]
Edit = Callable[[Lines, ast.Module, int, Collection[int]], Lines | None]
"""Function from ``(lines, tree, line, trained)`` to the changed lines of a file; None if no change is surely correct.

Code that covers one of the lines in ``trained`` requires gradients.
"""

_TRAINS = {"backward", "step"}
"""Methods whose calls mark code that trains."""

_MOST_POSITIONAL = 5
"""Positional arguments of ``DataLoader`` before ``num_workers``."""


def diff_of(causes: Iterable[Cause], folder: Path, device: str, trained: Collection[str] = ()) -> str:
    """Return a unified diff that removes causes; empty if no change is surely correct.

    File names are relative to ``folder``, after ``a/`` and ``b/``, as ``git apply`` and ``patch -p1`` expect.

    Args:
        causes: causes to remove.
        folder: folder of the script. The diff has no files outside of this folder.
        device: device type of the training.
        trained: ``file:line`` of lines whose calls require gradients.
    """
    edits: dict[str, Edit] = {
        "evaluation_with_gradients": _without_gradients,
        "starved_loader": _with_workers,
        "fp32_matmuls": _autocast_on(device),
    }
    wanted: dict[str, list[tuple[int, Edit]]] = {}
    for cause in causes:
        file, line = _split(cause.where)
        if cause.is_sure and cause.code in edits and (folder / file).is_file():
            wanted.setdefault(file, []).append((line, edits[cause.code]))
    lines: dict[str, set[int]] = {}
    for file, line in map(_split, trained):
        lines.setdefault(file, set()).add(line)
    return "".join(_diff_of_file(folder, file, changes, lines.get(file, ())) for file, changes in wanted.items())


def _split(place: str) -> tuple[str, int]:
    file, _, line = place.rpartition(":")
    return file, int(line or 0)


def _diff_of_file(folder: Path, name: str, changes: Sequence[tuple[int, Edit]], trained: Collection[int]) -> str:
    try:
        before = _lines_of(folder / name)
        after = before
        # The last place is first, because an edit moves the lines below its place.
        for line, edit in sorted(changes, key=lambda change: -change[0]):
            edited = edit(list(after), _parsed(after), line, trained)
            if edited is not None and _parses(edited):
                after = edited
    except (OSError, SyntaxError, ValueError):
        return ""
    made = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in made)


def _lines_of(path: Path) -> Lines:
    """Return the lines of a file with their original line ends, so that a diff of the lines can be applied.

    Raises:
        ValueError: the file is not UTF-8, or has lines that end in a lone carriage return.
    """
    content = path.read_bytes()
    encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    text = content.decode()
    if not encoding.startswith("utf-8") or "\r" in text.replace("\r\n", ""):
        raise ValueError(f"{path} must be UTF-8 with usual ends of lines")
    return io.StringIO(text, newline="\n").readlines()


def _parsed(lines: Lines) -> ast.Module:
    return ast.parse("".join(lines).encode())  # bytes may begin with a byte-order mark


def _parses(lines: Lines) -> bool:
    try:
        _parsed(lines)
    except SyntaxError:
        return False
    return True


def _with_workers(lines: Lines, tree: ast.Module, line: int, _: Collection[int]) -> Lines | None:
    """Give a ``DataLoader(...)`` workers, and pinned memory if there is a GPU."""
    if multiprocessing.get_start_method() != "fork":  # others require an importable script and picklable samples
        return None
    call = _loader_at(tree, line)
    if call is not None and (len(call.args) > _MOST_POSITIONAL or any(isinstance(a, ast.Starred) for a in call.args)):
        return None
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
    """Return the call of ``DataLoader`` at a line, or None if the line has none or several."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _covers(node, line)]
    calls = [node for node in nodes if ast.unparse(node.func).rpartition(".")[2] == "DataLoader"]
    return calls[0] if len(calls) == 1 else None


def _is_zero(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value == 0


def _place(node: ast.expr) -> tuple[tuple[int, int], int, int]:
    """Return the first line and column of a node, and its last line and column. Columns count bytes."""
    return (node.lineno, node.col_offset), node.end_lineno or node.lineno, node.end_col_offset or node.col_offset


def _without_gradients(lines: Lines, tree: ast.Module, line: int, trained: Collection[int]) -> Lines | None:
    """Turn gradients off in the function around a line, or in a loop or a statement of a function that trains."""
    around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and _covers(node, line)]
    around = [node for node in around if not isinstance(node, ast.ClassDef) and not _trains(node)]
    around = [node for node in around if not any(_covers(node, other) for other in trained)]
    functions = [node for node in around if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    if not _imports_torch(tree) or not around:
        return None
    if functions:
        first = functions[-1].lineno - 1  # below other decorators, whose result may not be a function
        lines.insert(first, f"{_indent(lines[first])}@torch.no_grad(){_end(lines)}")
        return lines
    loops = [node for node in around if isinstance(node, (ast.For, ast.While))]
    return _wrapped(lines, (loops or around[-1:])[0], "torch.no_grad()")


def _autocast_on(device: str) -> Edit:
    """Return an edit that runs the statement at a line in bf16, if the assigned value stays in fp32 or is a loss."""

    def edit(lines: Lines, tree: ast.Module, line: int, _: Collection[int]) -> Lines | None:
        found = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and _covers(node, line)]
        if len(found) != 1 or _trains(found[0]) or not _imports_torch(tree):
            return None
        name, value = ast.unparse(found[0].targets[0]), found[0].value
        wrapped = _wrapped(lines, found[0], f'torch.autocast("{device}", dtype=torch.bfloat16)')
        if wrapped is None or name in _losses(tree):
            return wrapped
        calls = [node for node in ast.walk(value) if isinstance(node, ast.Call)]
        if calls != [value] or not name.isidentifier():
            return None  # the assigned value may not be a tensor
        last = (found[0].end_lineno or line) + 1
        text = f"{_indent(lines[found[0].lineno - 1])}{name} = {name}.float(){_end(lines)}"
        return [*wrapped[:last], text, *wrapped[last:]]  # some losses, and NumPy, do not accept bf16

    return edit


def _losses(tree: ast.Module) -> set[str]:
    """Return the names of variables whose ``backward`` is called."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "backward"]
    return {node.value.id for node in attributes if isinstance(node.value, ast.Name)}


def _wrapped(lines: Lines, node: ast.stmt, context: str) -> Lines | None:
    """Put a statement into a ``with`` block. Return None if the indentation could change a string or other code."""
    first, last = node.lineno - 1, node.end_lineno or node.lineno
    texts = [part for part in ast.walk(node) if isinstance(part, (ast.JoinedStr, ast.Constant))]
    if any(part.lineno != part.end_lineno for part in texts) or lines[first][: node.col_offset].strip():
        return None
    step = "\t" if any(line.startswith("\t") for line in lines) else "    "
    inner = [f"{step}{line}" if line.strip() else line for line in lines[first:last]]
    return [*lines[:first], f"{_indent(lines[first])}with {context}:{_end(lines)}", *inner, *lines[last:]]


def _trains(node: ast.AST) -> bool:
    calls = (part.func for part in ast.walk(node) if isinstance(part, ast.Call))
    return any(isinstance(function, ast.Attribute) and function.attr in _TRAINS for function in calls)


def _covers(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _imports_torch(tree: ast.Module) -> bool:
    imports = (node for node in tree.body if isinstance(node, ast.Import))
    return any(name.name == "torch" and name.asname is None for node in imports for name in node.names)


def _end(lines: Lines) -> str:
    """Return the line end of a file."""
    return "\r\n" if lines[0].endswith("\r\n") else "\n"


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]
