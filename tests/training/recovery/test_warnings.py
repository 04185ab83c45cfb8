"""Warnings of steps that run out of memory: one for each smaller size of parts, with all differences."""

import warnings

import pytest
from torch import nn

from tests.reasons import reasons
from tests.training.recovery.harness import batches_of, make, net, trap_of

DIFFERENCES = {"batchnorm-sees-parts", "hooks-see-parts", "random-numbers-per-part"}


def warnings_of(run, *sizes, limit=8):
    """Return the warnings of steps of these sizes, if more than ``limit`` samples do not fit."""
    trap_of(run).arm("forward", limit)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in batches_of(*sizes):
            run.step(batch)
    assert all(warning.filename == __file__ for warning in caught)
    assert all(warning.category is RuntimeWarning for warning in caught)
    return [str(warning.message) for warning in caught]


def differences(warning):
    """Return the codes of the differences from the whole batch."""
    assert "computed-in-parts" in reasons(warning)
    return reasons(warning) & DIFFERENCES


def test_the_first_failure_warns_with_both_sizes():
    (warning,) = warnings_of(make(loss_fn=nn.MultiMarginLoss()), 16, 16, 16)
    assert not differences(warning)
    assert "16 samples" in warning
    assert "parts of 8" in warning


def test_each_time_that_parts_become_smaller_warns():
    run = make()
    assert len(warnings_of(run, 16, 16)) == 1
    (warning,) = warnings_of(run, 16, limit=2)
    assert run.micro_batch == 2
    assert "parts of 2" in warning


@pytest.mark.parametrize(
    ("layer", "difference"),
    [(lambda: nn.BatchNorm1d(6), "batchnorm-sees-parts"), (lambda: nn.Dropout(0.1), "random-numbers-per-part")],
    ids=["batchnorm", "dropout"],
)
def test_the_warning_names_what_differs(layer, difference):
    (warning,) = warnings_of(make(net(3, 1, layer), loss_fn=nn.MultiMarginLoss()), 16)
    assert differences(warning) == {difference}


def test_nothing_differs_in_eval_mode():
    layer = lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.1))  # noqa: E731
    run = make(net(3, 1, layer), loss_fn=nn.MultiMarginLoss())
    run.model.eval()
    with pytest.warns(UserWarning, match="eval mode"):
        run.step(batches_of(4)[0])
    (warning,) = warnings_of(run, 16)
    assert not differences(warning)


def test_a_backward_hook_sees_the_gradients_of_parts():
    run = make(loss_fn=nn.MultiMarginLoss())
    run.model[0].weight.register_hook(lambda grad: None)
    (warning,) = warnings_of(run, 16)
    assert differences(warning) == {"hooks-see-parts"}


def test_steps_that_fit_do_not_warn():
    run = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in batches_of(16, 16):
            run.step(batch)
    assert run.micro_batch is None
