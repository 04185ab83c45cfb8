"""FLOPs of operators and parts of models against sums derived by hand or by independent code."""

from __future__ import annotations

import itertools
import random
import re
import threading
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from flatout.mfu import FlopCount, count_flops, register_flops


@pytest.fixture(autouse=True)
def strict():
    """Make incomplete counts an error, unless a test expects them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="FLOPs of these operators")
        yield


def parts(count: FlopCount) -> tuple[int, int, int]:
    return count.forward, count.backward, count.recomputed


# ---- models ----------------------------------------------------------------------------------------------------------


class CausalBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(x)))


class Gpt(nn.Module):
    def __init__(self, layers=3, width=32, heads=4, vocabulary=50):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(CausalBlock(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()), "logits": logits}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_gpt_with_causal_attention(device):
    """The model FLOPs are equal if torch fuses attention (CPU), and if it computes all scores and masks them (meta)."""
    batch, length, width, layers, vocabulary = 2, 16, 32, 3, 50
    with torch.device(device):
        count = count_flops(Gpt(), torch.zeros(batch, length, dtype=torch.long))
    products = 2 * batch * length * (layers * 12 * width * width + width * vocabulary)
    pairs = length * (length + 1) // 2
    attention = layers * 4 * batch * pairs * width
    assert (count.forward, count.backward) == (products + attention, 2 * (products + attention))
    dense = layers * 4 * batch * length * length * width
    assert count.dense == 3 * (products + dense)
    # 6N + 12LHQT per token, from PaLM's appendix B
    assert (
        count.dense / (batch * length)
        == 6 * (12 * layers * width**2 + width * vocabulary) + 12 * layers * width * length
    )
    assert count.recomputed == (layers * 2 * batch * pairs * width if device == "cpu" else 0)
    assert count.by_module["blocks.1.up"].forward == 2 * batch * length * 4 * width * width


@pytest.mark.parametrize("fused", [True, False])
def test_grouped_query_attention_with_a_sliding_window(fused):
    """A window that is given as a mask removes nothing, so every score is computed."""
    batch, heads, kv_heads, length, size = 2, 8, 2, 12, 16
    query = torch.randn(batch, heads, length, size, requires_grad=True)
    key, value = (torch.randn(batch, kv_heads, length, size, requires_grad=True) for _ in range(2))
    distance = torch.arange(length)[:, None] - torch.arange(length)
    mask = (distance >= 0) & (distance < 4)
    backend = torch.nn.attention.SDPBackend.FLASH_ATTENTION if fused else torch.nn.attention.SDPBackend.MATH

    def step():
        with torch.nn.attention.sdpa_kernel(backend):
            out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        out.sum().backward()

    forward = 4 * batch * heads * length * length * size
    count = count_flops(step)
    assert parts(count) == (forward, 2 * forward, forward // 2 if fused else 0)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 7), (7, 3), (1, 4)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_causal_pairs_are_those_of_the_mask(queries, keys, device):
    q, k = torch.randn(1, 2, queries, 8, device=device), torch.randn(1, 2, keys, 8, device=device)
    pairs = int(torch.ones(queries, keys).tril().sum())
    count = count_flops(lambda: functional.scaled_dot_product_attention(q, k, k, is_causal=True))
    assert parts(count) == (4 * 2 * pairs * 8, 0, 0)
    assert count.dense == 4 * 2 * queries * keys * 8


@pytest.mark.parametrize("mode", ["train", "eval", "fast", "nested"])
def test_transformer_encoder(mode):
    batch, length, width, hidden = 2, 6, 16, 40
    layer = nn.TransformerEncoderLayer(width, 4, hidden, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=mode == "nested").train(mode == "train")
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[1, 4:] = True
    lengths = [6, 4] if mode == "nested" else [length] * batch
    with torch.set_grad_enabled(mode in ("train", "eval")):
        keywords = {"src_key_padding_mask": padding} if mode == "nested" else {}
        count = count_flops(model, torch.randn(batch, length, width), **keywords)
    products = 2 * (2 * sum(lengths) * (4 * width * width + 2 * width * hidden))
    attention = 2 * sum(4 * n * n * width for n in lengths)
    assert count.forward == products + attention
    if mode in ("train", "eval"):
        not_asked = 2 * batch * length * 3 * width * width  # the input's gradient
        assert count.backward == 2 * (products + attention) - not_asked
    else:
        assert set(count.by_op) == {"aten::_transformer_encoder_layer_fwd"}


RECURRENT = [
    (kind, layers, both, proj)
    for kind, layers, both, proj in itertools.product(("LSTM", "GRU", "RNN"), (1, 2), (False, True), (0, 3))
    if kind == "LSTM" or not proj
]


@pytest.mark.parametrize(("kind", "layers", "both", "proj"), RECURRENT)
def test_recurrent_layers(kind, layers, both, proj):
    steps, batch, width, hidden = 7, 3, 5, 6
    gates, directions, out = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], 1 + both, proj or hidden
    keywords = {"proj_size": proj} if proj else {}
    model = getattr(nn, kind)(width, hidden, layers, bidirectional=both, **keywords)
    forward = 0
    for layer in range(layers):
        fed = width if layer == 0 else out * directions
        forward += directions * 2 * steps * batch * (gates * hidden * (fed + out) + proj * hidden)
    x = torch.randn(steps, batch, width, requires_grad=True)
    count = count_flops(model, x)
    assert count.forward == forward
    assert count_flops(model, x, backward=False).total == forward
    with torch.inference_mode():
        assert count_flops(model, x).total == forward
    # Decomposed cells compute no gradient of the first, constant hidden state.
    constant = layers * directions * 2 * batch * gates * hidden * out
    assert 2 * forward - constant <= count.backward <= 2 * forward


def test_products_by_every_name():
    a, b, v = torch.randn(3, 4), torch.randn(4, 5), torch.randn(4)
    x, y = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    cases = [
        (lambda: a @ b, 60), (lambda: a @ v, 12), (lambda: v @ v, 4), (lambda: x @ y, 120), (lambda: x @ b, 120),
        (lambda: torch.addmm(a @ b, a, b), 120), (lambda: torch.addmv(torch.zeros(3), a, v), 12),
        (lambda: torch.baddbmm(torch.zeros(2, 3, 5), x, y), 120), (lambda: torch.addbmm(torch.zeros(3, 5), x, y), 120),
        (lambda: torch.einsum("bij,bjk->bik", x, y), 120), (lambda: functional.linear(x, b.T), 120),
        (lambda: torch.vdot(v, v), 4), (lambda: torch.mm(a, b, out=torch.empty(3, 5)), 60),
        (lambda: a.to(torch.complex64) @ b.to(torch.complex64), 240),
        (lambda: torch._int_mm(torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8)), 32 * 16 * 8),
        (lambda: functional.bilinear(a, torch.randn(3, 2), torch.randn(5, 4, 2)), 3 * 5 * 4 * 2),
        (lambda: functional.embedding(torch.zeros(3, dtype=torch.long), b), 0),
        (lambda: torch.cdist(torch.randn(30, 4), torch.randn(40, 4)), 30 * 40 * 4),
        (lambda: torch._foreach_add([a, b], 1.0), 0), (lambda: functional.interpolate(x, 9, mode="linear"), 0),
    ]  # fmt: skip
    for i, (run, multiply_adds) in enumerate(cases):
        assert count_flops(run).total == 2 * multiply_adds, i
        with torch.inference_mode():
            assert count_flops(run).total == 2 * multiply_adds, i


# ---- convolutions ----------------------------------------------------------------------------------------------------


def multiply_adds(size: int, out: int, kernel: int, transposed: bool) -> int:
    """Count the taps along one dimension. Each output reads a tap. With ``transposed``, each input writes a tap."""
    return sum(1 for _ in itertools.product(range(size if transposed else out), range(kernel)))


@settings(max_examples=40, deadline=None)
@given(
    groups=st.integers(1, 4), ins=st.integers(1, 3), outs=st.integers(1, 3), kernel=st.integers(1, 3),
    stride=st.integers(1, 2), dilation=st.integers(1, 2), padding=st.integers(0, 2), transposed=st.booleans(),
    dims=st.integers(1, 3), batch=st.integers(1, 2), wanted=st.tuples(st.booleans(), st.booleans()),
)  # fmt: skip
def test_convolutions(groups, ins, outs, kernel, stride, dilation, padding, transposed, dims, batch, wanted):
    kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{dims}d")
    layer = kind(groups * ins, groups * outs, kernel, stride, padding, groups=groups, dilation=dilation)
    layer.weight.requires_grad_(wanted[1])
    x = torch.randn(batch, groups * ins, *(9 - i for i in range(dims)), requires_grad=wanted[0])
    taps = 1
    for size, out in zip(x.shape[2:], layer(x).shape[2:], strict=True):
        taps *= multiply_adds(size, out, kernel, transposed)
    channels = sum(1 for i, o in itertools.product(range(groups * ins), range(groups * outs)) if i // ins == o // outs)
    forward = 2 * batch * channels * taps
    assert parts(count_flops(layer, x)) == (forward, forward * sum(wanted), 0)


# ---- forward, backward, recomputed, modules --------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Model with checkpoints, or without a checkpoint if ``reentrant`` is None."""

    def __init__(self, reentrant):
        super().__init__()
        self.first, self.reentrant = nn.Linear(8, 8), reentrant
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh())

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize(("reentrant", "early"), [(True, False), (False, False), (False, True)])
def test_checkpointing_adds_the_forward_again_to_the_hardware_only(reentrant, early):
    x = torch.randn(4, 8)
    plain = count_flops(Checkpointed(None), x)
    with set_checkpoint_early_stop(early):
        count = count_flops(Checkpointed(reentrant), x)
    again = 2 * 2 * 4 * 2 * 8 * 16
    assert parts(plain) == (plain.forward, plain.backward, 0)
    assert parts(count) == (plain.forward, plain.backward, again)
    assert count.hardware == plain.hardware + again
    assert count.dense == plain.dense
    for name in ("first", "inner.0", "inner.2"):
        of, alone = count.by_module[name], plain.by_module[name]
        assert (of.forward, of.backward) == (alone.forward, alone.backward)
        assert of.recomputed == (0 if name == "first" else again // 2)


def test_gradients_of_gradients_are_no_recomputation():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)

    def penalty():
        (gradient,) = torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)
        gradient.square().sum().backward()

    count = count_flops(penalty)
    assert count.recomputed == 0
    assert count.forward == 2 * 2 * 16
    assert count.by_module.backward == count.backward > 2 * count.forward


def test_a_gradient_inside_a_forward_is_no_recomputation():
    """Forces are gradients of an energy."""

    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x):
            x = x.requires_grad_()
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    count = count_flops(Force(), torch.randn(5, 3))
    assert (count.forward, count.recomputed) == (2 * 5 * (24 + 8), 0)
    assert count.by_module["energy.0"].backward > 2 * 5 * 24


def test_a_checkpointed_function_without_modules():
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)

    def step():
        checkpoint(lambda x: torch.tanh(x @ weight), x, use_reentrant=False).sum().backward()

    assert parts(count_flops(step)) == (96, 192, 96)


def test_modules_called_twice_and_shared():
    shared = nn.Linear(4, 4)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.other = shared, nn.Sequential(shared, nn.Linear(4, 2)), nn.ReLU()

        def forward(self, x):
            return self.two(self.other(self.one(self.one(x)))) @ torch.ones(2, 3)

    tree = count_flops(Model(), torch.randn(5, 4)).by_module
    once = 2 * 5 * 16
    assert (tree["one"].forward, tree["one"].backward) == (3 * once, 5 * once)
    assert (tree["two"].forward, tree["two"].backward) == (2 * 5 * 8, 2 * 2 * 5 * 8)
    assert tree.own == 2 * 5 * 6 * 2
    assert tree.total == tree.own + sum(child.total for child in tree.children)
    lines = str(tree).splitlines()
    assert [line.split()[0] for line in lines] == ["Model", "one", "two", "1"]
    assert lines[3].startswith("    1 ")
    with pytest.raises(KeyError, match="three"):
        tree["three"]


def test_a_training_step_as_a_callable():
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    optimizer = torch.optim.SGD(model.parameters())

    def step():
        model(x).sum().backward()
        optimizer.step()

    count = count_flops(step)
    assert parts(count) == (2 * 5 * 12, 2 * 5 * 12, 0)
    assert count.by_module.name == "Linear"


# ---- no side effects -------------------------------------------------------------------------------------------------


class Restless(nn.Module):
    """Model that changes everything that a forward can change."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("seen", torch.tensor([]))  # resized in place, as by quantization observers

    def forward(self, x):
        self.calls = self.calls + 1
        self.seen.resize_(len(x)).fill_(1)
        random.random(), np.random.rand()
        x.mul_(2)
        return self.drop(self.norm(self.conv(x)))


def test_everything_is_afterwards_as_before():
    model, x = Restless(), torch.randn(2, 3, 8, 8)
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    stepped = []
    model.conv.bias.register_post_accumulate_grad_hook(lambda p: stepped.append(p))
    state, image = {k: v.clone() for k, v in model.state_dict().items()}, x.clone()
    buffers, gradient = dict(model.named_buffers()), model.conv.weight.grad
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    model.eval().norm.train()
    count_flops(model, x)
    assert [m.training for m in (model, model.norm)] == [False, True]
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(b is buffers[k] for k, b in model.named_buffers())
    assert model.conv.weight.grad is gradient
    assert bool((gradient == 1).all())
    assert model.conv.bias.grad is None
    assert torch.equal(x, image)
    assert x.grad is None
    assert not stepped
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert (np.random.get_state()[1] == generators[2]).all()
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks
    model(x).sum().backward()
    assert len(stepped) == 1


def test_a_graph_that_is_held_stays_usable():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval(), torch.randn(5, 3)
    loss = model(x).sum()
    count_flops(model, x)
    loss.backward()
    assert model[0].weight.grad is not None


def test_an_error_leaves_nothing_behind():
    model = nn.Linear(3, 4)
    with pytest.raises(RuntimeError, match="shapes"):
        count_flops(model, torch.randn(2, 5))
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert count_flops(model, torch.randn(2, 3)).forward == 48


class Meeting(nn.Module):
    """Module in which two threads meet before and after the product."""

    def __init__(self, barrier: threading.Barrier):
        super().__init__()
        self.barrier, self.inner = barrier, nn.Linear(4, 4)

    def forward(self, x):
        self.barrier.wait(600)
        y = self.inner(x)
        self.barrier.wait(600)
        return y


def test_counts_in_several_threads_take_turns():
    import torch._dynamo

    class Last(nn.Module):
        """Module whose second count would end after the first, and restore the patches of the first."""

        def __init__(self, mine, other):
            super().__init__()
            self.mine, self.other, self.inner = mine, other, nn.Linear(4, 4)

        def forward(self, x):
            self.mine.set()
            self.other.wait(0.5)
            return self.inner(x)

    original, stance = functional.scaled_dot_product_attention, torch._dynamo.eval_frame._stance
    events, counts = [threading.Event(), threading.Event()], {}

    def work(i):
        counts[i] = count_flops(Last(events[i], events[1 - i]), torch.randn(2, 4))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert functional.scaled_dot_product_attention is original
    assert torch._dynamo.eval_frame._stance == stance
    assert [(c.by_module["inner"].forward, c.by_module["inner"].backward) for c in counts.values()] == [(64, 64)] * 2
    assert [len(c.by_module.children) for c in counts.values()] == [1, 1]


def test_what_another_thread_trains_meanwhile_is_not_counted():
    barrier = threading.Barrier(2)
    model, other = Meeting(barrier), Meeting(barrier)
    thread = threading.Thread(target=lambda: other(torch.randn(2, 4)).sum().backward())
    thread.start()
    count = count_flops(model, torch.randn(2, 4))
    thread.join()
    assert [child.name for child in count.by_module.children] == ["inner"]
    assert (count.by_module["inner"].forward, count.by_module["inner"].backward) == (64, 64)


@pytest.mark.parametrize("kind", ["sparse", "nested", "float4"])
def test_buffers_of_any_kind(kind):
    buffers = {
        "sparse": lambda: torch.eye(4).to_sparse(),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "float4": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    model.register_buffer("other", buffers[kind]())
    before = model[0].running_mean.clone()
    assert count_flops(model, torch.randn(2, 4)).forward == 64
    assert torch.equal(model[0].running_mean, before)


def test_no_gradients_no_backward():
    with torch.no_grad():
        assert parts(count_flops(nn.Linear(3, 4), torch.randn(2, 3))) == (48, 0, 0)
    assert parts(count_flops(nn.Linear(3, 4), torch.randn(2, 3), backward=False)) == (48, 0, 0)


@pytest.mark.parametrize("how", ["module", "wrapper"])
def test_a_compiled_model_counts_as_its_eager_one_and_is_not_compiled(how):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    model, x = Gpt(1), torch.zeros(2, 8, dtype=torch.long)
    eager = count_flops(model, x)
    if how == "module":
        model.compile(backend=backend)
    else:
        model = torch.compile(model, backend=backend)
    assert count_flops(model, x) == eager
    assert not compiled
    model(x)
    graphs = len(compiled)
    assert graphs
    assert count_flops(model, x) == eager
    model(x)
    assert len(compiled) == graphs


# ---- operators of other libraries ------------------------------------------------------------------------------------


@torch.library.custom_op("flatout_flops_test::project", mutates_args=())
def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


def test_an_unknown_operator_is_named_and_can_be_made_known():
    x, weight = torch.randn(3, 4), torch.randn(4, 5)

    def twice():
        project(x, weight)
        return project(x, weight)

    with pytest.warns(RuntimeWarning, match=r"flatout_flops_test::project\b.*\b2"):
        count = count_flops(twice)
    assert count.unknown == {"flatout_flops_test::project": 2}
    assert count.total == 0
    assert re.search(r"flatout_flops_test::project\b.*\b2", str(count))

    @register_flops(torch.ops.flatout_flops_test.project)
    def project_flops(x, weight):
        return 2 * x.numel() * weight.shape[1]

    assert count_flops(twice).total == 2 * 2 * 60
    register_flops(torch.ops.flatout_flops_test.project.default, lambda x, weight: 7)
    assert count_flops(twice).by_op == {"flatout_flops_test::project": 14}
    with pytest.raises(TypeError, match=r"^op "):
        register_flops("flatout_flops_test::project", project_flops)


def test_factorisations_and_sparse_products_are_named():
    a = torch.eye(4)
    with pytest.warns(RuntimeWarning, match="linalg_cholesky_ex"):
        assert count_flops(torch.linalg.cholesky, a).total == 0
    with pytest.warns(RuntimeWarning, match="linalg_inv_ex"):
        assert count_flops(torch.linalg.inv, a).unknown == {"aten::linalg_inv_ex": 1}
    with pytest.warns(RuntimeWarning, match="mm"):
        assert count_flops(torch.mm, a.to_sparse(), a).total == 0
    with pytest.warns(RuntimeWarning, match="mv"):
        assert count_flops(torch.mv, a.to_sparse_csr(), a[0]).total == 0


@pytest.mark.parametrize(
    ("namespace", "name", "cheap"),
    [("aten", "quantized_lstm", False), ("aten", "_wrapped_quantized_linear_prepacked", False),
     ("symm_mem", "fused_all_gather_matmul", False), ("symm_mem", "one_shot_all_reduce", True),
     ("fsdp", "split_with_sizes_copy", True), ("prims", "convert_element_type", True),
     ("aten", "_linalg_check_errors", True), ("aten", "fbgemm_linear_quantize_weight", True),
     ("torchvision", "nms", False)],
)  # fmt: skip
def test_operators_that_need_no_formula(namespace, name, cheap):
    from flatout.mfu.cost import is_cheap

    class Operator:
        """Operator with the attributes that the check reads, because not every torch has each operator."""

        def __init__(self):
            self.namespace, self._opname = namespace, name

    assert is_cheap(Operator()) == cheap


def test_kernels_that_python_code_starts_are_named():
    """Triton calls its hooks at each launch. Here the test calls the hooks without a GPU."""
    knobs = pytest.importorskip("triton.knobs")

    class Launch:
        def get(self):
            return {"name": "my_kernel"}

    before = list(knobs.runtime.launch_enter_hook.calls)
    with pytest.warns(RuntimeWarning, match=r"triton::my_kernel\b.*\b1"):
        count = count_flops(lambda: knobs.runtime.launch_enter_hook(Launch()))
    assert count.unknown == {"triton::my_kernel": 1}

    @torch.library.custom_op("flatout_flops_test::launch", mutates_args=())
    def launch(x: torch.Tensor) -> torch.Tensor:
        knobs.runtime.launch_enter_hook(Launch())
        return x.clone()

    register_flops(torch.ops.flatout_flops_test.launch, lambda x: 5)  # including its kernels
    count = count_flops(launch, torch.zeros(2))
    assert (count.total, count.unknown) == (5, {})
    assert knobs.runtime.launch_enter_hook.calls == before


@pytest.mark.parametrize("window", [None, 1000, 64])
def test_flex_attention_counts_the_blocks_of_its_mask(window):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    query, key = torch.randn(2, 4, 256, 16), torch.randn(2, 2, 256, 16)
    mask, blocks = None, 16
    if window is not None:

        def seen(batch, head, i, j):
            return (i >= j) & (i - j < window)

        mask = flex.create_block_mask(seen, None, None, 256, 256, device="cpu", BLOCK_SIZE=64)
        blocks = 10 if window == 1000 else 7
    count = count_flops(lambda: flex.flex_attention(query, key, key, block_mask=mask, enable_gqa=True))
    assert count.forward == 4 * 2 * 4 * blocks * 64 * 64 * 16
    assert count.dense == 4 * 2 * 4 * 256 * 256 * 16


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors(layout):
    """Nested tensors reach the counter as a whole, and the dispatcher does not see their sizes."""

    def nested(size):
        return torch.nested.nested_tensor([torch.randn(3, size), torch.randn(5, size)], layout=layout)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.weight = nn.Linear(4, 6), nn.Parameter(torch.randn(6, 7))

        def forward(self, x):
            y = self.inner(x)
            return (y @ self.weight).values().sum() if layout == torch.jagged else y

    first, second = 2 * 8 * 4 * 6, 2 * 8 * 6 * 7 if layout == torch.jagged else 0
    assert parts(count_flops(Model(), nested(4))) == (first + second, first + 2 * second, 0)
    if layout == torch.strided:
        x = nested(4)
        scores = 2 * (3 * 3 + 5 * 5) * 4
        assert count_flops(lambda: x @ x.transpose(1, 2)).total == scores
        with pytest.warns(RuntimeWarning, match="matmul"):  # over a dimension of several sizes
            assert count_flops(lambda: (x @ x.transpose(1, 2)) @ x).total == scores


@pytest.mark.parametrize("inside", [True, False])
def test_fake_tensors(inside):
    mode = torch._subclasses.FakeTensorMode()
    with mode:
        model, x = Gpt(1), torch.zeros(2, 8, dtype=torch.long)
    if inside:
        with mode:
            count = count_flops(model, x)
    else:
        count = count_flops(model, x)
    assert count == count_flops(Gpt(1), torch.zeros(2, 8, dtype=torch.long))


def test_varied_lengths_and_windows_of_packed_attention():
    """The kernels of SDPA run on CUDA only, but their formulas run on any device."""
    from flatout.mfu.cost import cost_of

    query, key = torch.empty(9, 4, 8), torch.empty(12, 2, 8)
    offsets_q, offsets_k = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([0, 5, 12], dtype=torch.int32)
    op = torch.ops.aten._flash_attention_forward.default

    def pairs(seen) -> int:
        lengths = [(4, 5), (5, 7)]
        return sum(seen(i, j, q, k) for q, k in lengths for i in range(q) for j in range(k))

    def kept(causal, **window) -> int:
        args = (query, key, key, offsets_q, offsets_k, 5, 7, 0.0, causal, False)
        cost = cost_of(op, args, window, None)
        assert cost.dense == 4 * 4 * pairs(lambda *_: True) * 8
        return cost.needed // (4 * 4 * 8)

    assert kept(False) == pairs(lambda *_: True)
    assert kept(True) == pairs(lambda i, j, q, k: j - i <= k - q)
    assert kept(True, window_size_left=2, window_size_right=0) == pairs(lambda i, j, q, k: -2 <= j - i - (k - q) <= 0)
    assert kept(False, window_size_left=1, window_size_right=1) == pairs(lambda i, j, q, k: abs(j - i - (k - q)) <= 1)


def test_flash_attention_on_cuda_aligns_causal_masks_at_the_last_key():
    from flatout.mfu.cost import cost_of

    query, key = torch.empty(2, 4, 3, 8), torch.empty(2, 4, 5, 8)
    args = (query, key, key, 0.0, True)
    cost = cost_of(torch.ops.aten._scaled_dot_product_flash_attention.default, args, {}, None)
    assert cost.needed == 4 * 2 * 4 * int(torch.ones(3, 5).tril(2).sum()) * 8


@pytest.mark.parametrize(
    ("a", "b", "multiply_adds"),
    [((6, 4), (3, 4, 5), 6 * 4 * 5), ((3, 2, 4), (4, 9), 2 * 4 * 9), ((3, 2, 4), (3, 4, 5), 3 * 2 * 4 * 5),
     ((2, 9), (9, 5), 2 * 9 * 5)],
)  # fmt: skip
def test_grouped_products(a, b, multiply_adds):
    from flatout.mfu.cost import cost_of

    args = (torch.empty(a), torch.empty(b))
    assert cost_of(torch.ops.aten._grouped_mm.default, args, {}, None).needed == 2 * multiply_adds


def test_products_of_packed_4_bit_floats():
    from flatout.mfu.cost import cost_of

    a, b = (torch.empty(size, dtype=torch.float4_e2m1fn_x2, device="meta") for size in ((6, 8), (8, 10)))
    args = (a, b, None, None)
    assert cost_of(torch.ops.aten._scaled_mm.default, args, {}, torch.empty(6, 10)).needed == 2 * 6 * 16 * 10


@pytest.mark.parametrize("packed", [False, True])
def test_cudnn_attention_has_a_layout_of_its_own(packed):
    from flatout.mfu.cost import cost_of

    offsets = torch.tensor([0, 4, 9], dtype=torch.int32) if packed else None
    query = torch.empty(9, 3, 8) if packed else torch.empty(2, 3, 5, 8)
    args = (query, query, query, None, offsets, offsets, 5, 5, True, 0.0, True)
    pairs = 4 * 5 // 2 + 5 * 6 // 2 if packed else 2 * 5 * 6 // 2
    cost = cost_of(torch.ops.aten._cudnn_attention_forward.default, args, {}, None)
    assert cost.needed == 4 * 3 * pairs * 8


@pytest.mark.parametrize("projected", [0, 3])
def test_recurrent_layers_of_cudnn(projected):
    from flatout.mfu.cost import cost_of

    model, x = nn.LSTM(5, 6, 2, bidirectional=True, proj_size=projected), torch.empty(7, 3, 5)
    forward = count_flops(model, x, backward=False).total
    args = (x, list(model.parameters()), 4, None, torch.empty(0), None, 2, 6, projected, 2, False, 0.0, True, True, [])
    assert cost_of(torch.ops.aten._cudnn_rnn.default, (*args, None), {}, None).needed == forward
    mask = [True, False, False, True]
    none = torch.empty(0)
    args = (x, list(model.parameters()), 4, none, none, None, none, None, None, None, 2, 6, projected, 2, False, 0.0)
    backward = torch.ops.aten._cudnn_rnn_backward.default
    assert cost_of(backward, (*args, True, True, [], None, none, mask), {}, None).needed == 2 * forward
