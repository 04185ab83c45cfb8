"""Text in a terminal, which a script may print at any time."""

from tests.test_packaging import run_python


def test_the_first_text_draws_no_random_number():
    code = """
import random, sys
import torch, flatout
from flatout.report import Report
from flatout.training.fit import EpochProgress
assert "rich" not in sys.modules
random.seed(1)
model = torch.nn.Linear(2, 1)
batch = torch.ones(4, 2), torch.ones(4, 1)
run = flatout.optimize(model, [batch], torch.optim.SGD(model.parameters(), 0.1), torch.nn.functional.mse_loss, budget=0)
str(run.report)
run.fit(1)
assert "rich" in sys.modules
state = random.getstate()
random.seed(1)
print(state == random.getstate())
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-1] == "True"
