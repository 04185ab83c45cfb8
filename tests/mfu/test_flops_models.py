"""FLOPs of models of torchvision and transformers, compared with formulas of their sizes.

Each row of the table holds an untrained model and the FLOPs of its architecture, derived by hand. Each model is counted
plain, compiled, and with checkpointed layers. Published figures are compared at published sizes, on the meta device.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from flatout.mfu import count_flops
from tests.frameworks import imported

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # every model here is built from its sizes


@pytest.fixture(autouse=True)
def strict():
    """Make incomplete counts an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="FLOPs of these operators")
        yield


@pytest.fixture
def transformers():
    return imported("transformers")


@dataclass(frozen=True)
class Row:
    """Model and its FLOPs. A multiply-add counts as 2.

    Attributes:
        model: untrained and not compiled.
        inputs: arguments of the model.
        forward: FLOPs of the forward.
        first: FLOPs of the first layer, if its input needs no gradient.
        layers: names of the modules to checkpoint, empty for a model with its own checkpoint option.
        again: FLOPs of the forward of the checkpointed parts.
        masked: FLOPs of the pairs of query and key that ``is_causal`` removes. No other attribute includes them.
        scores: FLOPs of the attention scores, if a fused kernel computes them again in its backward.
    """

    model: nn.Module
    inputs: dict[str, Any]
    forward: int
    again: int
    first: int = 0
    layers: tuple[str, ...] = ()
    masked: int = 0
    scores: int = 0

    @property
    def backward(self) -> int:
        """FLOPs of the backward. Each product of the forward has two in the backward: the gradients of both factors."""
        return 2 * self.forward - self.first


# ---- images ----------------------------------------------------------------------------------------------------------


def convolution(size: int, kernel: int, ins: int, outs: int, groups: int = 1) -> int:
    """Return the FLOPs of a convolution for one image, with ``size`` x ``size`` results."""
    return 2 * size**2 * kernel**2 * ins * outs // groups


def mlp() -> Row:
    batch, widths = 6, (20, 30, 40, 10)
    layers = [2 * batch * i * o for i, o in itertools.pairwise(widths)]
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Sequential(nn.Linear(30, 40), nn.ReLU()), nn.Linear(40, 10))
    return Row(model, {"input": torch.randn(batch, 20)}, sum(layers), layers[1], layers[0], ("2",))


def resnet50(batch: int = 2, size: int = 64) -> Row:
    """Return a ResNet: bottlenecks of 1 x 1, strided 3 x 3 and 1 x 1. Each stage starts with a 1 x 1 shortcut."""
    stem, ins, blocks = convolution(size // 2, 7, 3, 64), 64, 0
    for stage, (repeats, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        out = size // (4 << stage)
        for block in range(repeats):
            fed = 2 * out if stage and not block else out
            blocks += convolution(fed, 1, ins, width) + convolution(out, 3, width, width)
            blocks += convolution(out, 1, width, 4 * width) + (0 if block else convolution(out, 1, ins, 4 * width))
            ins = 4 * width
    layers = tuple(f"layer{i}" for i in range(1, 5))
    return image_row("resnet50", batch, size, stem, blocks, 2 * 2048 * 1000, layers)


def convnext(batch: int = 2, size: int = 64) -> Row:
    """Return a ConvNeXt: blocks of a depthwise 7 x 7 and two 1 x 1, and a 2 x 2 between stages."""
    stem, blocks, between = convolution(size // 4, 4, 3, 96), 0, 0
    for stage, repeats in enumerate((3, 3, 9, 3)):
        out, width = size // (4 << stage), 96 << stage
        blocks += repeats * (convolution(out, 7, width, width, width) + 2 * convolution(out, 1, width, 4 * width))
        between += convolution(out, 2, width // 2, width) if stage else 0
    layers = tuple(f"features.{i}" for i in (1, 3, 5, 7))
    return image_row("convnext_tiny", batch, size, stem, blocks, between + 2 * 768 * 1000, layers)


def efficientnet(batch: int = 2, size: int = 64) -> Row:
    """Return an EfficientNet: blocks that widen by 1 x 1, filter depthwise, squeeze and excite, narrow by 1 x 1."""
    stem, out, ins, blocks = convolution(size // 2, 3, 3, 32), size // 2, 32, 0
    stages = ((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3),
              (6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1))  # fmt: skip
    for widened, kernel, stride, outs, repeats in stages:
        for block in range(repeats):
            width = widened * ins
            blocks += convolution(out, 1, ins, width) if widened > 1 else 0
            out //= stride if not block else 1
            blocks += convolution(out, kernel, width, width, width) + 2 * convolution(1, 1, width, ins // 4)
            blocks += convolution(out, 1, width, outs)
            ins = outs
    layers = tuple(f"features.{i}" for i in range(1, 8))
    return image_row("efficientnet_b0", batch, size, stem, blocks, convolution(out, 1, 320, 1280) + 2 * 1280 * 1000,
                     layers)  # fmt: skip


def vit_b_16(batch: int = 2, size: int = 32) -> Row:
    patches, width, depth = (size // 16) ** 2, 768, 12
    tokens = patches + 1
    blocks = depth * (2 * tokens * 12 * width**2 + 4 * tokens**2 * width)
    layers = tuple(f"encoder.layers.encoder_layer_{i}" for i in range(depth))
    return image_row("vit_b_16", batch, size, 2 * patches * 16**2 * 3 * width, blocks, 2 * width * 1000, layers,
                     depth * 2 * tokens**2 * width, image_size=size)  # fmt: skip


def image_row(
    name: str, batch: int, size: int, first: int, blocks: int, rest: int, layers: tuple[str, ...], scores: int = 0,
    **options: Any,
) -> Row:  # fmt: skip
    """Return the row of an image model. The FLOPs are of one image."""
    model = imported("torchvision.models").get_model(name, weights=None, **options)
    return Row(
        model, {"x": torch.randn(batch, 3, size, size)}, batch * (first + blocks + rest), batch * blocks, batch * first,
        layers, scores=batch * scores,
    )  # fmt: skip


# ---- sequences -------------------------------------------------------------------------------------------------------


def pairs(length: int) -> int:
    """Return the number of pairs of query and key under a causal mask."""
    return length * (length + 1) // 2


def tokens(batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(batch, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def gpt2(transformers, batch: int = 2, length: int = 16, attention: str = "sdpa", **sizes: int) -> Row:
    """Return a GPT-2, whose layers have 12 x width^2 weights. Dropout keeps the CPU from fusing attention."""
    sizes = sizes or {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = transformers.GPT2Config(
        **sizes, attn_implementation=attention, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"
    )
    width, depth = config.n_embd, config.n_layer
    products = 2 * batch * length * depth * 12 * width**2
    causal, full = (4 * batch * depth * n * width for n in (pairs(length), length**2))
    layers = products + causal
    head = 2 * batch * length * width * config.vocab_size
    return Row(transformers.GPT2LMHeadModel(config), tokens(batch, length), layers + head, layers, masked=full - causal)


def llama(
    transformers, batch: int = 2, length: int = 16, attention: str = "sdpa", window: int | None = None, **sizes: int
) -> Row:
    """Return a Llama, which has fewer key and value heads than query heads. With a window it is a Mistral.

    Mistral's mask is a tensor.
    """
    sizes = sizes or {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                      "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    name = "Llama" if window is None else "Mistral"
    options = {} if window is None else {"sliding_window": window}
    config = getattr(transformers, f"{name}Config")(**sizes, **options, attn_implementation=attention)
    width, hidden, depth = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    shared = config.num_key_value_heads * width // config.num_attention_heads
    products = 2 * batch * length * depth * (2 * width**2 + 2 * width * shared + 3 * width * hidden)
    causal, full = (4 * batch * depth * n * width for n in (pairs(length), length**2))
    counted = causal if window is None or window > length else full
    head = 2 * batch * length * width * config.vocab_size
    return Row(
        getattr(transformers, f"{name}ForCausalLM")(config), tokens(batch, length), products + counted + head,
        products + counted, masked=full - counted, scores=counted // 2,
    )  # fmt: skip


def mistral(transformers) -> Row:
    return llama(transformers, window=4)


def bert(transformers, batch: int = 2, length: int = 16) -> Row:
    width, hidden, depth, vocabulary = 32, 48, 2, 50
    config = transformers.BertConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=hidden, num_hidden_layers=depth,
        num_attention_heads=4,
    )  # fmt: skip
    layers = depth * (2 * batch * length * (4 * width**2 + 2 * width * hidden) + 4 * batch * length**2 * width)
    head = 2 * batch * length * (width**2 + width * vocabulary)
    return Row(transformers.BertForMaskedLM(config), tokens(batch, length), layers + head, layers)


class LstmModel(nn.Module):
    """LSTM with a learned initial state, so that the backward computes every product, cell by cell or fused."""

    def __init__(self, vocabulary: int, width: int, hidden: int, depth: int):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(vocabulary, width), nn.LSTM(width, hidden, depth)
        self.state = nn.ParameterList(torch.zeros(depth, 1, hidden) for _ in range(2))
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, x):
        state = tuple(part.expand(-1, x.shape[1], -1).contiguous() for part in self.state)
        return self.head(self.lstm(self.embed(x), state)[0])


def lstm(batch: int = 2, length: int = 8) -> Row:
    vocabulary, width, hidden, depth = 50, 12, 16, 2
    cells = 2 * batch * length * 4 * hidden * ((width + hidden) + (depth - 1) * 2 * hidden)
    head = 2 * batch * length * hidden * vocabulary
    x = torch.zeros(length, batch, dtype=torch.long)
    return Row(LstmModel(vocabulary, width, hidden, depth), {"x": x}, cells + head, cells, layers=("lstm",))


# ---- the table -------------------------------------------------------------------------------------------------------

ROWS: dict[str, Callable[..., Row]] = {
    "MLP": mlp, "ResNet-50": resnet50, "ConvNeXt": convnext, "ViT-B/16": vit_b_16, "GPT-2": gpt2,
    "Llama, GQA": llama, "Mistral, window": mistral, "BERT": bert, "LSTM": lstm,
}  # fmt: skip


@pytest.fixture(params=ROWS)
def row(request) -> Row:
    build = ROWS[request.param]
    needs_transformers = build in (gpt2, llama, mistral, bert)
    return build(request.getfixturevalue("transformers")) if needs_transformers else build()


def check(row: Row, model: nn.Module, again: int = 0) -> None:
    count = count_flops(model, **row.inputs)
    assert (count.forward, count.backward) == (row.forward, row.backward)
    assert count.recomputed == row.scores + again
    assert count.total == row.forward + row.backward
    assert count.hardware == count.total + row.scores + again
    assert count.dense == count.total + 3 * row.masked
    assert sum(count.by_op.values()) == count.hardware
    assert count.unknown == {}


def test_plain(row):
    check(row, row.model)


@pytest.mark.slow
def test_compiled(row):
    compiled = torch.compile(row.model, backend="eager")
    compiled(**row.inputs)
    check(row, compiled)
    row.model.compile(backend="aot_eager")
    check(row, row.model)


@pytest.mark.slow
def test_compiled_by_inductor():
    row = mlp()
    compiled = torch.compile(row.model)
    compiled(**row.inputs).sum().backward()
    check(row, compiled)


def test_checkpointed(row):
    """Checkpoints keep the model FLOPs. The hardware computes the layers once more."""
    if row.layers:
        for name in row.layers:
            repeat(row.model.get_submodule(name))
    else:
        row.model.gradient_checkpointing_enable()
    with set_checkpoint_early_stop(False):  # otherwise the last product of a layer is left out
        check(row, row.model, row.again)


def repeat(layer: nn.Module) -> None:
    forward = layer.forward
    layer.forward = lambda *args, **keywords: checkpoint(forward, *args, use_reentrant=False, **keywords)


# ---- published figures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [resnet50, convnext, efficientnet, vit_b_16])
def test_image_models_take_what_torchvision_publishes(build):
    with torch.device("meta"):
        row = build(1, 224)
    check(replace(row, scores=0), row.model)  # meta tensors are not fused
    name = {resnet50: "resnet50", convnext: "convnext_tiny", efficientnet: "efficientnet_b0", vit_b_16: "vit_b_16"}
    multiply_adds = imported("torchvision.models").get_model_weights(name[build]).DEFAULT.meta["_ops"] * 1e9
    assert row.forward / 2 == pytest.approx(multiply_adds, rel=1e-3, abs=5e5)  # published with three decimals


LLAMA = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}


@pytest.mark.parametrize(
    ("build", "length", "sizes", "parameters"),
    [
        # Parameters that multiply: the published number without embeddings, biases and norms.
        (gpt2, 1024, {"n_layer": 12, "n_embd": 768}, 124_439_808 - 1024 * 768 - 12 * 13 * 768 - 2 * 768),
        (llama, 4096, {**LLAMA, "intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000},
         6_738_415_616 - 32000 * 4096 - 65 * 4096),
        (llama, 8192, {**LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256},
         8_030_261_248 - 128256 * 4096 - 65 * 4096),
    ],
    ids=["GPT-2 124M", "Llama-2-7B", "Llama-3-8B"],
)  # fmt: skip
def test_language_models_take_what_palm_says(transformers, build, length, sizes, parameters):
    """``dense`` is the 6N + 12LHQT per token of PaLM's appendix B."""
    with torch.device("meta"):
        row = build(transformers, 1, length, **sizes)
    check(replace(row, scores=0), row.model)
    layers, width = (sizes[name] for name in (("n_layer", "n_embd") if build is gpt2 else
                                              ("num_hidden_layers", "hidden_size")))  # fmt: skip
    assert row.forward + row.backward + 3 * row.masked == length * (6 * parameters + 12 * layers * width * length)


# ---- effects of a mask on attention ----------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize(
    ("attention", "mask", "causal"),
    [("sdpa", None, True), ("sdpa", "full", True), ("sdpa", "padded", False), ("eager", None, False)],
)
def test_attention_of_transformers(transformers, build, attention, mask, causal):
    """Without padding, transformers passes ``is_causal`` to SDPA.

    With padding it passes a mask, and all scores are computed.
    """
    row = build(transformers, attention=attention)
    if mask is not None:
        row.inputs["attention_mask"] = torch.ones_like(row.inputs["input_ids"])
        row.inputs["attention_mask"][1, -3:] = int(mask == "full")
    count = count_flops(row.model, **row.inputs)
    assert count.forward == row.forward + (0 if causal else row.masked)
    assert count.dense == row.forward + row.backward + 3 * row.masked


@pytest.mark.parametrize(("window", "causal"), [(4, False), (16, False), (17, True)])
def test_a_window_longer_than_the_sequence_is_causal(transformers, window, causal):
    length = 16
    row = llama(transformers, length=length, window=window)
    assert (row.masked > 0) == causal
    check(row, row.model)
