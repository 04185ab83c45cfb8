"""TF32 in both of torch's APIs. The user's own setting takes precedence."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import flatout
from flatout.core.snapshot import Snapshot
from tests.jobs import job_of, make_job
from tests.reasons import reasons
from tests.techniques.harness import candidates, forced, refusal

matmul, mkldnn = torch.backends.cuda.matmul, torch.backends.mkldnn


def fresh():
    """Set precisions to torch's defaults."""
    for module in (torch.backends.cudnn, torch.backends):
        module.fp32_precision = "none"
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("highest")
    matmul.fp32_precision = mkldnn.matmul.fp32_precision = "none"


@pytest.fixture(autouse=True)
def at_start():
    fresh()
    yield
    fresh()


@pytest.fixture
def ampere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))


def legacy(read):
    try:
        return read()
    except RuntimeError:
        return "refused"


def picture():
    return (
        matmul.fp32_precision,
        mkldnn.matmul.fp32_precision,
        torch.backends.cudnn.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.fp32_precision,
        legacy(torch.get_float32_matmul_precision),
        legacy(lambda: matmul.allow_tf32),
        legacy(lambda: torch.backends.cudnn.allow_tf32),
    )


def on_gpu(model=None):
    return job_of(model or nn.Linear(2, 2), device="cuda")


SETTINGS = {
    "highest": lambda: torch.set_float32_matmul_precision("highest"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow": lambda: setattr(matmul, "allow_tf32", True),
    "forbid": lambda: setattr(matmul, "allow_tf32", False),
    "matmul tf32": lambda: setattr(matmul, "fp32_precision", "tf32"),
    "matmul ieee": lambda: setattr(matmul, "fp32_precision", "ieee"),
    "matmul none": lambda: setattr(matmul, "fp32_precision", "none"),
    "cudnn ieee": lambda: setattr(torch.backends.cudnn, "fp32_precision", "ieee"),
    "all ieee": lambda: setattr(torch.backends, "fp32_precision", "ieee"),
    "cpu bf16": lambda: setattr(mkldnn.matmul, "fp32_precision", "bf16"),
    "cudnn off": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
}


@given(st.lists(st.sampled_from(sorted(SETTINGS)), max_size=4))
def test_off_is_exactly_as_before_whatever_was_set_and_how(names):
    fresh()
    for name in names:
        SETTINGS[name]()
    before, readable = picture(), legacy(torch.get_float32_matmul_precision) != "refused"
    candidate = forced("tf32", True, on_gpu())
    for _ in range(2):
        with candidate:
            assert matmul.fp32_precision == "tf32"
            if readable:  # torch.compile reads it: pytorch #166387
                assert torch.get_float32_matmul_precision() in ("high", "medium")
                assert matmul.allow_tf32
        assert picture() == before


@given(st.lists(st.sampled_from(sorted(SETTINGS)), max_size=3), st.booleans())
def test_state_restores_what_a_trial_turned(names, broken_off):
    fresh()
    for name in names:
        SETTINGS[name]()
    state, before = Snapshot.capture([nn.Linear(1, 1)]), picture()
    with contextlib.ExitStack() as stack:
        stack.enter_context(forced("tf32", True, on_gpu()))
        if not broken_off:
            stack.close()
        state.restore()
        assert picture() == before


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize("name", ["highest", "forbid", "matmul ieee", "cudnn ieee", "all ieee", "cudnn off"])
def test_a_precision_set_by_the_user_is_kept(name):
    assert [candidate.label for candidate in candidates("tf32", on_gpu())] == ["tf32"]
    SETTINGS[name]()
    assert "set-by-user" in refusal("tf32", on_gpu())
    assert forced("tf32", True, on_gpu()).value is True


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize("name", ["high", "medium", "allow", "matmul tf32"])
def test_a_flag_that_is_on_stays_on(name):
    SETTINGS[name]()
    assert "already-on" in refusal("tf32", on_gpu())


@pytest.mark.usefixtures("ampere")
def test_rows_say_why_it_does_not_apply(monkeypatch):
    assert "on-cpu" in refusal("tf32", job_of(nn.Linear(2, 2)))
    assert "no-float32" in refusal("tf32", on_gpu(nn.Linear(2, 2, dtype=torch.float64)))
    model = nn.Linear(2, 2)
    with forced("precision", "bf16", job_of(model)):
        assert "in-16-bits" in refusal("tf32", on_gpu(model))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert "old-gpu" in refusal("tf32", on_gpu())


def test_true_is_the_only_value():
    with pytest.raises(ValueError, match=r"tf32.*'tf32'"):
        forced("tf32", "tf32", on_gpu())


def test_precision_names_it():
    model, loader, opt = make_job()
    with pytest.raises(ValueError, match=r"precision.*'tf32'"):
        flatout.optimize(model, loader, opt, functional.cross_entropy, precision="tf32", budget=0, device="cpu")
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, precision="fp32", budget=0, device="cpu")
    assert run.report.row("tf32").status == "not tried"
    assert "forbidden" in reasons(run.report.row("precision"))
    run.undo()
