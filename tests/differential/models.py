"""Models with everything that a training step may change: parameters, buffers, hooks, generators, shared parts."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

CLASSES, WORDS, WIDTH = 3, 11, 8


# ---- parts of a model on vectors: [N, WIDTH] -> [N, WIDTH] ---------------------------------------------------


class Counting(nn.Module):
    """Module that writes to one buffer, replaces another, and draws a third that no ``state_dict`` holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("drawn", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        self.written += 1
        self.replaced = self.replaced + len(x)
        self.drawn.normal_()
        return x + 0.01 * self.drawn


class Averaging(nn.Module):
    """Module with an exponential average of its inputs, and with a scale that the first batch initializes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("is_set", torch.tensor(False))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            with torch.no_grad():
                self.scale.copy_(1 / (x.detach().std(0, correction=0) + 0.5))
            self.is_set.fill_(True)
        self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.1)
        return (x - self.mean) * self.scale


class Observer(nn.Module):
    """Module that resizes its buffers in place at the first batch, as quantization observers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.empty(0))
        self.register_buffer("high", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        low, high = (t.to(self.low.dtype) for t in (x.detach().amin(0), x.detach().amax(0)))
        if self.low.numel() == 0:
            self.low.resize_(low.shape).copy_(low)
            self.high.resize_(high.shape).copy_(high)
        torch.minimum(self.low, low, out=self.low)
        torch.maximum(self.high, high, out=self.high)
        return x.clamp(self.low.min() - 1, self.high.max() + 1)


class OwnGenerator(nn.Module):
    """Module that draws noise from its own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)
        self.scale = nn.Parameter(torch.full((1,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.randn(x.shape, generator=self.generator, dtype=x.dtype)


class SideEffects(nn.Module):
    """Module that changes Python attributes in ``forward``. The prefix ``their_`` marks them as the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.their_calls = 0
        self.their_last: Any = None
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.their_calls += 1
        self.their_last = x.detach()
        return self.linear(x)


class Twice(nn.Module):
    """Module under two names, called twice, and one buffer in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = self.one
        self.norms = nn.ModuleList([nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)])
        self.norms[1]._buffers["running_mean"] = self.norms[0].running_mean
        self.none = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        return self.norms[1](self.other(self.norms[0](self.one(x)).relu()))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x.float()) * self.filter, n=WIDTH).to(x.dtype)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Odd(nn.Module):
    """Module with unusual parameters: scalar, empty, transposed, and unused."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.unused = nn.Parameter(torch.randn(3))
        self.listed = nn.ParameterList([torch.randn(WIDTH), torch.randn(1)])
        self.register_parameter("absent", None)
        self.register_buffer("expanded", torch.tensor([0.5]).expand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.transposed * self.scalar + self.empty.sum()
        return x * self.expanded + self.listed[0] * self.listed[1]


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


class WithExtraState(nn.Module):
    """Module with extra state in its ``state_dict``, an autograd function, and a function in place of a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.activate = functional.silu

    def get_extra_state(self) -> dict[str, Any]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state == {"version": 3}

    def forward(self, x: Tensor) -> Tensor:
        return Doubling.apply(self.activate(self.linear(x)))


def _lazy() -> nn.Module:
    part = nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d())
    part(torch.zeros(2, WIDTH))
    return part


PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "average of all batches": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "layer norm": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.GroupNorm(2, WIDTH)),
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.AlphaDropout(0.1)),
    "counting": Counting,
    "averaging": Averaging,
    "observer": Observer,
    "own generator": OwnGenerator,
    "side effects": SideEffects,
    "twice": Twice,
    "complex": Complex,
    "checkpointed": Checkpointed,
    "odd": Odd,
    "extra state": WithExtraState,
    "lazy": _lazy,
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))),
    "graph module": lambda: fx.symbolic_trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh())),
}


class Vectors(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.part = part
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_sparse:
            x = x.to_dense()
        return self.last(self.part(self.first(x.to(self.first.bias.dtype)).tanh()))


# ---- models ----------------------------------------------------------------------------------------------------


class Images(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = norm
        self.drop = nn.Dropout2d(0.2)
        self.up = nn.ConvTranspose2d(4, 4, 1, bias=False)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.conv(x.to(self.conv.weight.dtype))).relu())
        return self.head(self.up(x).mean((2, 3)))


class Attention(nn.Module):
    """Transformer block whose head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.head(self.drop(x + mixed.transpose(1, 2).flatten(2)).mean(1))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.words(x)).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8, max_norm=1.0)  # renormalizes its weight in ``forward``
        self.rnn = kind(8, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.words(x).clone())[0][:, -1])


class SparseWords(nn.Module):
    """Model whose embeddings have sparse gradients."""

    def __init__(self, head: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, CLASSES, sparse=True)
        self.bag = nn.EmbeddingBag(WORDS, CLASSES, sparse=True, mode="sum")
        self.head = nn.Linear(CLASSES, CLASSES) if head else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x).mean(1) + self.bag(x))


class Swapped(Vectors):
    """Model with a layer that is replaced after the optimizer is made. The optimizer holds the old bias only."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH))

    def swap(self) -> None:
        new = nn.Linear(WIDTH, WIDTH, dtype=self.part.weight.dtype)
        new.weight = self.part.weight
        self.part = nn.Sequential(new, nn.ReLU())


class WithLoss(nn.Module):
    """Model that takes a mapping, and returns its loss with its output."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, y: Tensor, **rest: Any) -> dict[str, Tensor]:
        output = self.inner(x)
        return {"logits": output, "loss": functional.cross_entropy(output.float(), y)}


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    **{name: (lambda make=make: Vectors(make()), "vectors") for name, make in PARTS.items()},  # type: ignore[misc]
    "swapped": (Swapped, "vectors"),
    "images": (lambda: Images(nn.BatchNorm2d(4)), "images"),
    "images, group norm": (lambda: Images(nn.GroupNorm(2, 4)), "images"),
    "images, instance norm": (lambda: Images(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)), "images"),
    "attention": (Attention, "words"),
    "encoder": (Encoder, "words"),
    "lstm": (lambda: Recurrent(nn.LSTM), "words"),
    "gru": (lambda: Recurrent(nn.GRU), "words"),
    "sparse": (lambda: SparseWords(head=False), "words"),
    "sparse and dense": (lambda: SparseWords(head=True), "words"),
}
"""Maker of each model, and the required kind of data."""

NO_SINGLE_SAMPLE = ("batch norm", "average of all batches", "twice", "lazy", "scripted")
"""Models that cannot train on a batch of one sample."""
SPLITTABLE = ("linear", "layer norm", "complex", "odd", "extra state", "sparse", "sparse and dense")
"""Models whose step may be split into parts, because they have no BatchNorm and no random numbers."""
SPARSE = ("sparse", "sparse and dense")


# ---- changes of a model ----------------------------------------------------------------------------------------


def _last_linear(model: nn.Module) -> nn.Module:
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1]


def _freeze(model: nn.Module) -> None:
    for parameter in list(model.parameters())[:-2]:
        parameter.requires_grad_(False)


def _hook(model: nn.Module) -> None:
    part = _last_linear(model)
    part.register_forward_hook(lambda module, args, output: output * 1)
    part.register_forward_hook(lambda module, args, kwargs, output: None, with_kwargs=True)
    part.register_forward_pre_hook(lambda module, args: (args[0] + 0 * torch.rand(1).to(args[0]),))
    model.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    model.register_forward_hook(lambda module, args, output: None, always_call=True)
    model.register_full_backward_hook(lambda module, into, out: None)
    part.register_full_backward_pre_hook(lambda module, out: None)
    model.register_state_dict_post_hook(lambda module, state, prefix, metadata: None)
    model.register_state_dict_pre_hook(lambda module, prefix, keep: None)
    model.register_load_state_dict_post_hook(lambda module, keys: None)
    trained = [p for p in reversed(list(model.parameters())) if p.requires_grad]
    trained[0].register_hook(lambda gradient: gradient * 1)
    trained[0].register_post_accumulate_grad_hook(lambda p: None)


def _note_calls(model: nn.Module) -> None:
    """Count the model's calls in an attribute, and note the shapes of outputs in a list."""
    shapes: list[Any] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        module.calls += 1  # type: ignore[operator]
        shapes.append(len(args))

    model.calls = 0  # type: ignore[assignment]
    model.register_forward_hook(note)


def _drop_layers(model: nn.Module) -> None:
    """Halve the output of the last layer in half of the calls. Python's generator decides."""
    _last_linear(model).register_forward_hook(lambda module, args, output: output * random.choice([0.5, 1.0]))


def _set_part_to_eval(model: nn.Module) -> None:
    next(model.children(), model).eval()


def _old_weight_norm(model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(_last_linear(model))


QUIRKS: dict[str, Callable[[nn.Module], object]] = {
    "bf16": lambda model: model.to(torch.bfloat16),
    "float64": lambda model: model.double(),
    "weight norm": lambda model: parametrizations.weight_norm(_last_linear(model)),
    "old weight norm": _old_weight_norm,
    "spectral norm": lambda model: parametrizations.spectral_norm(_last_linear(model)),
    "orthogonal": lambda model: parametrizations.orthogonal(_last_linear(model)),
    "frozen": _freeze,
    "hooks": _hook,
    "noted calls": _note_calls,
    "dropped layers": _drop_layers,
    "part in eval mode": _set_part_to_eval,
    "eval mode": nn.Module.eval,
}
"""Changes of a model, applied in this order."""

NORMS = ("weight norm", "old weight norm", "spectral norm", "orthogonal")
DTYPES = ("bf16", "float64")
