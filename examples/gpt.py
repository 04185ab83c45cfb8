"""Byte-level GPT in a loop of your own (the two-value form). ``flatout demo --job gpt`` runs this script.

    python examples/gpt.py --epochs 1
    python examples/gpt.py --plain    # the same training without flatout

Needs no package besides torch.
"""

import argparse
import math
import time
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader

TEXT = "\n\n".join(topics[name] for name in sorted(topics)).encode()  # CPython's language reference, 460 KB of English


def windows(text, context):  # pairs: bytes, and the byte after each of them
    ids = torch.tensor(list(text)).unfold(0, context + 1, context)
    return [(window[:-1], window[1:]) for window in ids]


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
    parser.add_argument("--plain", action="store_true", help="train without flatout")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers, heads, width, context = (8, 8, 512, 256) if device == "cuda" else (2, 4, 64, 64)
    samples = windows(TEXT, context)
    cut = len(samples) * 9 // 10
    loader, held_out = DataLoader(samples[:cut], batch_size=32, shuffle=True), DataLoader(samples[cut:], batch_size=256)
    model = GPT(layers, heads, width, context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    if not args.plain:
        import flatout  # not above, because --plain measures PyTorch alone

        model, loader = flatout.optimize(model, loader, optimizer, expected_steps=args.epochs * len(loader))

    started = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs.to(device)).flatten(0, 1), targets.to(device).flatten())
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: last loss {loss.item():.4f}", flush=True)  # waits for the device
    print(f"trained in {time.perf_counter() - started:.2f} s")
    if not args.plain:
        print(flatout.report_of(model))
    with torch.inference_mode():
        losses = [cross_entropy(model(x.to(device)).flatten(0, 1), y.to(device).flatten()) for x, y in held_out]
    print(f"held-out loss {torch.stack(losses).mean() / math.log(2):.3f} bits per byte")


if __name__ == "__main__":
    main()
