"""GPT pretraining: gradient accumulation, warm-up and cosine schedule, clipping, and a log that never waits.

    python examples/pretrain_gpt.py
    python examples/pretrain_gpt.py --steps 50 --batch-size 8 --accumulate 2

Needs no package besides torch.
"""

import argparse
import math
from pydoc_data.topics import topics  # CPython's language reference, in place of a file of tokens

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, RandomSampler

import flatout


class Tokens(Dataset):
    def __init__(self, context):
        self.tokens, self.context = torch.tensor(list("\n\n".join(topics.values()).encode())), context

    def __len__(self):
        return len(self.tokens) - self.context

    def __getitem__(self, start):
        window = self.tokens[start : start + self.context + 1]
        return window[:-1], window[1:]


class GPT(nn.Module):
    def __init__(self, layers, heads, width, context):
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, ids):  # [N, T] to [N, T, 256]
        return self.head(self.blocks(self.embed(ids) + self.position.weight, self.mask, is_causal=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300, help="number of updates")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=4, help="batches of an update")
    args = parser.parse_args()

    def warmup_and_cosine(update):
        warmup = max(1, args.steps // 20)
        decay = 0.55 + 0.45 * math.cos(math.pi * update / args.steps)
        return min(1, (update + 1) / warmup) * decay

    def next_byte_loss(logits, targets):
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    torch.manual_seed(0)
    layers, heads, width, context = (8, 8, 512, 256) if torch.cuda.is_available() else (2, 4, 64, 64)
    tokens, samples = Tokens(context), args.steps * args.accumulate * args.batch_size
    loader = DataLoader(tokens, args.batch_size, sampler=RandomSampler(tokens, replacement=True, num_samples=samples))
    model = GPT(layers, heads, width, context)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_and_cosine)

    options = {"accumulate": args.accumulate, "max_grad_norm": 1.0, "scheduler": scheduler}
    run = flatout.optimize(model, loader, optimizer, next_byte_loss, expected_steps=len(loader), **options)
    every = args.accumulate * max(1, args.steps // 10)
    run.logs.listen(lambda step, name, value: step % every or print(f"batch {step}: {name} {value:.4f}"))
    for batch in run.loader:
        run.log("loss", run.step(batch))  # queues a copy of the loss, and does not wait for the device
    run.flush_logs()

    print(run.report)
    losses = [value for _, _, value in run.logs][-every:]
    print(f"last loss {sum(losses) / len(losses):.4f} at learning rate {scheduler.get_last_lr()[0]:.1e}")


if __name__ == "__main__":
    main()
