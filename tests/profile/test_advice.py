"""Advice of a profile, without techniques that a report decided or that the trace shows in use."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as record

from flatout.profile.in_use import techniques_in_use
from flatout.profile.trace import BOUNDARY, Trace
from flatout.report import Row, Status
from tests.profile.events import ProfileRecording, step, summary_of
from tests.reasons import advice
from tests.training.test_device_verdict import TITLES, named_in, row

LINES = {
    "batch_size": "larger batches",
    "channels_last": "torch.channels_last",
    "compile": "torch.compile(model)",
    "cuda_graph": "a CUDA graph",
    "in_memory": "a cache of the samples",
    "precision": "torch.autocast",
    "workers": "num_workers=",
}
"""Parts of the code that tries a technique without flatout, by the technique's name."""


def slow_on_cpu() -> ProfileRecording:
    """Return a step that loads data on the training thread, updates slowly, and has a costly operator."""
    r = step(loader_wait=(0, 300), forward=(310, 500))
    r.function("data.py(7): __getitem__", 10, 290)
    r.host("aten::convolution_backward", 320, 490)
    r.host("Optimizer.step#AdamW.step", 520, 900, "user_annotation")
    return r


def slow_on_gpu() -> ProfileRecording:
    """Return a step with a GPU that waits for launches, for data and for copies."""
    r = step(loader_wait=(0, 200), h2d=(200, 400), forward=(400, 900))
    r.host("aten::convolution", 410, 890)
    for at in range(420, 880, 40):
        r.kernel(at, at + 5, at + 25)
    return r


def advice_on(recording: ProfileRecording, rows: list[Row]) -> str:
    return "\n".join(summary_of(recording, rows=rows).advice)


@pytest.mark.parametrize(
    ("recording", "remedies"),
    [
        (slow_on_cpu(), ("workers", "in_memory", "fused_optimizer", "precision", "channels_last", "compile")),
        (slow_on_gpu(), ("workers", "in_memory", "precision", "channels_last", "compile", "cuda_graph", "batch_size")),
    ],
    ids=["cpu", "gpu"],
)
def test_no_sentence_names_a_decided_technique(recording: ProfileRecording, remedies: tuple[str, ...]) -> None:
    others = [row(name, "kept") for name in TITLES if name not in remedies]
    choices: tuple[tuple[Status, Status], ...] = (("kept", "not tried"), ("rejected", "not applicable"))
    for pair in choices:
        for statuses in product(pair, repeat=len(remedies)):
            decided = dict(zip(remedies, statuses, strict=True))
            text = advice_on(recording, [row(*item) for item in decided.items()] + others)
            assert named_in(text) == {name for name, status in decided.items() if status == "not tried"}
            assert not [name for name, line in LINES.items() if line in text]


def test_advice_without_a_report_names_code_of_torch() -> None:
    for recording in (slow_on_cpu(), slow_on_gpu()):
        text = advice_on(recording, [])
        assert "techniques=" not in text
        assert "To try: " in text
    assert "flatout.optim.fuse(optimizer)" in advice_on(slow_on_cpu(), [])
    assert "flatout.data.Prefetcher" in advice_on(slow_on_gpu(), [])


@pytest.mark.parametrize(
    ("technique", "name", "args"),
    [
        ("compile", "Torch-Compiled Region: 0/0", {}),
        ("precision", "aten::addmm", {"Input type": ["c10::BFloat16", "c10::BFloat16"]}),
        ("channels_last", "aten::convolution", {"Input Strides": [[192, 1, 24, 3], [27, 1, 9, 3]]}),
    ],
)
def test_a_technique_in_use_is_not_advised(technique: str, name: str, args: dict[str, object]) -> None:
    recording = slow_on_cpu()
    assert LINES[technique] in advice_on(recording, [])
    recording.host(name, 330, 340, **args)
    assert LINES[technique] not in advice_on(recording, [])
    assert set().union(*map(advice, summary_of(recording).advice)) >= {"data-wait", "operator"}


@pytest.mark.parametrize(
    ("changes", "found"),
    [({}, set()), ({"autocast": True}, {"precision"}), ({"memory_format": torch.channels_last}, {"channels_last"})],
)
def test_a_real_trace_shows_the_techniques_in_use(changes: dict[str, Any], found: set[str], tmp_path: Path) -> None:
    model = nn.Conv2d(3, 8, 3).to(memory_format=changes.get("memory_format", torch.contiguous_format))
    with record(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(2):
            with record_function(BOUNDARY):
                pass
            with torch.autocast("cpu", torch.bfloat16, enabled=changes.get("autocast", False)):
                model(torch.ones(2, 3, 8, 8)).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    assert techniques_in_use(Trace.read(tmp_path / "trace.json")) == found
