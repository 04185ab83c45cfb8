"""Small changes of flatout's sources.

Each is located by the text of its expression, also after a move to another file.
"""

from __future__ import annotations

import ast
import copy
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src" / "flatout"
FILE = Path(__file__).with_name("mutants.jsonl")
_STEPPER = ("stepper", "parallel_stepper", "objective", "job_state", "micro_batches", "recovery")
_GRAPHS = ("capture_guards", "graph_recorder", "graphed_step")
_DECISIONS = ("stopwatch", "statistics", "pairs", "combinations", "race", "acceptance", "budget", "plan_cache")
SUBJECTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "optim": (60, ("optim/*.py", "core/gradients.py")),
    "amp": (30, ("amp/*.py",)),
    "data": (80, ("data/*.py", "core/batches.py", "core/random_state.py")),
    "snapshot": (40, ("core/snapshot.py", "core/saved.py", "core/foreign.py", "training/checkpoint/*.py")),
    "equivalence": (25, ("tuning/numerics.py", "training/tolerance.py", "training/device_verdict.py")),
    "decisions": (17, tuple(f"tuning/{name}.py" for name in _DECISIONS)),
    "stepper": (48, tuple(f"training/{name}.py" for name in (*_STEPPER, *_GRAPHS))),
}
"""Number of mutants and files of each subject."""

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.Return, ast.Raise, ast.Delete)


@dataclass(frozen=True)
class Mutant:
    """One change of the sources.

    Attributes:
        subject: key of ``SUBJECTS``.
        file: path relative to ``SOURCES``. The file may have moved since the mutant was drawn.
        function: name of the innermost function that holds ``before``, empty at module level.
        before: the expression or statement, as ``ast.unparse`` writes it.
        nth: position among the equal ones in that function, from 0.
        after: replacement of ``before``.
    """

    subject: str
    file: str
    function: str
    before: str
    nth: int
    after: str


@dataclass(frozen=True)
class Place:
    """Expression or statement in a file."""

    file: Path
    node: ast.AST

    @property
    def lines(self) -> range:
        return range(self.node.lineno, self.node.end_lineno + 1)

    def replaced(self, after: str) -> str:
        """Return the file's text with ``after`` in this place."""
        lines = self.file.read_bytes().splitlines(keepends=True)
        first, last = self.node.lineno - 1, self.node.end_lineno - 1
        text = lines[first][: self.node.col_offset] + after.encode() + lines[last][self.node.end_col_offset :]
        return b"".join([*lines[:first], text, *lines[last + 1 :]]).decode()


def make(seed: int) -> list[Mutant]:
    """Draw the mutants of all ``SUBJECTS``, at most one per statement."""
    chosen = []
    for subject, (count, patterns) in SUBJECTS.items():
        random_source = random.Random(f"{subject} {seed}")
        statements = [
            (file, function, node, nth)
            for pattern in patterns
            for file in sorted(SOURCES.glob(pattern))
            for function, node, nth in _parts(ast.parse(file.read_text(encoding="utf-8")))
        ]
        random_source.shuffle(statements)
        drawn: list[Mutant] = []
        for file, function, node, nth in statements:
            if changes := list(_changes(node, function)):
                relative = file.relative_to(SOURCES).as_posix()
                drawn.append(Mutant(subject, relative, function, ast.unparse(node), nth, random_source.choice(changes)))
            if len(drawn) == count:
                break
        chosen += drawn
    return chosen


def read() -> list[Mutant]:
    """Return the mutants of ``FILE``."""
    return [Mutant(**json.loads(line)) for line in FILE.read_text(encoding="utf-8").splitlines()]


def find(mutants: Sequence[Mutant]) -> list[Place | None]:
    """Return each mutant's place in its file, else in the only other file that has its function and text."""
    files: dict[Path, dict[tuple[str, str, int], Place]] = {}
    for file in sorted(SOURCES.rglob("*.py")):
        parts = _parts(ast.parse(file.read_text(encoding="utf-8")))
        files[file] = {(function, ast.unparse(node), nth): Place(file, node) for function, node, nth in parts}
    return [_find(mutant, files) for mutant in mutants]


def _find(mutant: Mutant, files: dict[Path, dict[tuple[str, str, int], Place]]) -> Place | None:
    before = ast.unparse(ast.parse(mutant.before))  # in the form that this version of Python writes
    key = mutant.function, before, mutant.nth
    home = SOURCES / mutant.file
    if place := files.get(home, {}).get(key):
        return place
    places = [places[key] for places in files.values() if key in places]
    return places[0] if len(places) == 1 else None


def _parts(tree: ast.Module) -> Iterator[tuple[str, ast.AST, int]]:
    """Yield (function, node, nth) of each simple statement and each condition."""
    seen: dict[tuple[str, str], int] = {}

    def visit(body: list[ast.stmt], function: str) -> Iterator[tuple[str, ast.AST, int]]:
        for statement in body:
            inside = statement.name if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
            part = statement if isinstance(statement, _SIMPLE) else getattr(statement, "test", None)
            if part is not None:
                key = inside, ast.unparse(part)
                yield inside, part, seen.setdefault(key, 0)
                seen[key] += 1
            for field in ("body", "orelse", "finalbody"):
                yield from visit(getattr(statement, field, []), inside)
            for handler in getattr(statement, "handlers", []):
                yield from visit(handler.body, inside)

    yield from visit(tree.body, "")


def _changes(node: ast.AST, function: str) -> Iterator[str]:
    """Yield the text of each change of a node."""
    if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call):
        return  # a docstring, a yield
    if isinstance(node, (ast.Expr, ast.Raise)):
        yield "pass"
    if isinstance(node, ast.Raise):
        return  # the rest is a message
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    if function != "__init__" and all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in targets):
        yield "pass"  # not in __init__, where every use of the attribute would fail
    if any(getattr(target, "id", "").startswith("__") for target in targets):
        return  # __all__, __slots__
    if isinstance(node, ast.expr) and not isinstance(node, ast.Compare):
        yield f"not ({ast.unparse(node)})"
    for number, _ in enumerate(ast.walk(node)):
        for change in _IN_PLACE:
            changed = copy.deepcopy(node)
            target = next(each for index, each in enumerate(ast.walk(changed)) if index == number)
            if change(target):
                yield ast.unparse(changed)


def _swap(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        node.ops = [_SWAPPED[type(node.ops[0])]()]
    elif isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in _SWAPPED:
        node.op = _SWAPPED[type(node.op)]()
    elif isinstance(node, ast.IfExp):
        node.body, node.orelse = node.orelse, node.body
    elif isinstance(node, ast.Name) and node.id in ("min", "max", "any", "all"):
        node.id = {"min": "max", "max": "min", "any": "all", "all": "any"}[node.id]
    else:
        return False
    return True


def _constant(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
        return True
    return False


def _drop(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and node.keywords:
        node.keywords = node.keywords[:-1]
    elif isinstance(node, ast.BoolOp):
        node.values = node.values[:-1]
    else:
        return False
    return True


_IN_PLACE = (_swap, _constant, _drop)
