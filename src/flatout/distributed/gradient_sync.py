"""Average of gradients over all ranks, by a hidden ``DistributedDataParallel``."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flatout.distributed.agreement import Agreement, OutOfStep, RankFailure

T = TypeVar("T")

BUCKET_BYTES = 25 << 20
"""Bytes of gradients that one all-reduce averages after a backward: the default of DDP."""


class UnusedParameters(RuntimeError):
    """Some parameters got no gradient in a backward, and DDP still waits for these."""


class _Call(nn.Module):
    """Module for DDP: holds the trained modules, and runs any function that calls them."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call(*args, **kwargs)


class _Progress:
    """Progress of a backward. DDP's hook refers to it, and must not refer to the DDP, which would never be freed.

    Attributes:
        started: means of the buckets whose all-reduce has started, in this order.
        is_complete: True if the last bucket was among them.
    """

    def __init__(self, ranks: int) -> None:
        self.started: list[torch.futures.Future[Tensor]] = []
        self.is_complete = True
        self._ranks = ranks

    def begin(self) -> None:
        self.started, self.is_complete = [], False

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        mean = bucket.buffer().div_(self._ranks)  # before the sum, which may overflow 16 bits
        summed = dist.all_reduce(mean, async_op=True).get_future()
        self.started.append(summed.then(lambda future: future.value()[0]))
        self.is_complete = bucket.is_last()
        return self.started[-1]


class GradientSync:
    """Gradients of a training, averaged over all ranks while the backward computes them.

    A call inside :meth:`run` takes part in the backward's all-reduces. Any other backward leaves the gradients of this
    rank, for :meth:`reduce`. All ranks must make the same calls in the same order.

    A rank that fails in :meth:`run` or in the backward still owes the others its part of the all-reduces:
    :meth:`complete` pays it with zeros. After that, :meth:`reset` on all ranks makes the next step possible.

    Args:
        modules: the trained modules, on the device of this rank. Their parameters and buffers become those of rank 0.
        ranks: agreement of all ranks.

    Attributes:
        is_inside: True while a call inside ``run`` or ``alone`` runs.
        finds_unused: True if a parameter may get no gradient in a step. This costs a walk through the graph.
    """

    def __init__(self, modules: Sequence[nn.Module], ranks: Agreement) -> None:
        self.is_inside = False
        self._modules = list(modules)
        self._ranks = ranks
        self._make(find_unused=False, broadcasts=True)

    def _make(self, *, find_unused: bool, broadcasts: bool) -> None:
        self.finds_unused = find_unused
        self._strides = self._present_strides
        self._ddp = DistributedDataParallel(
            _Call(self._modules), find_unused_parameters=find_unused, init_sync=broadcasts
        )
        self._progress = progress = _Progress(self._ranks.size)
        self._ddp.register_comm_hook(None, lambda state, bucket: progress.reduce(bucket))

    @property
    def _present_strides(self) -> list[tuple[int, ...]]:
        return [p.stride() for module in self._modules for p in module.parameters()]

    def refresh(self) -> bool:
        """Make a new DDP if parameters have other strides than before, as with channels_last. The old one would copy.

        Returns:
            True if there is a new one.
        """
        has_changed = self._strides != self._present_strides
        if has_changed:
            self.remove()
            self._make(find_unused=self.finds_unused, broadcasts=False)
        return has_changed

    def allow_unused(self, error: RuntimeError) -> bool:
        """Allow parameters without gradients from now on, if a step has failed on some rank because of one.

        All ranks must call this after a failed step.

        Args:
            error: error of this rank in that step.

        Returns:
            True if the step can be taken again.
        """
        if self.finds_unused or not isinstance(error, (RankFailure, UnusedParameters)):
            return False
        is_own = isinstance(error, UnusedParameters) or isinstance(error.__cause__, UnusedParameters)
        if self._ranks.all_hold(not is_own):
            return False
        self.remove()
        self._make(find_unused=True, broadcasts=False)
        return True

    def run(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function that calls the model. The backward from its result averages the gradients over all ranks."""
        self._progress.begin()
        with self.alone():
            return self._ddp(call, args, kwargs)

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
        return self._ddp.no_sync()

    def check(self) -> None:
        """Check that a backward has averaged all gradients.

        Raises:
            UnusedParameters: some parameters got no gradient.
        """
        if not self._progress.is_complete:
            raise UnusedParameters("some parameters got no gradient in this step")

    def complete(self) -> None:
        """Add zeros to the all-reduces that the other ranks still wait for, after a failure on this rank.

        Raises:
            OutOfStep: there is no memory for zeros.
        """
        progress = self._progress
        if not progress.is_complete:
            try:
                zeros = self._ddp.reducer._get_zeros_like_grad_buckets()
            except RuntimeError as error:
                raise OutOfStep(f"no memory is left to complete the step on the other ranks: {error}") from error
            for bucket in zeros[len(progress.started) :]:
                progress.reduce(bucket)
            if self.finds_unused:
                self._ddp._match_unused_params_allreduce()
        for mean in progress.started:  # NCCL still writes to buckets that the next backward fills
            mean.wait()

    def reset(self) -> None:
        """Forget a backward that failed on some rank. All ranks must call this, before their next ``run``."""
        self._ddp._update_process_group(self._ddp.process_group)
        self._progress.is_complete = True

    def reduce(self) -> None:
        """Average the gradients of steps outside of ``run``, and broadcast the buffers of rank 0.

        A parameter without a gradient on some ranks counts as zeros there. Without one on any rank, it stays so.

        Raises:
            RankFailure: a rank failed, for example out of memory. No rank has changed a gradient that it had.
        """
        unique = {id(p): p for module in self._modules for p in module.parameters() if p.requires_grad}
        parameters = list(unique.values())
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
        if self._ddp.modules_buffers:
            self._ddp._sync_buffers()

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
        """Remove the hooks of DDP from the parameters."""
        self._ddp._remove_autograd_hooks()


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
