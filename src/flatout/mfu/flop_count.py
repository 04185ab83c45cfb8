"""Result of ``count_flops``: the FLOPs of a call, by module and by operator."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flatout.core.described import Described


@dataclass(frozen=True, repr=False)
class FlopNode(Described):
    """FLOPs of one module and its submodules.

    A module that is used several times or has several names is one node, with its first name. Its backward is the
    backward of the operators that ran in its forward.

    Attributes:
        name: the module's name in its parent, or the class name of a root.
        forward: FLOPs of the forward.
        backward: FLOPs of the backward.
        recomputed: recomputed FLOPs, see ``FlopCount``.
        children: the submodules, in order of registration.
    """

    name: str
    forward: int
    backward: int
    recomputed: int
    children: tuple[FlopNode, ...]

    @property
    def total(self) -> int:
        """FLOPs of forward and backward."""
        return self.forward + self.backward

    @property
    def own(self) -> int:
        """``total`` without the submodules."""
        return self.total - sum(child.total for child in self.children)

    def __getitem__(self, path: str) -> FlopNode:
        """Return the submodule with a dotted name, such as ``layer1.0.conv1``.

        Raises:
            KeyError: there is no submodule with this name.
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
        """Return a tree of all modules with FLOPs: total, share of the whole model, forward and backward."""
        rows = list(self._rows(0))
        width = max(len(name) for name, _ in rows)
        whole = max(self.total, 1)
        return "\n".join(
            f"{name:{width}}  {_readable(node.total):>9} {node.total / whole:7.1%}"
            f"  forward {_readable(node.forward):>9}  backward {_readable(node.backward):>9}"
            for name, node in rows
        )

    def _facts(self) -> dict[str, str]:
        return {"name": self.name, **_flops(total=self.total, forward=self.forward, backward=self.backward)}

    def _rows(self, depth: int) -> Iterator[tuple[str, FlopNode]]:
        yield "  " * depth + self.name, self
        for child in self.children:
            if child.total or child.recomputed:
                yield from child._rows(depth + 1)


@dataclass(frozen=True, repr=False)
class FlopCount(Described):
    """FLOPs of one call. A multiply-add counts as 2.

    ``total`` is the work of the model's mathematics, on which MFU is based. ``hardware`` is the work of the device, on
    which HFU is based. Neither includes the pairs of query and key that ``is_causal`` removes.

    Attributes:
        forward: FLOPs of the forward.
        backward: FLOPs of the backward.
        recomputed: FLOPs of repeated work. Activation checkpointing repeats forwards, up to the last tensor that the
            backward needs. Fused attention recomputes scores in its backward.
        dense: ``total`` with all pairs of causal attention, as in published figures (the 12 * L * H * Q * T of PaLM's
            appendix B).
        by_module: forward, backward and recomputed FLOPs by module.
        by_op: ``forward + backward + recomputed`` by operator.
        unknown: number of calls of each operator that may be costly and has no formula. Such an operator counts 0.
            ``register_flops`` gives it a formula.
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
        """Model FLOPs, which are forward and backward without recomputation."""
        return self.forward + self.backward

    @functools.cached_property
    def hardware(self) -> int:
        """Hardware FLOPs, which are ``total`` and recomputation."""
        return self.total + self.recomputed

    def __str__(self) -> str:
        unknown = f"\nnot counted: {named(self.unknown)}" if self.unknown else ""
        return f"{self.by_module}{unknown}"

    def _facts(self) -> dict[str, str]:
        unknown = f"not counted: {named(self.unknown)}" if self.unknown else ""
        return {**_flops(total=self.total, forward=self.forward, backward=self.backward), "unknown": unknown}


def named(calls: Mapping[str, int]) -> str:
    """Return operators and their numbers of calls, in words."""
    return ", ".join(f"{name} (called {n}x)" for name, n in calls.items())


def _flops(**counts: int) -> dict[str, str]:
    """Return numbers of FLOPs in words, by name."""
    return {name: f"{name} {_readable(flops)}FLOPs" for name, flops in counts.items()}


def _readable(flops: int) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if flops >= size:
            return f"{flops / size:.4g} {unit}"
    return f"{flops} "
