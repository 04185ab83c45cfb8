"""What ``count_flops`` returns: the FLOPs of a call, by module and by operator."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class FlopNode:
    """FLOPs of one module, those of its submodules included.

    A module that is used several times, or under several names, is one node: its first name. Its backward is that of
    the operators that ran in its forward.

    Attributes:
        name: the module's name in its parent; the class for a root.
        forward: FLOPs of its forward.
        backward: FLOPs of its backward.
        recomputed: FLOPs that were computed again (see ``FlopCount``).
        children: its submodules, in order of registration.
    """

    name: str
    forward: int
    backward: int
    recomputed: int
    children: tuple[FlopNode, ...]

    @property
    def total(self) -> int:
        """Forward and backward."""
        return self.forward + self.backward

    @property
    def own(self) -> int:
        """``total`` without that of the submodules."""
        return self.total - sum(child.total for child in self.children)

    def __getitem__(self, path: str) -> FlopNode:
        """The submodule of that dotted name, such as ``layer1.0.conv1``.

        Raises:
            KeyError: if there is none.
        """
        node, rest = self, path
        while rest:
            for child in node.children:
                if rest == child.name or rest.startswith(f"{child.name}."):
                    node, rest = child, rest[len(child.name) + 1 :]
                    break
            else:
                raise KeyError(f"no module {path!r} in {self.name}")
        return node

    def __str__(self) -> str:
        """An indented tree of the modules that compute: total, share of the root, forward and backward."""
        rows = list(self._rows(0))
        width = max(len(name) for name, _ in rows)
        whole = max(self.total, 1)
        return "\n".join(
            f"{name:{width}}  {_readable(node.total):>9} {node.total / whole:7.1%}"
            f"  forward {_readable(node.forward):>9}  backward {_readable(node.backward):>9}"
            for name, node in rows
        )

    def _rows(self, depth: int) -> Iterator[tuple[str, FlopNode]]:
        yield "  " * depth + self.name, self
        for child in self.children:
            if child.total or child.recomputed:
                yield from child._rows(depth + 1)


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of one call; a multiply-add is 2.

    ``total`` is what the model's mathematics needs and what MFU is made of; ``hardware`` is what the device computes
    and what HFU is made of. Pairs of query and key that ``is_causal`` removes are in neither.

    Attributes:
        forward: FLOPs of the forward.
        backward: FLOPs of the backward.
        recomputed: FLOPs of what was computed before: forwards that activation checkpointing repeats, as far as it
            does (torch stops at the last tensor that the backward needs), and the scores that a fused attention
            computes again in its backward.
        dense: ``total`` with causal attention counted as if nothing were masked, as published figures have it
            (the 12 * L * H * Q * T of PaLM's appendix B).
        by_module: the same by module.
        by_op: by operator: ``forward + backward + recomputed``.
        unknown: operators that may be costly and have no formula, with the number of their calls. They count 0 in
            everything above; ``register_flops`` gives them a formula.
    """

    forward: int
    backward: int
    recomputed: int
    dense: int
    by_module: FlopNode
    by_op: Mapping[str, int]
    unknown: Mapping[str, int]

    @functools.cached_property
    def total(self) -> int:
        """Model FLOPs: forward and backward, nothing twice."""
        return self.forward + self.backward

    @functools.cached_property
    def hardware(self) -> int:
        """Hardware FLOPs: ``total`` and what is computed again."""
        return self.total + self.recomputed

    def __str__(self) -> str:
        unknown = f"\nnot counted: {named(self.unknown)}" if self.unknown else ""
        return f"{self.by_module}{unknown}"


def named(calls: Mapping[str, int]) -> str:
    """Operators and how often they were called, in words."""
    return ", ".join(f"{name} (called {n}x)" for name, n in calls.items())


def _readable(flops: int) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if flops >= size:
            return f"{flops / size:.4g} {unit}"
    return f"{flops} "
