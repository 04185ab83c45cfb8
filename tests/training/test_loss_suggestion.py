"""Errors about batches, which show the line of code for the user's own batches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import flatout
from tests.jobs import QUICK


class OneInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class TwoInputs(OneInput):
    def forward(self, image: Tensor, mask: Tensor) -> Tensor:
        return self.body(image * mask)


class OwnLoss(OneInput):
    """Model that returns its loss, as models of transformers do."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        output = self.body(input_ids)
        return {"logits": output} if labels is None else Output(functional.cross_entropy(output, labels))


@dataclass
class Output:
    loss: Tensor


X, Y, ONES = torch.randn(4, 8), torch.arange(4) % 3, torch.ones(4, 8)

BATCHES: dict[str, tuple[nn.Module, Any, bool, str]] = {
    "three": (OneInput(), (X, Y, ONES), True, "loss_fn(model(batch[0]), batch[1])"),
    "three, of which two are inputs": (TwoInputs(), [X, ONES, Y], True, "loss_fn(model(batch[0], batch[1]), batch[2])"),
    "a pair of a pair": (TwoInputs(), ((X, ONES), Y), True, "loss_fn(model(*batch[0]), batch[1])"),
    "a pair of a mapping": (
        TwoInputs(),
        ({"image": X, "mask": ONES}, Y),
        True,
        "loss_fn(model(**batch[0]), batch[1])",
    ),
    "keys that forward does not know": (
        OneInput(),
        {"image": X, "label": Y},
        True,
        "loss_fn(model(batch['image']), batch['label'])",
    ),
    "keys of which it knows some": (
        TwoInputs(),
        {"image": X, "mask": ONES, "target": Y, "index": Y},
        True,
        "loss_fn(model(image=batch['image'], mask=batch['mask']), batch['target'])",
    ),
    "keys without a label's name": (
        OneInput(),
        {"x": X, "kind": Y},
        True,
        "loss_fn(model(x=batch['x']), batch['kind'])",
    ),
    "a loss of the model's own": (
        OwnLoss(),
        {"input_ids": X, "labels": Y, "idx": Y},
        False,
        "model(input_ids=batch['input_ids'], labels=batch['labels']).loss",
    ),
    "no loss at all": (OneInput(), {"x": X}, False, "loss_fn(model(x=batch['x']), labels)"),
}


@pytest.mark.parametrize(("model", "batch", "has_loss_fn", "line"), BATCHES.values(), ids=BATCHES)
def test_the_error_shows_a_line_with_the_batchs_own_names(model: Any, batch: Any, has_loss_fn: bool, line: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_fn = functional.cross_entropy if has_loss_fn else None
    settings: Any = {"techniques": QUICK, "budget": 0, "device": "cpu", "max_grad_norm": 1.0}
    with pytest.raises((TypeError, ValueError), match=re.escape(f"compute_loss=lambda model, batch: {line}")) as error:
        flatout.optimize(model, [batch] * 4, optimizer, loss_fn, **settings)
    if "labels)" in line and "batch['labels']" not in line:
        return
    # The line runs unchanged if loss_fn is defined.
    written = re.search(r"compute_loss=(lambda model, batch: .*)$", str(error.value))
    assert written is not None
    compute_loss = eval(written[1], {"loss_fn": functional.cross_entropy})
    run = flatout.optimize(model, [batch] * 4, optimizer, compute_loss=compute_loss, **settings)
    run.step(next(iter(run.loader)))


def test_a_type_error_of_the_users_own_passes_through() -> None:
    class Broken(OneInput):
        def forward(self, x: Tensor) -> Tensor:
            raise TypeError("mine")

    model = Broken()
    with pytest.raises(TypeError, match=r"^mine$"):
        flatout.optimize(model, [{"x": X}] * 4, torch.optim.SGD(model.parameters(), 0.1), budget=0)
