"""Steps that draw from Python's generators or change Python objects, seen by the first step or in trials."""

import math

import pytest
import torch
from torch import nn

from flatout.techniques.compile import Compile
from flatout.training.objective import Objective
from flatout.tuning import trials
from tests.jobs import job_of
from tests.reasons import reasons
from tests.techniques.harness import decided

SEEN = {"draws_on_host": "draws-on-host", "python_state": "changes-python-state"}


def job(compute_loss):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return job_of(model, [torch.randn(8, 4)] * 2, optimizer, compute_loss=compute_loss, expected_steps=10**6)


@pytest.mark.parametrize("field", SEEN)
def test_a_technique_that_runs_python_once_is_refused(field):
    made = job(lambda model, x: model(x).sum())
    setattr(made.objective, field, "something")
    with decided("compile", job=made) as outcome:
        row = outcome.rows["compile"]
    assert row.status == "not applicable"
    assert SEEN[field] in reasons(row)


@pytest.mark.slow
@pytest.mark.parametrize("field", SEEN)
def test_evidence_that_appears_in_a_trial_rejects_the_candidate(field, monkeypatch):
    loss, candidates = Objective.loss, Compile.candidates
    is_tried = []

    def loss_seen(self, batch):
        if is_tried:
            setattr(self, field, "something")
        return loss(self, batch)

    def candidates_tried(self, job):
        is_tried.append(True)
        return candidates(self, job)

    monkeypatch.setattr(Objective, "loss", loss_seen)
    monkeypatch.setattr(Compile, "candidates", candidates_tried)
    monkeypatch.setattr(trials, "HOPELESS", math.inf)  # a hopeless candidate is rejected before its evidence is read
    with decided("compile", job=job(lambda model, x: model(x).sum())) as outcome:
        row = outcome.rows["compile"]
    assert row.status == "rejected"
    assert SEEN[field] in reasons(row)
