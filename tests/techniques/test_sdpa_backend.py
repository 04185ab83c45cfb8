"""Another attention kernel: asked for in an order, tried where it can serve, put back exactly."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.backends import cuda
from torch.nn import functional

import flatout
from flatout._backends import SDP_KERNELS
from flatout.job import Job
from flatout.measure import State
from flatout.techniques import NotApplicable
from flatout.techniques.sdpa_backend import KERNELS, AttentionSwitch, SdpaBackend, _Attention
from tests.helpers import attention_flags, snapshot
from tests.jobs import Net, make_job

pytestmark = pytest.mark.usefixtures("short_trials")

REST = {"compile": False, "precision": False, "workers": False, "in_memory": False, "fused_optimizer": False}


@pytest.fixture(autouse=True)
def flags_come_back():
    enabled, order = attention_flags()
    yield
    put(enabled, order)


def put(enabled, order):
    for name, on in zip(SDP_KERNELS, enabled, strict=True):
        getattr(cuda, f"enable_{name}_sdp")(on)
    torch._C._set_sdp_priority_order(order)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def make(lengths=(8,)):
    torch.manual_seed(0)
    model = Attending()
    batches = [(torch.randn(4, lengths[i % len(lengths)], 16), torch.randint(0, 3, (4,))) for i in range(6)]
    return model, batches, torch.optim.SGD(model.parameters(), 0.1)


def row_of(run):
    return next(row for row in run.report.rows if row.technique == "sdpa_backend")


def tuned(model, batches, opt, budget=20.0, **choices):
    return flatout.optimize(model, batches, opt, functional.cross_entropy, techniques=REST | choices, budget=budget)


# -- the switch ----------------------------------------------------------------------------------------------


@given(
    st.sampled_from(sorted(KERNELS)),
    st.sampled_from(["cpu", "cuda"]),
    st.tuples(*[st.booleans()] * len(SDP_KERNELS)),
    st.permutations(range(5)),
)
def test_off_is_exactly_as_before(kernel, device, enabled, order):
    put(enabled, order)
    before, state = attention_flags(), State.capture([nn.Linear(1, 1)])
    switch = AttentionSwitch(kernel, device)
    for _ in range(2):
        switch.enable()
        switch.disable()
        assert attention_flags() == before
    switch.enable()
    state.restore()
    assert attention_flags() == before


@pytest.mark.parametrize("kernel", KERNELS)
def test_on_cuda_it_is_an_order_and_not_a_prohibition(kernel):
    enabled, order = attention_flags()
    switch = AttentionSwitch(kernel, "cuda")
    switch.enable()
    assert attention_flags()[0] == enabled
    first = int(KERNELS[kernel])
    assert attention_flags()[1] == [first, *(k for k in order if k != first)]
    switch.disable()


def test_on_the_cpu_the_fused_kernel_gives_way_to_plain_products():
    model, batches, _ = make()
    switch = AttentionSwitch("math", "cpu")
    used = []
    for _ in range(2):
        with _Attention() as seen:
            fused = model(batches[0][0])
        used.append(seen.used)
        switch.enable()
    switch.disable()
    assert used == [{"flash"}, set()]
    torch.testing.assert_close(fused, model(batches[0][0]))


# -- in optimize() -------------------------------------------------------------------------------------------


def test_plain_products_are_tried_verified_and_leave_no_trace(monkeypatch):
    monkeypatch.setattr("flatout.measure.tuner.HOPELESS", float("inf"))  # on a busy machine one pair may say anything
    model, batches, opt = make()
    before = snapshot(model, opt)
    run = tuned(model, batches, opt)
    row = row_of(run)
    assert [trial.candidate for trial in row.trials] == ["math"]
    assert row.trials[0].loss_difference is not None
    assert row.trials[0].loss_difference < 1e-5
    assert row.trials[0].failure == ""
    run.undo()
    assert snapshot(model, opt) == before


def test_what_is_forced_is_on_until_undo():
    model, batches, opt = make()
    before = attention_flags()
    run = tuned(model, batches, opt, budget=0, sdpa_backend="math")
    assert row_of(run).status == "kept"
    assert run.plan.decisions["sdpa_backend"] == "math"
    assert not cuda.flash_sdp_enabled()
    run.undo()
    assert attention_flags() == before


class Direct(nn.Module):
    """In inference MultiheadAttention has a path of its own that calls no attention kernel."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(("kind", "tried"), [(Attending, []), (Direct, ["math"])])
def test_inference_is_watched_too(kind, tried):
    model = kind().eval()
    run = flatout.optimize(model, make()[1], techniques=REST, budget=20)
    assert [trial.candidate for trial in row_of(run).trials] == tried
    run.undo()


def test_plain_products_are_not_tried_where_lengths_vary():
    run = tuned(*make(lengths=(8, 12)))
    assert row_of(run).status == "not applicable"
    assert row_of(run).trials == ()


def test_a_kernel_that_the_user_has_turned_off_stays_off():
    cuda.enable_flash_sdp(False)
    run = tuned(*make())
    assert row_of(run).status == "not applicable"
    assert not cuda.flash_sdp_enabled()


def test_models_without_attention_are_told_so():
    model, loader, opt = make_job()
    assert isinstance(model, Net)
    run = tuned(model, loader, opt)
    assert row_of(run).status == "not applicable"
    assert "attention" in row_of(run).why


def test_where_no_operators_were_counted_a_forward_shows_it():
    job = Job(Net(), [], [], None, functional.cross_entropy, None, torch.device("cpu"))
    job.batches = [(torch.randn(4, 8), torch.randint(0, 3, (4,)))]
    SdpaBackend().check(job)
    with pytest.raises(NotApplicable, match="no step calls"):
        SdpaBackend().candidates(job)


def test_a_compiled_model_keeps_the_kernels_it_was_compiled_with():
    model, batches, opt = make()
    model.compile(backend="eager")
    run = tuned(model, batches, opt)
    assert row_of(run).status == "not applicable"
    assert "compiled" in row_of(run).why


@pytest.mark.parametrize("value", [True, "efficient", "cudnn"])
def test_names_that_the_device_does_not_know_are_refused(value):
    model, batches, opt = make()
    with pytest.raises(ValueError, match="must be one of 'flash', 'math' or False"):
        tuned(model, batches, opt, sdpa_backend=value)
