"""Average of gradients over all ranks, by a hidden ``DistributedDataParallel``."""

from __future__ import annotations

import itertools
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatout.core.gradients import trained_parameters
from flatout.core.out_of_memory import ran_out_of_memory
from flatout.distributed.agreement import Agreement, OutOfStep, RankFailure
from flatout.distributed.reducer import AllReduces, ReducerOptions
from flatout.distributed.step_clock import StepClock

T = TypeVar("T")

BUCKET_BYTES = 25 << 20
"""Bytes of gradients that one all-reduce averages after a backward: the default of DDP."""


class UnusedParameters(RuntimeError):
    """Other parameters got a gradient in a backward than DDP expects."""


class _Call(nn.Module):
    """Module for DDP: holds the trained modules, and runs any function that calls them."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call(*args, **kwargs)


class GradientSync:
    """Gradients of a training, averaged over all ranks while the backward computes them.

    A call inside :meth:`run` takes part in the backward's all-reduces. Any other backward leaves the gradients of this
    rank, for :meth:`reduce`. All ranks must make the same calls in the same order, and set the same ``options``.

    A rank that fails in :meth:`run` or in the backward still owes the others its part of the all-reduces.
    :meth:`averaged` pays it with zeros. After that, :meth:`reset` on all ranks makes the next step possible.

    Args:
        modules: the trained modules, on the device of this rank. Their parameters and buffers become those of rank 0.
        ranks: agreement of all ranks.
        clock: measures the steps of this rank.

    Attributes:
        options: options of the reducer. The next call of ``run`` or ``refresh`` applies a change.
        is_inside: True while a call inside ``run`` or ``alone`` runs.
        clock: the argument.
        finds_unused: True if a parameter may get no gradient in a step. This costs a walk through the graph, unless the
            graph is static.
    """

    def __init__(self, modules: Sequence[nn.Module], ranks: Agreement, clock: StepClock) -> None:
        self.options = ReducerOptions()
        self.is_inside = False
        self.clock = clock
        self.finds_unused = False
        self._modules = list(modules)
        self._ranks = ranks
        self._ddp: Any = None
        self._made_for: tuple[ReducerOptions, bool] | None = None
        self._make(broadcasts=True)

    def _make(self, *, broadcasts: bool = False) -> None:
        """Replace the DDP. Its buckets are freed before the new one allocates any."""
        self.remove()
        options, made_for = self.options, self._wanted
        self._ddp = DistributedDataParallel(
            _Call(self._modules),
            init_sync=broadcasts,
            bucket_cap_mb=None if options.bucket_bytes is None else options.bucket_bytes / 2**20,
            find_unused_parameters=self._searches_graph,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
        )
        elements = sum(p.numel() for p in trained_parameters(self._modules))
        self._all_reduces = launches = AllReduces(elements, self._ranks.size, options.compression, self.clock)
        self._ddp.register_comm_hook(None, lambda state, bucket: launches.launch(bucket))
        self._made_for, self._strides = made_for, self._present_strides

    @property
    def _wanted(self) -> tuple[ReducerOptions, bool]:
        return self.options, self.finds_unused

    @property
    def _searches_graph(self) -> bool:
        return self.finds_unused and not self.options.static_graph

    @property
    def _present_strides(self) -> list[tuple[int, ...]]:
        return [p.stride() for module in self._modules for p in module.parameters()]

    @property
    def bucket_bytes(self) -> int:
        """Bytes of DDP's buckets, which hold a copy of every gradient."""
        return sum(p.nbytes for p in trained_parameters(self._modules))

    @property
    def steps_to_settle(self) -> int:
        """Steps until the DDP has its full speed.

        DDP learns the order of the gradients in the first step, and in the second one if the graph is static. The next
        step begins with new buckets in this order. A DDP that searches the graph keeps its first buckets.
        """
        needed = 1 if self._searches_graph else 3 if self.options.static_graph else 2
        return max(0, needed - (self._all_reduces.steps if self._made_for == self._wanted else 0))

    def refresh(self) -> bool:
        """Make a new DDP if the options or the strides of parameters have changed.

        All ranks must call this together. The technique channels_last changes strides, and DDP then copies gradients.

        Returns:
            True if there is a new one.

        Raises:
            RankFailure: memory ran out on some of the ranks. The next call tries again.
        """
        if self._made_for == self._wanted and self._strides == self._present_strides:
            return False
        try:
            with self._ranks.attempt():
                self._make()
        except Exception:
            self.remove()
            raise
        return True

    def allow_unused(self, error: RuntimeError) -> bool:
        """Allow any parameters without gradients from now on, if a step has failed on some rank because of one.

        All ranks must call this after a failed step.

        Args:
            error: error of this rank in that step.

        Returns:
            True if the step can be taken again.
        """
        if self._searches_graph or not isinstance(error, (RankFailure, UnusedParameters)):
            return False
        is_own = isinstance(error, UnusedParameters) or isinstance(error.__cause__, UnusedParameters)
        if self._ranks.all_hold(not is_own):
            return False
        self.finds_unused = True
        self.options = replace(self.options, static_graph=False)
        return True

    def run(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function that calls the model. The backward from its result averages the gradients over all ranks."""
        if self.is_inside:
            return call(*args, **kwargs)
        ddp = self._current()
        self._all_reduces.begin()
        with self.alone():
            return ddp(call, args, kwargs)

    def _current(self) -> Any:
        """Return a DDP with the present options."""
        if self._made_for != self._wanted:
            self.refresh()
        return self._ddp

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Make all calls of the model inside the block plain ones, whose backward leaves the gradients of this rank."""
        before, self.is_inside = self.is_inside, True
        try:
            yield
        finally:
            self.is_inside = before

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for forward and backward of a batch that is not the last of an update, as DDP's."""
        return self._current().no_sync()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Average the gradients of a ``run`` and its backward inside the block, also if the block fails on this rank.

        Raises:
            UnusedParameters: some parameters got no gradient, or the graph is not static.
        """
        try:
            yield
            if not self._all_reduces.is_complete:
                raise UnusedParameters("some parameters got no gradient in this step")
        except Exception as error:
            if ran_out_of_memory(error):
                traceback.clear_frames(error.__traceback__)  # they hold the graph, and zeros need memory
            self._complete()
            if self.options.static_graph and "training graph has changed" in str(error):
                raise UnusedParameters("the parameters that get gradients have changed") from error
            raise

    def _complete(self) -> None:
        """Take part in the remaining all-reduces with zeros, after a failure on this rank. The others wait for them.

        Raises:
            OutOfStep: there is no memory for zeros.
        """
        all_reduces = self._all_reduces
        if not all_reduces.is_complete:
            # The first backward of a static graph ends with all of its all-reduces, after that of the used parameters.
            if self.options.static_graph and all_reduces.steps == 0 and not all_reduces.started:
                self._ddp._match_unused_params_allreduce()
            try:
                zeros = self._ddp.reducer._get_zeros_like_grad_buckets()
            except RuntimeError as error:
                raise OutOfStep(f"no memory is left to complete the step on the other ranks: {error}") from error
            for bucket in zeros[len(all_reduces.started) :]:
                all_reduces.launch(bucket)
            if self._searches_graph:
                self._ddp._match_unused_params_allreduce()
        for mean in all_reduces.started:  # NCCL still writes to buckets that the next backward fills
            mean.wait()

    def reset(self) -> None:
        """Forget a backward that failed on some rank. All ranks must call this, before their next ``run``."""
        self._all_reduces.forget()
        if self._ddp is not None:
            self._ddp._update_process_group(self._ddp.process_group)
        if self.options.static_graph:
            self._made_for = None  # the first step of a new DDP shows again what is static

    def reduce(self) -> None:
        """Average the gradients of steps outside of ``run``, and broadcast the buffers of rank 0.

        A parameter without a gradient on some ranks counts as zeros there. Without one on any rank, it stays so.

        Raises:
            RankFailure: a rank failed, for example out of memory. No rank has changed a gradient that it had.
        """
        parameters = trained_parameters(self._modules)
        while True:
            has_gradient = bytes(p.grad is not None for p in parameters)
            # Agreed on the host, so that nothing waits for a GPU. Nothing is allocated after the first collective.
            with self._ranks.attempt() as message:
                flats = [
                    (grads, torch.cat([grad.reshape(-1) for grad in grads]).div_(self._ranks.size))
                    for grads in _chunks([p.grad for p in parameters if p.grad is not None])
                ]
                message.values = [float(zlib.crc32(has_gradient))]
            if all(values == message.received[0] for values in message.received):
                break
            with self._ranks.attempt():
                for p, *of_ranks in zip(parameters, *self._ranks.every(has_gradient), strict=True):
                    if any(of_ranks) and p.grad is None:
                        p.grad = torch.zeros_like(p)
        started = [dist.all_reduce(flat, async_op=True) for _, flat in flats]
        for (grads, flat), work in zip(flats, started, strict=True):
            work.wait()
            for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(mean.view(grad.shape))
        self.broadcast_buffers()

    def broadcast_buffers(self) -> None:
        """Make the buffers of all ranks those of rank 0, as every call inside ``run`` does first."""
        buffers, group = list(nn.ModuleList(self._modules).buffers()), dist.group.WORLD
        if buffers and group is not None:
            dist._broadcast_coalesced(group, buffers, BUCKET_BYTES, 0)

    def relative(self, weight: Tensor) -> Tensor:
        """Return a weight relative to its mean over all ranks, 0-dim; 1 if all weights are 0."""
        mean = self.mean(weight)
        return torch.where(mean == 0, torch.ones_like(mean), weight / mean)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a tensor over all ranks, without a wait of the host for a CUDA device."""
        value = value.clone()
        dist.all_reduce(value)
        return value.div_(self._ranks.size)

    def remove(self) -> None:
        """Remove the hooks of DDP from the parameters, and free its buckets."""
        if self._ddp is not None:
            self._ddp._remove_autograd_hooks()
        self._ddp = self._made_for = None


def _chunks(grads: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield gradients of one dtype and device together, up to ``BUCKET_BYTES`` in one list."""
    for _, alike in itertools.groupby(grads, lambda grad: (grad.dtype, grad.device)):
        chunk: list[Tensor] = []
        size = 0
        for grad in alike:
            chunk.append(grad)
            size += grad.nbytes
            if size >= BUCKET_BYTES:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk
