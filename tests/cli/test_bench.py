"""``flatout bench``: both sides do the same work, and the figures are those of the races."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from flatout.cli import bench, main
from flatout.testing import FEWEST_PAIRS
from tests.clock import simulated_time

CPU = torch.device("cpu")


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the benchmarks by one whose second side takes half the simulated time."""
    with simulated_time() as clock:

        def halved(device: torch.device, budget: float) -> Iterator[bench.Case]:
            yield bench.Case(
                "work", "a peer", lambda: clock.advance(0.2), lambda: clock.advance(0.1), "in use: nothing"
            )

        monkeypatch.setattr(bench, "BENCHMARKS", {"halved": halved})
        yield


@pytest.mark.usefixtures("race")
def test_the_file_has_the_figures_of_the_race(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert main(["bench", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    (result,) = content["results"]
    assert (result["benchmark"], result["work"], result["against"]) == ("halved", "work", "a peer")
    assert result["seconds"] == pytest.approx({"against": 0.2, "flatout": 0.1}, rel=0.01)
    assert result["speed"] == pytest.approx(2.0, rel=0.01)
    assert result["pairs"] >= FEWEST_PAIRS
    assert content["environment"]["torch"] == torch.__version__
    shown = capsys.readouterr().out
    assert "2.00×" in shown
    assert "in use: nothing" in shown


def test_an_unknown_benchmark_is_an_error_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "fast"]) == 2
    told = capsys.readouterr().err
    assert "fast" in told
    assert all(name in told for name in bench.BENCHMARKS)


def test_both_updates_give_the_same_parameters() -> None:
    (case,) = bench.update(CPU, 0.0)
    before, after = (_parameters(side) for side in (case.before, case.after))
    start = [p.detach().clone() for p in before]
    for _ in range(3):
        case.before()
        case.after()
    assert not torch.equal(start[0], before[0])
    for p, q in zip(before, after, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def _parameters(side: Callable[[], object]) -> list[torch.nn.Parameter]:
    cells = [cell.cell_contents for cell in side.__closure__]
    (optimizer,) = [each for each in cells if isinstance(each, torch.optim.Optimizer)]
    return optimizer.param_groups[0]["params"]


def test_both_loaders_give_each_image_once() -> None:
    for case in bench.data(CPU, 0.0):
        assert case.before() == case.after() == -(-50_000 // 256)


@pytest.mark.slow
def test_a_training_runs_on_both_sides() -> None:
    for case in bench.step(CPU, 1.0):
        case.before()
        case.after()
        assert case.note


def test_each_side_keeps_its_flags() -> None:
    threads = torch.get_num_threads()
    seen = []
    one = bench.WithOwnFlags(lambda: seen.append(torch.get_num_threads()))
    torch.set_num_threads(threads + 1)
    other = bench.WithOwnFlags(lambda: seen.append(torch.get_num_threads()))
    one()
    other()
    torch.set_num_threads(threads)
    assert seen == [threads, threads + 1]
