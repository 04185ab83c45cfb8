"""Data of the demo has the documented properties, and the models of the demo learn."""

import hashlib

import numpy as np
import pytest
import torch

from flatout.cli.demo_jobs import JOBS, digits, gpt
from flatout.cli.demo_jobs.demo_job import DemoJob
from flatout.cli.demo_jobs.loops import Naive, Outcome, Tick, make_model, take_turns

CPU = torch.device("cpu")


def ignore(samples: int, loss: float | None, seconds: float) -> None:
    pass


def naive(job: DemoJob, epochs: int, tick: Tick = ignore) -> Outcome:
    lane = Naive(job, CPU, epochs, tick)
    take_turns([lane])
    return lane.outcome()


def test_digits_split_is_fixed_disjoint_and_whole() -> None:
    train, held_out = digits.load()
    again, _ = digits.load()
    assert (len(train), len(held_out)) == (1437, 360)
    assert np.array_equal(train.images, again.images)
    whole = np.concatenate([train.images, held_out.images]).reshape(1797, 64)
    from sklearn.datasets import load_digits

    assert sorted(map(bytes, whole)) == sorted(map(bytes, load_digits().data))
    assert set(held_out.labels) == set(range(10))


def test_digits_are_normalised_one_by_one() -> None:
    train, _ = digits.load()
    images, labels = zip(*(train[i] for i in range(len(train))), strict=True)
    pixels = torch.stack(images)
    assert pixels.shape == (1437, 1, 8, 8)
    assert pixels.dtype == torch.float32
    assert abs(float(pixels.mean())) < 0.02
    assert abs(float(pixels.std()) - 1) < 0.02
    assert torch.stack(labels).dtype == torch.int64
    assert torch.equal(train[7][0], train[7][0])


def test_text_is_split_at_its_tail() -> None:
    text = gpt.read_text()
    train, held_out = gpt.load(64, 64)
    assert len(text) > 300_000
    assert train.text + held_out.text == text
    assert hashlib.sha256(text).digest() == hashlib.sha256(gpt.read_text()).digest()


@pytest.mark.parametrize(("length", "windows"), [(64, 0), (65, 1), (128, 1), (129, 2), (200, 3)])
def test_windows_never_reach_past_the_text(length: int, windows: int) -> None:
    text = bytes(range(length % 256)) if length < 256 else b"x" * length
    data = gpt.TextWindows(text, context=64, stride=64)
    assert len(data) == windows
    for index in range(windows):
        inputs, targets = data[index]
        assert inputs.shape == targets.shape == (64,)
        assert torch.equal(inputs[1:], targets[:-1])
        assert inputs[0] == text[index * 64]


def test_gpt_sees_no_future() -> None:
    model = make_model(JOBS["gpt"]("quick")).eval()
    ids = torch.randint(0, 256, (2, 32))
    altered = ids.clone()
    altered[:, 20:] = 0
    before, after = model(ids), model(altered)
    assert torch.allclose(before[:, :20], after[:, :20], atol=1e-5)
    assert not torch.allclose(before[:, 20:], after[:, 20:], atol=1e-2)


@pytest.mark.parametrize("name", JOBS)
def test_the_same_seed_gives_the_same_weights_and_the_same_training(name: str) -> None:
    job = JOBS[name]("quick")
    first, second = make_model(job).state_dict(), make_model(job).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert naive(job, 1).metrics == naive(job, 1).metrics


def test_turns_change_nothing_about_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    job = JOBS["digits"]("quick")
    alone = naive(job, 2).metrics
    monkeypatch.setattr("flatout.cli.demo_jobs.loops.TURN_SECONDS", 0.0)
    lanes = [Naive(job, CPU, 2, ignore) for _ in range(2)]
    take_turns(lanes)
    assert [lane.outcome().metrics for lane in lanes] == [alone, alone]


def test_digits_model_learns() -> None:
    outcome = naive(JOBS["digits"]("quick"), 4)
    assert outcome.metrics["accuracy"] > 0.8  # one in ten is expected by chance


def test_gpt_model_learns() -> None:
    outcome = naive(JOBS["gpt"]("quick"), 2)
    assert outcome.metrics["loss"] < 4.0  # ln 256 = 5.5 by chance, about 3 by letter frequencies alone


def test_naive_training_takes_every_sample_of_every_epoch() -> None:
    seen = []
    job = JOBS["digits"]("quick")
    naive(job, 2, lambda samples, loss, seconds: seen.append(samples))
    assert sum(seen) == 2 * len(job.train)
    assert len(job.train) % job.training.batch_size == 0 or seen[-1] < job.training.batch_size


@pytest.mark.parametrize("size", ["cpu", "cuda", "quick"])
@pytest.mark.parametrize("name", JOBS)
def test_every_size_can_be_built(name: str, size: str) -> None:
    job = JOBS[name](size)
    inputs, targets = job.train[0]
    with torch.device("meta"):
        model = job.build_model()
    assert job.loss_fn(model(inputs[None].to("meta")), targets[None].to("meta")).shape == ()
