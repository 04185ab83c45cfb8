"""Random arguments. Most fit together, so that calls pass the first check, and some are always invalid."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flatout.native import _host
from tests.native.fuzz.signatures import Signature
from tests.optim.rules import RULES

INTS = (0, 1, -1, 2, 3, 5, -2, 7, 64, 255, 256, 1 << 31, (1 << 32) + 1, (1 << 63) - 1, -(1 << 63), 1 << 64)
FLOATS = (0.0, 1.0, 2.0, 0.5, 0.9, 1e-3, -1.0, 1e300, 1e-300, math.inf, -math.inf, math.nan)
NAMES = (*dict.fromkeys(rule.operator for rule in RULES.values()), "forward")
STRINGS = (*NAMES, "", "\0", "é" * 300)
FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*FLOATING, torch.uint8, torch.int16, torch.int64, torch.bool, torch.complex64)
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (4,), (257,), (0,), (3, 5), (2, 3, 4, 5), (1, 0, 2), (40_000,))
BUFFER_BYTES = 4096
TRUSTED = ("Address", "Extent", "Handle")


class Values:
    """Pool of values for the calls of one case. Results of calls join the pool."""

    def __init__(self, rng: random.Random, signatures: Sequence[Signature] = ()) -> None:
        self.rng = rng
        self.makers = {s.name.rpartition(".")[2]: s for s in signatures if _is_class(s)}
        # Most cases differ from valid ones in one way. Otherwise hardly any call would pass its first checks.
        self.alters, self.repeats, self.odd, self.wild = (self.chance(0.25) * 0.1 for _ in range(4))
        self.count = rng.choice((0, 1, 1, 2, 3, 4))
        """Tensors in a list."""
        self.shapes = [rng.choice(SHAPES) for _ in range(max(self.count, 1))]
        self.dtype = rng.choice((torch.float32, *FLOATING))
        self.numbers = rng.randrange(5)
        """Floats in a list."""
        self.tensors: list[Tensor] = []
        self.ints: list[int] = []
        self.objects: list[Any] = []
        self.buffer = torch.zeros(BUFFER_BYTES, dtype=torch.uint8)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    # -- tensors ---------------------------------------------------------------------------------------------

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.tensors and self.chance(self.repeats):
            return self.rng.choice(self.tensors)
        if self.chance(self.odd):
            shape = self.rng.choice(SHAPES)
        if self.chance(self.odd):
            dtype = self.rng.choice(DTYPES)
        tensor = torch.zeros(shape, dtype=dtype) if self.chance(0.2) else torch.ones(shape, dtype=dtype)
        if self.chance(self.alters):
            with contextlib.suppress(RuntimeError):  # some tensors cannot be changed in this way
                tensor = self.rng.choice(ALTERED)(tensor)
        self.tensors.append(tensor)
        return tensor

    def one_tensor(self) -> Tensor:
        kind = self.rng.random()
        if kind < 0.4:
            return self.tensor((), self.rng.choice((torch.float32, torch.float32, self.dtype)))
        if kind < 0.55:
            return self.tensor((2, 3, 4, 5), torch.uint8)
        if kind < 0.7:
            return self.tensor(absmax_shape(self.shapes[0]), torch.float32)
        return self.tensor(self.shapes[0], self.rng.choice((self.dtype, torch.float32, torch.uint8)))

    def tensor_list(self) -> list[Tensor]:
        shapes = self.shapes[: self.count]
        kind = self.rng.random()
        if kind < 0.6:
            return []
        if kind < 0.7:  # counts
            return [self.tensor((), torch.float32) for _ in shapes]
        if kind < 0.75:
            return [self.tensor(absmax_shape(shape), torch.float32) for shape in shapes]
        return self.tensors_like_weights(self.rng.choice((1, 1, 1, 2, 2, 3)))

    def tensors_like_weights(self, repeats: int) -> list[Tensor]:
        others = (torch.float32, torch.bfloat16, torch.uint8, torch.int16)
        dtype = self.dtype if self.chance(0.8) else self.rng.choice(others)
        found = [self.tensor(shape, dtype) for _ in range(repeats) for shape in self.shapes[: self.count]]
        if found and self.chance(self.odd):
            found.pop()
        return found

    def change_a_tensor(self) -> None:
        """Change a tensor between two calls, as a user may."""
        if self.tensors:
            position = self.rng.randrange(len(self.tensors))
            tensor = self.tensors[position]
            kind = self.rng.randrange(3)
            with contextlib.suppress(RuntimeError):
                if kind == 0:
                    tensor.data = torch.zeros(self.rng.choice(SHAPES), dtype=tensor.dtype)
                elif kind == 1 and tensor.dim():
                    tensor.data = tensor.data[:1]
                else:
                    del self.tensors[position]

    # -- numbers and the rest ---------------------------------------------------------------------------------

    def integer(self) -> int:
        if self.ints and self.chance(0.85):
            return self.rng.choice(self.ints)
        return self.rng.choice(INTS if self.chance(0.3) else INTS[:4])

    def floating(self) -> float:
        return self.rng.choice(FLOATS if self.chance(0.2) else FLOATS[1:6])

    def address(self) -> int:
        """Return an address, which native code trusts: 0, or the address of a buffer."""
        return 0 if self.chance(0.1) else self.buffer.data_ptr()

    def extent(self) -> int:
        """Return a number of bytes at an address: a valid number, or one larger than any memory."""
        return self.rng.choice((-1, (1 << 57) + 1, (1 << 61), (1 << 64) - 1)) if self.chance(0.15) else self.small()

    def small(self) -> int:
        return self.rng.choice((0, 1, 1, 2, 3, 8))

    def column(self) -> tuple[Any, ...]:
        shape = [self.small() for _ in range(self.rng.randrange(3))]
        bits = self.rng.choice((8, 32, 32, 64, 16))
        row_bytes = math.prod(shape) * bits // 8
        rows = BUFFER_BYTES // max(row_bytes, 1)
        parts = [(self.address(), min(rows, self.small()), row_bytes) for _ in range(self.rng.randrange(1, 3))]
        if self.chance(0.1):
            row_bytes = self.extent()
        if self.chance(0.1):
            shape.append(self.integer())
        if self.chance(0.05):
            parts = []
        return parts, row_bytes, self.rng.choice((2, 2, 2, 1, 0, -1)), bits, shape

    def callable(self) -> Any:
        if self.chance(0.3):
            return self.anything()
        result = self.rng.choice((0, 1, [], None, torch.ones(2)))
        return self.rng.choice((lambda *_: result, lambda *_: [result], lambda *_: 1 / 0))

    def timer(self) -> Any:
        kind = self.rng.randrange(3)
        if kind == 0:
            return _host.StepTimer()
        result = self.rng.choice((0, 1, None, "x"))
        methods = {name: lambda *_: result for name in ("begin", "touch", "finish", "drop", "waited", "pause", "poll")}
        return type("Timer", (_host.StepTimer,), methods | {"reset": lambda *_: None})()

    def anything(self) -> Any:
        # Uses none of the case's tensors, because torch crashes while printing an empty storage in an error message.
        made: tuple[Callable[[], Any], ...] = (
            lambda: None,
            self.integer,
            self.floating,
            lambda: self.rng.choice(STRINGS),
            lambda: torch.ones(self.shapes[0], dtype=self.dtype),
            lambda: [torch.ones(shape) for shape in self.shapes],
            dict,
            object,
            lambda: {"x": torch.ones(2), "y": [self.integer(), ()]},
            lambda: type("Batch", (), {"shape": (1, "a"), "dtype": None, "requires_grad": 3})(),
        )
        return self.rng.choice(made)()

    def of_type(self, name: str, kind: str) -> Any:
        """Return a value for an argument."""
        if self.chance(self.wild) and kind not in TRUSTED:
            return self.anything()
        if kind.startswith("Optional["):
            return None if self.chance(0.6) else self.of_type(name, kind[len("Optional[") : -1])
        if kind.endswith(" | None"):
            return None if self.chance(0.6) else self.of_type(name, kind[: -len(" | None")])
        if " | " in kind:
            return self.of_type(name, self.rng.choice(kind.split(" | ")))
        maker = BY_TYPE.get(kind)
        if maker is not None:
            return maker(self)
        known = self.known(kind)
        return self.rng.choice(known) if known else self.anything()

    def known(self, kind: str) -> list[Any]:
        """Return the objects of a class. If there is none, make one first."""
        maker = self.makers.get(kind)
        if maker is not None and not any(type(value).__name__ == kind for value in self.objects):
            with contextlib.suppress(Exception):
                self.keep(maker.function(*self.arguments(maker)[0]))
        return [value for value in self.objects if type(value).__name__ == kind]

    def arguments(self, signature: Signature) -> tuple[list[Any], dict[str, Any]]:
        drawn = {name: self.of_type(name, kind) for name, kind in signature.arguments}
        for name, kind in signature.arguments:
            if kind == "List[Tensor]" and self.chance(0.85):  # the first list determines the others
                drawn[name] = self.tensors_like_weights(1)
                break
            if kind == "List[Tensor]":
                break
        keywords = {name: value for name, value in drawn.items() if name in signature.keywords}
        positional = [value for name, value in drawn.items() if name not in signature.keywords]
        while positional and self.chance(0.4 if len(positional) > signature.required else self.wild):
            positional.pop()
        return positional, keywords

    def keep(self, result: Any) -> None:
        """Keep a result as an argument of later calls."""
        if type(result) is int:
            self.ints.append(result)
        elif isinstance(result, Tensor):
            self.tensors.append(result)
        elif isinstance(result, (tuple, list)):
            for part in result:
                self.keep(part)
        elif type(result).__module__ == "flatout.native._host":
            self.objects.append(result)


def _is_class(signature: Signature) -> bool:
    return not signature.receiver and signature.name.rpartition(".")[2][0].isupper()


def absmax_shape(shape: tuple[int, ...]) -> tuple[int]:
    return (-(-math.prod(shape) // 256),)


def _without_memory(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


ALTERED: tuple[Callable[[Tensor], Tensor], ...] = (
    _without_memory,
    lambda t: t[..., ::2] if t.dim() else t,
    lambda t: t.mT if t.dim() > 1 else t,
    lambda t: t.to("meta"),
    lambda t: t.to_sparse() if t.dim() else t,
    lambda t: t.view(1, *t.shape).expand(3, *t.shape),
    lambda t: t.requires_grad_() if t.is_floating_point() else t,
    lambda t: torch._neg_view(t) if t.is_floating_point() else t,
    lambda t: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t,
    lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    lambda t: torch.nested.nested_tensor([t]) if t.dim() else t,
    lambda t: torch.cat([t.flatten(), t.flatten()])[1 : t.numel() + 1].view(t.shape) if t.numel() else t,
    lambda t: t * math.nan if t.is_floating_point() else t,
)

BY_TYPE: dict[str, Callable[[Values], Any]] = {
    "Tensor": Values.one_tensor,
    "List[Tensor]": Values.tensor_list,
    "int": Values.integer,
    "List[int]": lambda v: [v.integer() for _ in range(v.rng.choice((0, 0, 0, 1, v.count)))],
    "float": Values.floating,
    "List[float]": lambda v: [v.floating() for _ in range(v.rng.choice((v.numbers, v.numbers, v.numbers, 3, 1)))],
    "List[Optional[Tensor]]": lambda v: v.rng.choice(([], [], [None], [v.one_tensor()], [*v.tensor_list(), None])),
    "Sequence[float]": lambda v: [v.floating() for _ in range(v.rng.choice((0, 5, 6, 7)))],
    "bool": lambda v: v.chance(0.5),
    "str": lambda v: v.rng.choice(STRINGS if v.chance(0.2) else NAMES),
    "ScalarType": lambda v: v.rng.choice(DTYPES),
    "Device": lambda v: v.rng.choice(("cpu", "meta")),
    "Any": Values.anything,
    "object": Values.anything,
    "Address": Values.address,
    "Extent": Values.extent,
    "Handle": lambda v: 0,
    "Sequence[Transfer]": lambda v: [(v.address(), v.address(), v.extent()) for _ in range(v.small())],
    "Sequence[Column]": lambda v: [v.column() for _ in range(v.rng.choice((0, 1, 1, 1, 2)))],
    "type[Tensor]": lambda v: Tensor,
    "list[Tensor]": Values.tensor_list,
    "dict[Any, Any]": lambda v: {i: v.rng.choice((None, {}, {"exp_avg": v.one_tensor()})) for i in range(v.small())},
    "StepTimer": Values.timer,
    "Callable[[int], int]": Values.callable,
    "Callable[[Any], list[Tensor]]": Values.callable,
    "Callable[[str], AbstractContextManager[object]]": Values.callable,
    "dict[str, Any]": lambda v: {"_is_profiler_enabled": v.chance(0.5)},
}
