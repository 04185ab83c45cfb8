"""Philox4x32-10 in Python, and a check that stochastic rounding draws its bits from Philox."""

from __future__ import annotations

import torch

from tests.chunks import CHUNK
from tests.optim.buckets import step_once

PUBLISHED = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
]
"""Counters, keys and known results from Random123, the library of Philox's authors."""


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Return Philox's four words for a counter and a key (Salmon et al., SC 2011)."""
    c, k = list(counter), list(key)
    for _ in range(10):
        even, odd = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [odd >> 32 ^ c[1] ^ k[0], odd & 0xFFFFFFFF, even >> 32 ^ c[3] ^ k[1], even & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def assert_rounding_is_philox(device: str) -> None:
    """Check that a step rounds a weight up exactly where its low half plus 16 bits of Philox carries."""
    seed, tensor, step, n = 0x123456789AB, 5, 4, 2 * CHUNK + 40
    for low_half in (0x0001, 0x7FFF, 0x8000, 0xFFFF):
        weight = torch.tensor([(0x3F80 << 16) + low_half], dtype=torch.int32).view(torch.float32).item()
        p = torch.ones(n, dtype=torch.bfloat16, device=device)
        grad = torch.full((n,), -(weight - 1.0), device=device)
        steps = [torch.tensor(float(step - 1), device=device)]
        step_once("sgd", [p], [grad], [], [], steps, [], [], [tensor], [0.0, 0.0, 0.0], lr=1.0, seed=seed)
        for i in (0, 1, 2, 7, 8, 511, 512, CHUNK, CHUNK + 9, n - 1):
            words = philox([i // 8, 0, tensor, step], [seed & 0xFFFFFFFF, seed >> 32])
            bits = words[i % 8 // 2] >> (16 * (i % 2)) & 0xFFFF
            assert (p[i].item() > 1) == (low_half + bits > 0xFFFF), (low_half, i)
