"""Training with checkpoints, of which one rank is killed at a random moment in each of the first attempts.

Arguments: folder, number of epochs, seed of the moments, and number of attempts with a kill.
"""

import os
import random
import signal
import sys
import threading
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import flatout

folder, epochs, seed, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
rank, attempt = int(os.environ.get("RANK", "0")), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
ranks = int(os.environ.get("WORLD_SIZE", "1"))


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Samples that take time to load, so that a training lasts seconds."""

    def __init__(self) -> None:
        self.x = torch.randn(90, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        threading.Event().wait(5e-3 * ranks)
        return self.x[i], i


def loss_fn(output: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, index % 3)


torch.manual_seed(rank)
drops = float(os.environ.get("DROPS", "0.2"))
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(drops), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(Samples(), batch_size=8, shuffle=True)
run = flatout.optimize(model, loader, optimizer, loss_fn, budget=0, deterministic=True, seed=5 + rank, plan=None)
moment = random.Random(1000 * seed + attempt)
unlucky, seconds = moment.randrange(ranks), moment.uniform(0.0, 1.8)
if attempt < kills and rank == unlucky:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()
last, plain_step = int(os.environ.get("LAST_STEP", "0")), run.step


def step(batch):
    """Record the samples, and request termination at a given step, as a scheduler does."""
    share = getattr(run.loader, "share", None)
    if share is None or share.own:
        with (folder / f"seen-{ranks}-{rank}").open("a") as file:
            file.writelines(f"{index}\n" for index in batch[1].tolist())
    if run.steps + 1 == last and rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return plain_step(batch)


run.step = step
if last:
    signal.signal(signal.SIGTERM, lambda number, frame: None)
history = run.fit(epochs, progress=False, checkpoint_dir=folder / "checkpoints", checkpoint_every=4)
torch.save({"state": model.state_dict(), "history": history, "attempt": attempt}, folder / f"{rank}.pt")
