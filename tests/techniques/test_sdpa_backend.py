"""Attention kernels: their order of preference, trials and exact reverts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.backends import cuda
from torch.nn import functional

import flatout
from flatout.core.snapshot import Snapshot
from flatout.techniques.sdpa_backend import KERNELS
from tests.clock import TimedStep
from tests.helpers import Operators, snapshot
from tests.jobs import NO_TECHNIQUES, Net, job_of
from tests.process_state import ATTENTION, attention, set_attention
from tests.techniques.harness import candidates, count_work, decided, forced, refusal, refused


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


def the_job(*lengths, **settings):
    model, batches, opt = make(lengths or (8,))
    return job_of(model, batches, optimizer=opt, loss_fn=functional.cross_entropy, **settings)


# -- the candidate ----------------------------------------------------------------------------------------------


@given(
    st.sampled_from(sorted(KERNELS)),
    st.sampled_from(["cpu", "cuda"]),
    st.fixed_dictionaries(dict.fromkeys(ATTENTION, st.booleans())),
    st.permutations(range(5)),
)
def test_off_is_exactly_as_before(kernel, device, enabled, order):
    if device == "cpu" and kernel not in ("flash", "math"):
        device = "cuda"
    set_attention((enabled, order))
    before, state = attention(), Snapshot.capture([nn.Linear(1, 1)])
    candidate = forced("sdpa_backend", kernel, job_of(nn.Linear(1, 1), device=device))
    for _ in range(2):
        with candidate:
            pass
        assert attention() == before
    with candidate:
        state.restore()
        assert attention() == before


@pytest.mark.parametrize("kernel", KERNELS)
def test_on_cuda_it_is_an_order_and_not_a_prohibition(kernel):
    enabled, order = attention()
    with forced("sdpa_backend", kernel, job_of(nn.Linear(1, 1), device="cuda")):
        assert attention()[0] == enabled
        first = int(KERNELS[kernel])
        assert attention()[1] == [first, *(k for k in order if k != first)]


def test_on_the_cpu_the_fused_kernel_gives_way_to_plain_products():
    model, batches, _ = make()
    with Operators() as fused_way:
        fused = model(batches[0][0])
    with forced("sdpa_backend", "math", job_of(model)), Operators() as plain_way:
        plain = model(batches[0][0])
    flash = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert flash in fused_way.names
    assert flash not in plain_way.names
    torch.testing.assert_close(fused, plain)


# -- trials --------------------------------------------------------------------------------------------------


def test_plain_products_are_tried_verified_and_leave_no_trace(clock):
    model, batches, opt = make()
    before = snapshot(model, opt)
    job = job_of(model, batches, optimizer=opt, loss_fn=TimedStep(clock, 0.01))
    with decided("sdpa_backend", job=job) as outcome:
        pass
    row = outcome.rows["sdpa_backend"]
    (trial,) = row.trials
    assert (row.status, trial.candidate, trial.failure) == ("rejected", "math", "")
    assert trial.loss_difference is not None
    assert trial.loss_difference < 1e-5
    assert snapshot(model, opt) == before


def test_a_forced_kernel_is_on_until_undo():
    model, batches, opt = make()
    before = attention()
    techniques = NO_TECHNIQUES | {"sdpa_backend": "math"}
    run = flatout.optimize(model, batches, opt, functional.cross_entropy, techniques=techniques, budget=0)
    assert run.report.row("sdpa_backend").status == "kept"
    assert run.plan.decisions["sdpa_backend"] == "math"
    assert not cuda.flash_sdp_enabled()
    run.undo()
    assert attention() == before


def test_a_forced_kernel_that_attention_does_not_run_in_is_refused():
    """The fused kernel of the CPU has no dropout."""
    model, batches, opt = make()
    model.attention.dropout = 0.5
    job = job_of(model, batches, optimizer=opt, loss_fn=functional.cross_entropy)
    assert refused(lambda: forced("sdpa_backend", "flash", job)) == {"kernel-falls-back"}
    assert refused(lambda: forced("sdpa_backend", "math", job)) is None
    model.eval()
    assert refused(lambda: forced("sdpa_backend", "flash", job)) is None


# -- candidates in trials ------------------------------------------------------------------------------------


class Direct(nn.Module):
    """Attention without MultiheadAttention, whose inference path calls no attention kernel."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return functional.scaled_dot_product_attention(q, k, v)


def test_inference_is_watched_too():
    (candidate,) = candidates("sdpa_backend", job_of(Direct().eval(), make()[1], inference=True))
    assert candidate.value == "math"
    batches = make()[1]
    job = job_of(Attending().eval(), batches, inference=True)
    count_work(job, batches[0])
    assert "no-attention" in refusal("sdpa_backend", job)


def test_plain_products_are_not_tried_where_lengths_vary():
    assert refusal("sdpa_backend", the_job(8)) is None
    assert "one-kernel" in refusal("sdpa_backend", the_job(8, 12))


def test_a_kernel_that_the_user_has_turned_off_stays_off():
    cuda.enable_flash_sdp(False)
    assert "no-attention" in refusal("sdpa_backend", the_job())
    assert not cuda.flash_sdp_enabled()


@pytest.mark.parametrize("counted", [False, True])
def test_models_without_attention_have_a_reason(counted):
    batch = torch.randn(4, 8), torch.randint(0, 3, (4,))
    job = job_of(Net(), [batch], loss_fn=functional.cross_entropy)
    if counted:
        count_work(job, batch)
    assert "no-attention" in refusal("sdpa_backend", job)


def test_a_compiled_model_keeps_the_kernels_it_was_compiled_with():
    model, batches, opt = make()
    model.compile(backend="eager")
    job = job_of(model, batches, optimizer=opt, loss_fn=functional.cross_entropy)
    assert "comes-compiled" in refusal("sdpa_backend", job)


@pytest.mark.parametrize("value", [True, "efficient", "cudnn"])
def test_names_that_the_device_does_not_know_are_refused(value):
    with pytest.raises(ValueError, match=f"sdpa_backend.*{value!r}"):
        forced("sdpa_backend", value, the_job())
