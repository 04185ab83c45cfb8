"""Training to stop, kill and resume: dropout, BatchNorm, random samples, a schedule, and a small last batch."""

import multiprocessing
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import flatout
from flatout.core.reproducible import seed_all
from flatout.techniques import REGISTRY, Measured
from flatout.training.checkpoint import write

EPOCHS = 3
BATCH = 8
SAMPLES = 44  # five batches and a half

KINDS = {
    "plain": {},
    "accumulating": {"accumulate": 4},
    "fused": {"techniques": {"fused_optimizer": True, "in_memory": True}},
    "bf16": {"techniques": {"fused_optimizer": True, "precision": "bf16"}},
    "scaled": {"techniques": {"fused_optimizer": True, "precision": "fp16"}, "accumulate": 2},
    "clipped": {"max_grad_norm": 0.1, "accumulate": 2},
    "averaged": {},
    "workers": {},
    "measured": {"budget": 0.2, "techniques": {t.name: False for t in REGISTRY if isinstance(t, Measured)}},
}
"""Arguments of ``optimize`` by kind of training. "averaged" has flatout's optimizer with all options.

Workers are persistent.
"""


class Noisy(Dataset):
    """Samples with random noise from global generators and from their own generator."""

    def __init__(self):
        self.own = np.random.default_rng(0)
        self.x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return self.x[i] + 0.1 * torch.rand(6) + float(self.own.random()), i % 3


class Stopped(Exception):
    """Exception in place of a crash."""


def stop():
    """Raise, in place of a crash."""
    raise Stopped


def before_step(run, steps, act):
    """Call ``act()`` once, after this number of steps and before the next one."""
    step = run.step

    def acting(batch):
        if run.steps == steps:
            run.step = step
            act()
        return step(batch)

    run.step = acting


def make(kind="plain", plan=None):
    """Return a run of a kind, as each process makes it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    if kind == "averaged":
        optimizer = flatout.optim.AdamW(
            model.parameters(), lr=0.01, ema_decay=0.9, moment_dtype=torch.bfloat16, stochastic_rounding=True
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    fixed = torch.utils.data.TensorDataset(Noisy().x, torch.arange(SAMPLES) % 3)
    samples = fixed if kind in ("fused", "workers") else Noisy()
    workers = {"num_workers": 1, "persistent_workers": True} if kind == "workers" else {}
    loader = DataLoader(samples, batch_size=BATCH, shuffle=True, **workers)
    return flatout.optimize(
        model, loader, optimizer, functional.cross_entropy, scheduler=scheduler, plan=plan,
        **{"budget": 0} | KINDS[kind],
    )  # fmt: skip


def train(kind, folder=None, *, stop_before=None, plan=False, **options):
    """Train to the end, or until a step raises. Return the run and its history.

    With ``plan`` the run uses the plan of the checkpoints.
    """
    run = make(kind, flatout.Plan.from_checkpoints(folder) if plan else None)
    seed_all(5 if folder is None or not list(Path(folder).glob("step-*.pt")) else 99)
    if stop_before is not None:
        before_step(run, stop_before, stop)
    return run, run.fit(EPOCHS, progress=False, checkpoint_dir=folder, **options)


def train_and_tell(kind, folder):
    """Train to the end from the newest checkpoint in the folder, and write the result to the folder."""
    # A worker of a fork server outlives the killed trainer, because torch's watchdog watches the worker's parent.
    multiprocessing.set_start_method("fork", force=True)
    run, history = train(kind, folder, checkpoint_every=1)
    write(f"{folder}/result.pt", {"state": run.state_dict(), "history": history})
