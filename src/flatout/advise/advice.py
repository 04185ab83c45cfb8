"""Advice on a script: boxes, causes, measured techniques and a diff, as data and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flatout.advise.batch_trial import TIMES
from flatout.advise.causes import Box, BoxName, Cause, Code, boxes_of, causes_of, rows_of, shown_gain, training_site
from flatout.advise.edits import diff_of
from flatout.advise.session import Observations
from flatout.core import formatting
from flatout.data import Stage
from flatout.report.document import Block, Note, Part, Table
from flatout.report.model import Row
from flatout.report.shown import Shown

SCHEMA_VERSION = 1
"""Version of the JSON form, which increases when a field changes its meaning or is removed."""


_BOXES: Mapping[BoxName, str] = {
    "device": "tensors moved to the GPU",
    "loading": "loader workers and pinned memory",
    "precision": "mixed precision",
    "evaluation": "evaluation without gradients",
}

_MARKS: Mapping[bool | None, tuple[str, str]] = {
    True: ("[x]", "chosen"),
    False: ("[ ]", "slower"),
    None: ("[-]", "quiet"),
}
"""Mark and style of a box that is ticked, crossed, or not applicable."""

_EXPLANATIONS: Mapping[Code, str] = {
    "on_cpu": 'the model trains on the CPU beside a GPU. Move it: model.to("cuda")',
    "starved_loader": "{share} of a step waits for data, with {workers} workers. {remedy}",
    "sync_in_loop": "on a GPU, {call} in every step waits for all earlier work. Keep the tensor, and read it every "
    "100 steps",
    "fp32_matmuls": "fp32 products take {share} of a step. {remedy}",
    "tiny_batches": f"batches {{batch}} are small: {TIMES} times the samples take {{times}} times as long. "
    "Raise the batch size",
    "evaluation_with_gradients": "{module} records gradients that no backward uses. Use torch.no_grad()",
}

_REMEDIES: Mapping[str, str] = {
    "more_workers": "Add workers",
    "cheaper_samples": "More workers would not help. Make samples cheaper, or keep them in memory",
    "autocast": "Use torch.autocast",
    "no_bf16": "bf16 is not faster on this device",
}
"""Remedies of causes that have several possible remedies."""


@dataclass(frozen=True, repr=False)
class Advice(Shown):
    """Advice on a script.

    Attributes:
        boxes: the four boxes of the checklist.
        causes: causes that slow the script down, the largest gain first.
        techniques: module and row of each technique that was timed, the largest gain first.
        diff: unified diff in the script's folder; empty if no change is surely correct.
        updates: number of updates that were observed.
        stages: stages of loading, the slowest first; empty if the script is not starved.
    """

    _TITLE = "flatout advise"

    boxes: tuple[Box, ...]
    causes: tuple[Cause, ...]
    techniques: tuple[tuple[str, Row], ...]
    diff: str
    updates: int
    stages: tuple[Stage, ...] = ()

    @classmethod
    def of(cls, seen: Observations, folder: Path) -> Advice:
        """Return the advice on a script.

        Args:
            seen: observations of the script.
            folder: folder of the script.
        """
        causes = causes_of(seen)
        boxes = boxes_of(seen, causes)
        site = training_site(seen)
        diff = diff_of(causes, folder, "cpu" if site is None else site.device, seen.observer.trained)
        is_starved = any(cause.code == "starved_loader" for cause in causes)
        stages = seen.stages if is_starved else ()
        return cls(boxes, causes, tuple(rows_of(seen)), diff, seen.report.updates, stages)

    def to_dict(self) -> dict[str, Any]:
        techniques = [
            {"module": module, "technique": row.technique, "status": row.status, "gain": shown_gain(row)}
            for module, row in self.techniques
        ]
        return {
            "schema": "flatout.advice",
            "schema_version": SCHEMA_VERSION,
            "updates": self.updates,
            "boxes": [asdict(box) for box in self.boxes],
            "causes": [asdict(cause) for cause in self.causes],
            "techniques": techniques,
            "stages": [asdict(stage) for stage in self.stages],
            "diff": self.diff,
        }

    def to_diff(self, path: Path) -> None:
        """Write the diff to a file, without a change of its line ends."""
        path.write_bytes(self.diff.encode())

    def _facts(self) -> dict[str, str]:
        return {
            "causes": formatting.counted(len(self.causes), "cause"),
            "updates": formatting.counted(self.updates, "update"),
        }

    def _blocks(self) -> Iterator[Block]:
        if not self.updates:
            yield Note("No optimizer has stepped: there is nothing to advise on.")
            return
        yield Table(
            [[_MARKS[box.is_ticked], _BOXES[box.name], (formatting.clean(box.where), "place")] for box in self.boxes]
        )
        yield Note("")
        found: list[tuple[float, list[Part]]] = []
        for cause in self.causes:
            gain = "" if cause.gain is None else f"{'~' if cause.is_estimate else ''}{cause.gain:.2f}×"
            found.append((cause.gain or 0.0, [gain, explanation(cause), (formatting.clean(cause.where), "place")]))
        for module, row in self.techniques:
            if (faster := shown_gain(row)) is not None:
                name = f"{row.technique} {formatting.clean(row.chosen)}".strip()
                found.append((faster, [f"{faster:.2f}×", name, module]))
        if found:
            rows = [cells for _, cells in sorted(found, key=lambda each: -each[0])]
            yield Table(rows, ["gain", "what", "where"], frozenset({0}))
        else:
            yield Note("Nothing sticks out, and no technique that was tried is faster.")
        if self.stages:
            yield Note("")
            rows = [
                [formatting.share(each.share, 0), each.name, each.what, (formatting.clean(each.place), "place")]
                for each in self.stages
            ]
            yield Table(rows, ["of a batch", "stage", "what", "where"], frozenset({0}))


def explanation(cause: Cause) -> str:
    """Return a sentence on a cause and its remedy."""
    values = {**cause.values, "remedy": _REMEDIES.get(cause.values.get("remedy", ""), "")}
    return " ".join(_EXPLANATIONS[cause.code].format_map(values).split())
