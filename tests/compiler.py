"""``torch.compile`` without code generation, for tests that meet compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Compiler:
    """Stands in for ``torch.compile``: Dynamo traces as ever, and what it finds runs operator by operator.

    Attributes:
        graphs: what was compiled.
        runs: how often any of it ran; a call that takes the plain way adds none.
        modes: as ``torch.compile`` was asked.
        error: raised instead of compiling; None: compiling works.
        run_error: raised instead of running; None: running works.
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

    def compile(self, call: Callable[..., Any], mode: str = "default") -> Callable[..., Any]:
        self.modes.append(mode)
        return self._compile(call, backend=self.backend)
