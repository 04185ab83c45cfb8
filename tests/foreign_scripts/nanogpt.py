"""GPT in a hand-written loop: gradient accumulation, autocast, clipping, and a learning rate set by hand."""

import contextlib
import math

import numpy as np
import torch
from run_log import Log, arguments
from torch import nn
from torch.nn import functional as F

args = arguments(steps=40)
n_layer, n_head, n_embd, block_size, batch_size = (2, 2, 32, 16, 4) if args.is_tiny else (4, 4, 192, 96, 8)
vocab_size, grad_accum, max_lr, min_lr, warmup = 65, 2, 1e-3, 1e-4, 5
device, dtype = "cpu", "float32"

torch.manual_seed(1337)
rng = np.random.default_rng(0)
data = (np.cumsum(rng.integers(0, 3, 20_000)) % vocab_size).astype(np.uint16)
ctx = contextlib.nullcontext() if dtype == "float32" else torch.autocast(device, getattr(torch, dtype))


def get_batch():
    ix = torch.randint(len(data) - block_size - 1, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x.to(device), y.to(device)


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, n_head, C // n_head).transpose(1, 2) for part in self.c_attn(x).split(n_embd, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(n_embd), CausalSelfAttention(), nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))
        return logits, loss


model = GPT().to(device)
decay = [p for p in model.parameters() if p.dim() >= 2]
no_decay = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}], lr=max_lr, betas=(0.9, 0.95)
)


def get_lr(it):
    if it < warmup:
        return max_lr * (it + 1) / (warmup + 1)
    return min_lr + 0.5 * (1 + math.cos(math.pi * (it - warmup) / max(1, args.steps - warmup))) * (max_lr - min_lr)


log = Log()
X, Y = get_batch()
for it in range(args.steps):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    for _ in range(grad_accum):
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / grad_accum
        X, Y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    log.note(loss=loss.item() * grad_accum)
log.dump()
