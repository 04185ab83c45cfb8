"""Comparison of a batch computed whole with the same batch computed in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flatout.core.batches import thinned
from flatout.core.effects import Containment
from flatout.core.errors import free_memory, parameters_of, ran_out_of_memory
from flatout.core.instance_class import as_written
from flatout.core.random_state import RandomState
from flatout.core.snapshot import Snapshot
from flatout.training.micro_batches import Buffers, Part
from flatout.training.stepper import Stepper
from flatout.training.tolerance import ALLOWED, apart, compute_dtype

STATEMENT = "the loss is a mean over samples, or over the weights of loss_weight"
"""Assumption of batches that are computed in parts."""


def why_parts_differ(stepper: Stepper, batch: Any, samples: int) -> str:
    """Return how parts of a batch differ from the whole batch, as a clause; empty if they agree within rounding.

    The loss and the gradients are compared. The parts are thirds, because losses of halves are equal more often by
    chance. They have the shares that training would give them, and draw the random numbers that their samples draw in
    the whole batch. BatchNorm is in eval mode, because its effect is known. A batch that does not fit is halved first.

    Gradients, buffers, modes, random generators and Python state are as before after the call.

    Args:
        stepper: runs the steps, with an optimizer.
        batch: a batch on the device, which can be split.
        samples: number of its samples to compare, evenly spread. Fewer are compared if these do not fit in memory.
    """
    saved = Snapshot()
    saved.add_data(stepper.spec.code)
    with _settled(stepper), Containment().on():
        while samples >= 2:
            try:
                return _difference(stepper, thinned(batch, samples), samples)
            except RuntimeError as error:
                if not ran_out_of_memory(error):
                    raise
            finally:
                saved.restore()
            free_memory(stepper.spec.device)  # here the error is freed, with the frames that hold the graph
            samples //= 2
    return "" if stepper.micro_batches.weighs_right else "memory does not hold two samples, whose parts would show it"


def _difference(stepper: Stepper, batch: Any, samples: int) -> str:
    micro, draws = stepper.micro_batches, _SameDraws()
    if any(p._post_accumulate_grad_hooks for p in _parameters(stepper)):
        return "hooks use the gradients of parameters while the backward runs"
    with draws:
        whole = _results(stepper, [Part(batch, samples)], draws)
        micro.size = -(-samples // 3)
        parts = _results(stepper, micro.parts(batch), draws)
    allowed = max(ALLOWED[dtype].outputs for dtype in {compute_dtype(stepper.spec.model), *draws.dtypes})
    for what, old, new in zip(("the loss", "gradients"), whole, parts, strict=True):
        by, _ = apart(old, new)
        if not by <= allowed:
            return f"{what} of parts of a batch differ by {by:.2g} times their size, for {samples} samples"
    return ""


def _results(stepper: Stepper, parts: Sequence[Part], draws: _SameDraws) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the loss and the gradients of a batch in parts, by name."""
    parameters, buffers, random = _parameters(stepper), Buffers(stepper.micro_batches.slots, None), None
    losses, first = [], 0
    for part in parts:
        random = random or RandomState.capture(stepper.spec.code)
        draws.begin(first, first + part.samples)
        loss = stepper._loss_of(part, stepper.objective.loss)
        if loss.requires_grad:
            loss.backward()
        losses.append(loss.detach())
        first += part.samples
        random.restore()
        buffers.put_back()
    gradients = {str(i): p.grad.to_dense() for i, p in enumerate(parameters) if p.grad is not None}
    for p in parameters:
        p.grad = None
    return {"loss": torch.stack(losses).sum()}, gradients


def _parameters(stepper: Stepper) -> list[Tensor]:
    """Return all parameters that get gradients, each once."""
    held = [] if stepper.spec.optimizer is None else parameters_of(stepper.spec.optimizer)
    return list({id(p): p for p in (*held, *stepper.spec.trained)}.values())


@contextmanager
def _settled(stepper: Stepper) -> Iterator[None]:
    """Run the plain model in its own precision inside the block, with BatchNorm in eval mode and without gradients."""
    micro, parameters = stepper.micro_batches, _parameters(stepper)
    gradients, size = [p.grad for p in parameters], micro.size
    norms = [
        m for root in stepper.spec.modules for m in root.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
    ]
    modes = [norm.training for norm in norms]
    for p in parameters:
        p.grad = None
    for norm in norms:
        norm.training = False
    try:
        with as_written(stepper.spec.model):
            yield
    finally:
        micro.size = size
        for norm, training in zip(norms, modes, strict=True):
            norm.training = training
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient


class _SameDraws(TorchDispatchMode):
    """Dispatch mode in which a part of a batch draws the numbers that its samples drew in the whole batch.

    The first part that begins is the whole batch. Kernels that draw numbers inside run without dropout.

    Attributes:
        dtypes: the dtypes of 16 bits in which operators computed, for example under the user's own autocast.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self._drawn: list[list[Tensor]] = []
        self._samples = self._next = 0
        self._range = 0, 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run."""
        return True

    def begin(self, first: int, end: int) -> None:
        """Begin a part with the samples from ``first`` to ``end``."""
        self._range, self._next = (first, end), 0
        self._samples = self._samples or end
        self._is_whole = not self._drawn and end == self._samples

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            result = func(*args, **keywords)
            leaves = tree_leaves(result)
            self.dtypes.update(t.dtype for t in leaves if isinstance(t, Tensor) and t.dtype in _NARROW)
            return result
        names = [argument.name for argument in func._schema.arguments]
        if any(name in ("dropout", "dropout_p") for name in names):  # attention and recurrent layers
            given = dict(zip(names, args, strict=False)) | keywords
            return func(**{name: 0.0 if name in ("dropout", "dropout_p") else v for name, v in given.items()})
        result = func(*args, **keywords)
        mask = result[1] if func is torch.ops.aten.native_dropout.default else result
        found = [t for t in tree_leaves(mask) if isinstance(t, Tensor)]
        if self._is_whole:
            self._drawn.append([t.clone() for t in found])
        else:
            for t, drawn in zip(found, self._drawn[self._next], strict=True):
                t.copy_(self._of_samples(drawn, t))
            self._next += 1
            if mask is not result:
                return args[0] * mask * (0.0 if args[1] == 1 else 1 / (1 - args[1])), mask
        return result

    def _of_samples(self, drawn: Tensor, wanted: Tensor) -> Tensor:
        """Return the numbers of the present part's samples."""
        if drawn.shape == wanted.shape:
            return drawn
        first, end = self._range
        each = drawn.size(0) // self._samples
        return drawn[each * first : each * end]


_NARROW = torch.float16, torch.bfloat16
