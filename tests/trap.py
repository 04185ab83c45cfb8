"""Layer that runs out of memory where a test requests it."""

import torch
from torch import nn

MESSAGE = "CUDA out of memory. Tried to allocate 1.00 GiB."


def out_of_memory():
    return torch.OutOfMemoryError(MESSAGE)


class Trap(nn.Module):
    """Identity that fails on batches above a limit.

    FLOPs are counted under a dispatch mode, at any time that training allows. Such passes neither fail nor are
    recorded.

    Attributes:
        sprung: number of failures.
        seen: samples of each forward.
    """

    def __init__(self):
        super().__init__()
        self.where, self.limit, self.spared, self.error = "", 0, 0, out_of_memory
        self.sprung, self.seen = 0, []

    def arm(self, where, limit, spared=0, error=out_of_memory):
        """Fail in the forward or backward of more than ``limit`` samples.

        The first ``spared`` passes of this size do not fail.
        """
        self.where, self.limit, self.spared, self.error = where, limit, spared, error
        self.sprung, self.seen = 0, []

    def passes(self, where, samples):
        if where != self.where or samples <= self.limit:
            return
        if self.spared:
            self.spared -= 1
            return
        self.sprung += 1
        raise self.error()

    def forward(self, x):
        if torch._C._len_torch_dispatch_stack():
            return x
        self.seen.append(len(x))
        self.passes("forward", len(x))
        return _Passed.apply(x if x.requires_grad else x.detach().requires_grad_(), self)


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, trap):
        ctx.trap = trap
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.trap.passes("backward", len(grad))
        return grad, None
