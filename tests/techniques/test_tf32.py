"""TF32 is turned on and off in both of torch's vocabularies, and stands back behind whoever has chosen."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import flatout
from flatout._backends import Float32Precision
from flatout.job import Job
from flatout.measure import State
from flatout.techniques import NotApplicable
from flatout.techniques.autocast import autocast_class
from flatout.techniques.tf32 import Tf32, Tf32Switch
from tests.jobs import make_job

matmul, mkldnn = torch.backends.cuda.matmul, torch.backends.mkldnn


def fresh():
    """As torch starts."""
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


def job_of(model=None, device="cuda"):
    return Job(model or nn.Linear(2, 2), [], [], None, None, None, torch.device(device))


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
    before, readable = picture(), Float32Precision().legacy is not None
    switch = Tf32Switch()
    for _ in range(2):
        switch.enable()
        assert matmul.fp32_precision == "tf32"
        if readable:  # torch.compile reads it: pytorch #166387
            assert torch.get_float32_matmul_precision() in ("high", "medium")
            assert matmul.allow_tf32
        switch.disable()
        assert picture() == before


@given(st.lists(st.sampled_from(sorted(SETTINGS)), max_size=3), st.booleans())
def test_state_restores_what_a_trial_turned(names, broken_off):
    fresh()
    for name in names:
        SETTINGS[name]()
    state, before = State.capture([nn.Linear(1, 1)]), picture()
    switch = Tf32Switch()
    switch.enable()
    if not broken_off:
        switch.disable()
    state.restore()
    assert picture() == before


@pytest.mark.parametrize("name", ["highest", "forbid", "matmul ieee", "cudnn ieee", "all ieee", "cudnn off"])
def test_a_precision_chosen_by_hand_stands(ampere, name):
    Tf32().check(job_of())
    assert [switch.label for switch in Tf32().candidates(job_of())] == ["tf32"]
    SETTINGS[name]()
    Tf32().check(job_of())
    with pytest.raises(NotApplicable, match="set by hand"):
        Tf32().candidates(job_of())
    assert Tf32().forced(job_of(), True).value is True


def test_rows_say_why_it_does_not_apply(ampere, monkeypatch):
    model = nn.Linear(2, 2)
    model.__class__ = autocast_class(nn.Linear, "cuda", torch.bfloat16)
    for job, reason in (
        (job_of(device="cpu"), "CPU"),
        (job_of(model), "multiplies in bfloat16"),
        (job_of(nn.Linear(2, 2, dtype=torch.float64)), "no float32 parameters"),
    ):
        with pytest.raises(NotApplicable, match=reason):
            Tf32().check(job)
    for name in ("high", "medium", "allow", "matmul tf32"):
        fresh()
        SETTINGS[name]()
        with pytest.raises(NotApplicable, match="on already"):
            Tf32().check(job_of())
    fresh()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    with pytest.raises(NotApplicable, match="older than Ampere"):
        Tf32().check(job_of())


def test_true_is_the_only_value():
    with pytest.raises(ValueError, match="must be True or False"):
        Tf32().forced(job_of(), "tf32")


def test_precision_names_it():
    model, loader, opt = make_job()
    with pytest.raises(ValueError, match="precision must serve this job, got 'tf32'"):
        flatout.optimize(model, loader, opt, functional.cross_entropy, precision="tf32", budget=0, device="cpu")
    run = flatout.optimize(model, loader, opt, functional.cross_entropy, precision="fp32", budget=0, device="cpu")
    rows = {row.technique: row for row in run.report.rows}
    assert rows["tf32"].status == "not tried"
    assert "does without it" in rows["precision"].why
    run.undo()
