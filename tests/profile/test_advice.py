"""Advice of a profile, without techniques that a report decided."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from flatout.profile import Operator, Profile, Sync
from flatout.profile.advice import advise
from flatout.report import Row, Status
from tests.profile.profile_sample import profile_of, sync_bound
from tests.reasons import advice
from tests.training.test_device_verdict import TITLES, named_in, row

LINES = {
    "batch_size": "larger batches",
    "channels_last": "torch.channels_last",
    "compile": "torch.compile(model)",
    "cuda_graph": "a CUDA graph",
    "fused_optimizer": "flatout.optim.fuse",
    "precision": "torch.autocast",
    "workers": "flatout.data.tune",
}
"""Parts of the code that tries a technique without flatout, by the technique's name."""

ON_GPU = {"device": "cuda (NVIDIA H100)"}
CONVOLUTION = Operator("aten::convolution_backward", 1.0, 0.003, 0.0, 0.3)


def slow_on_cpu() -> Profile:
    """Return a profile of steps that wait for data, update slowly, and have a costly operator."""
    profile = profile_of(loader_wait=0.3, forward=0.1, backward=0.1, update=0.4)
    return replace(profile, profiled_steps=3, operators=(CONVOLUTION,))


def slow_on_gpu() -> Profile:
    """Return a profile of steps with a GPU that waits for launches, for data and for copies."""
    profile = profile_of(loader_wait=0.12, h2d=0.1, forward=0.4, backward=0.3)
    return replace(profile, profiled_steps=3, device_busy=0.4, operators=(CONVOLUTION,))


def codes(profile: Profile, *rows: Row) -> list[set[str]]:
    return list(map(advice, advise(profile, rows)))


@pytest.mark.parametrize(
    ("profile", "remedies"),
    [
        (slow_on_cpu(), ("workers", "in_memory", "fused_optimizer", "precision", "channels_last", "compile")),
        (slow_on_gpu(), ("workers", "in_memory", "precision", "channels_last", "compile", "cuda_graph", "batch_size")),
    ],
    ids=["cpu", "gpu"],
)
def test_no_sentence_names_a_decided_technique(profile: Profile, remedies: tuple[str, ...]) -> None:
    others = [row(name, "kept") for name in TITLES if name not in remedies]
    choices: tuple[tuple[Status, Status], ...] = (("kept", "not tried"), ("rejected", "not applicable"))
    for pair in choices:
        for statuses in product(pair, repeat=len(remedies)):
            decided = dict(zip(remedies, statuses, strict=True))
            text = "\n".join(advise(profile, [row(*item) for item in decided.items()] + others))
            assert named_in(text) == {name for name, status in decided.items() if status == "not tried"}
            assert not [name for name, line in LINES.items() if line in text]


@pytest.mark.parametrize("profile", [slow_on_cpu(), slow_on_gpu()], ids=["cpu", "gpu"])
def test_advice_without_a_report_names_code_of_torch(profile: Profile) -> None:
    text = "\n".join(advise(profile))
    assert "techniques=" not in text
    on_cpu = {"workers", "fused_optimizer", "precision", "channels_last", "compile"}
    on_gpu = {"workers", "batch_size", "cuda_graph", "precision", "channels_last", "compile"}
    named = {name for name, line in LINES.items() if line in text}
    assert named == (on_cpu if profile.device_busy is None else on_gpu)


def test_advice_begins_with_the_largest_cost_and_omits_small_ones() -> None:
    assert codes(slow_on_cpu()) == [{"update"}, {"data-wait"}, {"operator"}, {"own-code"}]
    assert codes(slow_on_gpu()) == [{"launch-bound"}, {"operator"}, {"data-wait"}, {"copies"}, {"own-code"}]
    assert codes(profile_of(forward=0.3, backward=0.63, update=0.04)) == [{"nothing"}]


def test_idle_time_of_the_gpu_in_other_phases_is_not_the_launches() -> None:
    profile = replace(profile_of(loader_wait=0.3, forward=0.4, backward=0.2), device_busy=0.6)
    assert codes(profile) == [{"data-wait"}, {"own-code"}]


@pytest.mark.parametrize(
    ("operator", "is_advised"),
    [("aten::mm", True), ("aten::_fused_adamw_", False), ("aten::_foreach_add_", False), ("flatout::step_", False)],
)
def test_remedies_are_advised_for_operators_that_they_apply_to(operator: str, is_advised: bool) -> None:
    profile = profile_of(forward=0.5, backward=0.5)
    (sentence,) = advise(replace(profile, operators=(replace(CONVOLUTION, name=operator),)))
    assert (advice(sentence) == {"operator"}) == is_advised
    assert "channels_last" not in sentence


def test_syncs_are_named_on_a_gpu_and_on_a_cpu() -> None:
    places = [Sync("item", f"train.py:{line}", "", "host_idle", 1.0) for line in range(1, 6)]
    profile = replace(profile_of(forward=0.5, backward=0.5), syncs=(Sync("item", "", "", "update", 1.0), *places))
    for environment, code in (({}, "would-wait"), (ON_GPU, "sync")):
        (sentence,) = advise(replace(profile, environment=environment))
        assert advice(sentence) == {code}
        assert "train.py:3 (item) and 2 more" in sentence
        assert "train.py:4" not in sentence
    assert [advice(sentence) for sentence in sync_bound().advice][-1] == {"sync"}


def test_a_gpu_without_kernels_is_not_taken_for_a_cpu() -> None:
    syncs = (Sync("synchronize", "train.py:1", "", "update", 1.0),)
    profile = replace(slow_on_cpu(), syncs=syncs, environment=ON_GPU)
    found = codes(profile)
    assert found[0] == {"no-kernels"}
    assert {"would-wait"} not in found
    assert {"no-kernels"} not in codes(replace(profile, profiled_steps=0))
