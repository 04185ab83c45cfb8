"""Average of gradients over all ranks, by a hidden ``DistributedDataParallel``."""

from __future__ import annotations

import itertools
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from flatout.core.errors import ran_out_of_memory
from flatout.core.gradients import trained_parameters
from flatout.distributed.agreement import Agreement, OutOfStep, RankFailure
from flatout.distributed.process_group import gradient_group
from flatout.distributed.step_clock import StepClock

T = TypeVar("T")

BUCKET_BYTES = 25 << 20
"""Bytes of gradients that one all-reduce averages, as DDP's default."""

EQUAL_BUCKETS = {"cpu": BUCKET_BYTES}
"""Bytes of every bucket, by type of device. On other devices the first bucket of a backward has 1 MiB, as in DDP.

The all-reduce of a small first bucket begins early in the backward. On a CPU it slows the backward down.
"""


MOST_TO_SETTLE = 3
"""Largest number of steps until a DDP reaches its full speed."""

LATE_SECONDS = 0.05
"""Seconds after which all-reduces of a failed step, which all other ranks have completed, write to no bucket."""


class UnusedParameters(RuntimeError):
    """Error of a backward in which other parameters got a gradient than DDP expects."""


class _Call(nn.Module):
    """Module for DDP: holds the trained modules, and runs a function that calls them."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, call: Callable[[], Any]) -> Any:
        return call()


class GradientSync:
    """Gradients of a training, averaged over all ranks while the backward computes them.

    A call inside :meth:`run` takes part in the backward's all-reduces. Any other backward leaves the gradients of this
    rank, for :meth:`reduce`. All ranks must make the same calls in the same order, and set the same ``options``.

    A rank that fails in :meth:`run` or in the backward still owes the others its part of the all-reduces.
    :meth:`averaged` pays it with zeros. After that, :meth:`reset` on all ranks makes the next step possible.

    Args:
        modules: the trained modules, on the device of this rank. Rank 0 broadcasts their parameters and buffers.
        ranks: agreement of all ranks.
        clock: measures the steps of this rank.
        scripts: a script's own DDP around the modules, for calls of the DDP in ``run``. There is no hidden one then,
            and its options do not change.

    Attributes:
        options: options of the reducer. The next call of ``run`` or ``refresh`` applies a change.
        is_inside: True while a call inside ``run`` or ``alone`` runs.
        clock: the argument.
        finds_unused: True if a parameter may get no gradient in a step. DDP then searches the graph, unless the graph
            is static.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        ranks: Agreement,
        clock: StepClock,
        scripts: DistributedDataParallel | None = None,
    ) -> None:
        self.options = ReducerOptions(bucket_bytes=EQUAL_BUCKETS.get(clock.device.type))
        self.is_inside = False
        self.clock = clock
        self.finds_unused = False
        self._modules = list(modules)
        self._ranks = ranks
        self._scripts = scripts
        self._group: Any = gradient_group() if scripts is None else scripts.process_group
        self._backend: Any = self._group._get_backend(clock.device)
        self._ddp: Any = None
        self._made_for: tuple[ReducerOptions, bool] | None = None
        self._steps = 0  # complete steps of this DDP
        self._first: int | None = None  # number of the step's first all-reduce, or None before the forward
        self._launches: int | None = None  # all-reduces of a step, or None while their number may still change
        if scripts is None:
            self._make(broadcasts=True)
        else:
            self.options = ReducerOptions(static_graph=scripts.static_graph)
            self.finds_unused = scripts.find_unused_parameters
            self._ddp, self._made_for, self._steps = scripts, self._wanted, MOST_TO_SETTLE

    def _make(self, *, broadcasts: bool = False) -> None:
        """Replace the DDP. Its buckets are freed before the new one allocates any."""
        self.remove()
        options, made_for = self.options, self._wanted
        self._ddp = DistributedDataParallel(
            _Call(self._modules),
            process_group=self._group,
            init_sync=broadcasts,
            bucket_cap_mb=None if options.bucket_bytes is None else options.bucket_bytes / 2**20,
            find_unused_parameters=self._searches_graph,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
        )
        if options.is_compressed:
            # In a build without CUDA, DDP refuses torch's hook by its name, though gloo averages bfloat16 (torch 2.13).
            self._ddp.register_comm_hook(self._group, lambda group, bucket: bf16_compress_hook(group, bucket))
        self._made_for, self._strides, self._steps, self._launches = made_for, self._present_strides, 0, None

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
        needed = 1 if self._searches_graph else MOST_TO_SETTLE if self.options.static_graph else 2
        return max(0, needed - (self._steps if self._made_for == self._wanted else 0))

    def refresh(self) -> bool:
        """Make a new DDP if the options or the strides of parameters have changed.

        All ranks must call this together. The technique channels_last changes strides, and DDP then copies gradients.

        Returns:
            True if there is a new one.

        Raises:
            RankFailure: memory ran out on some of the ranks. The next call tries again.
        """
        if self._scripts is not None or (self._made_for, self._strides) == (self._wanted, self._present_strides):
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

        def begun() -> T:
            self._first = self._launched  # DDP has broadcast the buffers
            return call(*args, **kwargs)

        if self._scripts is None:
            with self.alone():
                return ddp(begun)
        self.broadcast_buffers()
        with self._syncing(True):
            return begun()

    def when_certain(self, loss: Tensor, then: Callable[[], None]) -> None:
        """Call a function when a backward can no longer fail on this rank, or never.

        This moment is the end of this rank's own backward, which the clock marks. After it, DDP only waits for the
        other ranks, and copies gradients.
        """

        def ready() -> None:
            self.clock.ready()
            if self._first is not None and self._launched - self._first == self._launches:
                then()

        if loss.grad_fn is not None:
            # The callbacks of a backward run after it, in the order in which they were queued. So this callback runs
            # before the callbacks of DDP.
            loss.grad_fn.register_prehook(lambda _: Variable._execution_engine.queue_callback(ready))

    @property
    def _launched(self) -> int:
        """Number of collectives that this rank has launched in the group. In a step, only DDP uses the group."""
        return self._backend._get_sequence_number_for_group()

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
            with nullcontext() if before else self._syncing(False):
                yield
        finally:
            self.is_inside = before

    @contextmanager
    def _syncing(self, in_backward: bool) -> Iterator[None]:
        """Turn the averaging of gradients by the script's DDP on or off for the calls inside the block."""
        scripts: Any = self._scripts
        if scripts is None:
            yield
            return
        before = self.is_inside, scripts.require_backward_grad_sync, scripts.require_forward_param_sync
        self.is_inside, scripts.require_backward_grad_sync, scripts.require_forward_param_sync = (
            True,
            in_backward,
            False,
        )
        try:
            yield
        finally:
            self.is_inside, scripts.require_backward_grad_sync, scripts.require_forward_param_sync = before

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context for forward and backward of a batch that is not the last of an update, as DDP's."""
        return self._current().no_sync()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Average the gradients of a ``run`` and its backward inside the block, also if the block fails on this rank.

        Raises:
            UnusedParameters: some parameters got no gradient, or the graph is not static.
        """
        self._first = None
        try:
            yield
            if not self._is_complete:
                raise UnusedParameters("some parameters got no gradient in this step")
        except Exception as error:
            if ran_out_of_memory(error):
                traceback.clear_frames(error.__traceback__)  # they hold the graph, and zeros need memory
            self._complete()
            if self.options.static_graph and "training graph has changed" in str(error):
                raise UnusedParameters("the parameters that get gradients have changed") from error
            raise
        if self._first is not None:
            if self._launches is None and self.steps_to_settle == 0 and not self.finds_unused:
                self._launches = self._launched - self._first
            self._steps += 1

    @property
    def _is_complete(self) -> bool:
        """True if all gradients of the step are averaged, or if it has not begun."""
        if self._first is None:
            return True
        if self._launched == self._first:
            return False
        try:
            self._ddp._check_reducer_finalized()
        except RuntimeError:
            return False
        return True

    def _complete(self) -> None:
        """Take part in the remaining all-reduces with zeros, after a failure on this rank. The others wait for them.

        Raises:
            OutOfStep: there is no memory for zeros.
        """
        if self._first is None or self._is_complete:
            return
        reducer, launched = self._ddp.reducer, self._launched - self._first
        # In the first backward of a static graph, all all-reduces come at the end. The first one is the all-reduce of
        # the used parameters.
        if self.options.static_graph and self._steps == 0 and self._scripts is None:
            if launched == 0:
                self._ddp._match_unused_params_allreduce()
            launched = max(0, launched - 1)
        try:
            zeros = reducer._get_zeros_like_grad_buckets()
        except RuntimeError as error:
            raise OutOfStep("no memory is left to complete the step on the other ranks") from error
        means = [reducer._run_comm_hook(bucket) for bucket in zeros[launched:]]
        if self._searches_graph and launched <= len(zeros):
            self._ddp._match_unused_params_allreduce()
        for mean in means:
            mean.wait()

    def reset(self) -> None:
        """Discard a step that failed on some rank. All ranks must call this, before their next ``run``.

        The next step has a new DDP, since its all-reduces may still write to the buckets of this one. A script's DDP
        makes new buckets.
        """
        if self._scripts is None:
            self.remove()
        else:
            time.sleep(LATE_SECONDS)
            self._scripts._update_process_group(self._group)
            self._steps, self._launches = 0, None

    def reduce(self) -> None:
        """Average the gradients of steps outside of ``run``, and broadcast the buffers of rank 0.

        A parameter without a gradient on some ranks counts as zeros there. A parameter without a gradient on all ranks
        gets none.

        Raises:
            RankFailure: a rank failed, for example out of memory. No rank has changed a gradient that it had.
        """
        parameters = trained_parameters(self._modules)
        while True:
            has_gradient = bytes(p.grad is not None for p in parameters)
            # The ranks agree on the host, so that no rank waits for a GPU. No memory is allocated after the first
            # collective.
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
        started = [dist.all_reduce(flat, group=self._group, async_op=True) for _, flat in flats]
        for (grads, flat), work in zip(flats, started, strict=True):
            work.wait()
            for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(mean.view(grad.shape))
        self.broadcast_buffers()

    def broadcast_buffers(self) -> None:
        """Broadcast the buffers of rank 0 to all ranks, as every call inside ``run`` does first."""
        buffers = list(nn.ModuleList(self._modules).buffers())
        if buffers and (self._scripts is None or self._scripts.broadcast_buffers):
            dist._broadcast_coalesced(self._group, buffers, BUCKET_BYTES, 0)

    def relative(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean of a weight over all ranks, and the weight relative to it, or 1 if all weights are 0."""
        mean = self.mean(weight)
        return mean, torch.where(mean == 0, torch.ones_like(mean), weight / mean)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a tensor over all ranks, without a wait of the host for a CUDA device."""
        value = value.clone()
        dist.all_reduce(value, group=self._group)
        return value.div_(self._ranks.size)

    def remove(self) -> None:
        """Remove the hooks of DDP from the parameters, and free its buckets."""
        if self._scripts is not None:
            return
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


@dataclass(frozen=True)
class ReducerOptions:
    """Options of DDP's reducer. A change of an option requires a new DDP.

    Attributes:
        bucket_bytes: bytes of gradients that one all-reduce averages. None means 1 MiB for the first bucket of a
            backward, and 25 MiB for the others.
        gradient_as_bucket_view: True if gradients are views of the buckets, so that DDP need not copy them.
        static_graph: True if every step uses the parameters of the first step, so that DDP need not search the graph
            for unused parameters.
        is_compressed: True if all-reduces average gradients in bfloat16.
    """

    bucket_bytes: int | None = None
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    is_compressed: bool = False
