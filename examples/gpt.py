"""Byte-level GPT in a loop of your own (the two-value form), on the text of ``flatout demo --job gpt``.

    python examples/gpt.py
    python examples/gpt.py --epochs 1 --steps 50 --batch-size 16

Needs no package besides torch.
"""

import argparse
import math
from itertools import islice
from pydoc_data.topics import topics  # CPython's language reference, 460 KB of English

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader

import flatout


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):  # [N, T, C]
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers, heads, width, context):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256, bias=False)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)], nn.LayerNorm(width))
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, ids):  # [N, T] to [N, T, 256]
        return self.head(self.blocks(self.embed(ids) + self.position))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, help="steps of an epoch (default: all)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--expected-steps", type=int, default=50_000, help="flatout decides for a training this long")
    args = parser.parse_args()

    torch.manual_seed(0)
    layers, heads, width, context = (8, 8, 512, 256) if torch.cuda.is_available() else (2, 4, 64, 64)
    ids = torch.tensor(list("\n\n".join(topics.values()).encode())).unfold(0, context + 1, context)
    samples = [(window[:-1], window[1:]) for window in ids]  # bytes, and the byte after each of them
    cut = len(samples) * 9 // 10
    loader = DataLoader(samples[:cut], batch_size=args.batch_size, shuffle=True)
    model = GPT(layers, heads, width, context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    model, loader = flatout.optimize(model, loader, optimizer, expected_steps=args.expected_steps)
    for epoch in range(1, args.epochs + 1):
        for inputs, targets in islice(loader, args.steps):  # already on the device
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: last loss {loss.item():.4f}")

    print(flatout.report_of(model))
    with torch.inference_mode():
        batches = [[x.to(loss.device) for x in batch] for batch in DataLoader(samples[cut:], batch_size=256)]
        losses = [cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) for inputs, targets in batches]
    print(f"held-out loss {torch.stack(losses).mean() / math.log(2):.3f} bits per byte")


if __name__ == "__main__":
    main()
