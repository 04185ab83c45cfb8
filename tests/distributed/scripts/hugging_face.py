"""Training script for a small GPT-2 of transformers, without code for ranks.

Batches are mappings, and the model's output contains the loss.
"""

import sys

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

import flatout
from tests.distributed.scripts.record import Record


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences of random tokens."""

    def __init__(self) -> None:
        self.tokens = torch.randint(64, (61, 16))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


torch.manual_seed(0)
config = GPT2Config(
    vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
)
model = GPT2LMHeadModel(config)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Tokens(), batch_size=8, shuffle=True)

record = Record(sys.argv[1])
run = flatout.optimize(model, loader, optimizer=opt, max_grad_norm=1.0)
for _ in range(2):
    for batch in run.loader:
        record.step(batch["input_ids"], run.step(batch))
    record.epoch(model)
record.end(run, model)
