"""``torch.compile`` without code generation, for tests of compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Compiler:
    """Replacement of ``torch.compile``: Dynamo traces as usual, and its graphs run operator by operator.

    Attributes:
        graphs: compiled graphs.
        runs: number of runs of compiled graphs. Eager calls add none.
        modes: ``mode`` of each call of ``torch.compile``.
        error: error to raise instead of compiling, or None.
        run_error: error to raise instead of running, or None.
    """

    def __init__(self) -> None:
        self.graphs: list[Any] = []
        self.runs = 0
        self.modes: list[str] = []
        self.error: Exception | None = None
        self.run_error: Exception | None = None
        self._compile = torch.compile

    def backend(self, graph: Any, _: Any) -> Callable[..., Any]:
        if self.error is not None:
            raise self.error
        self.graphs.append(graph)

        def run(*args: Any) -> Any:
            self.runs += 1
            if self.run_error is not None:
                raise self.run_error
            return graph.forward(*args)

        return run

    def compile(self, call: Callable[..., Any], mode: str = "", backend: Any = None) -> Callable[..., Any]:
        self.modes.append(mode or getattr(backend, "mode", "default"))
        return self._compile(call, backend=self.backend)
