"""Staging of copies in pieces, on one thread and on several threads."""

from __future__ import annotations

import pytest
import torch

from flatout.native import _host

PIECE = 4 << 20
"""Bytes of a full piece."""


@pytest.mark.parametrize("helpers", [0, 3])
@pytest.mark.parametrize(
    "sizes",
    [
        [0],
        [7, 0, 256, 1],
        [PIECE],
        [PIECE - 1, PIECE + 1, 3],
        [1, 255, 3 * PIECE + 77, 0, PIECE - 256, 257],
    ],
)
def test_every_byte_of_a_batch_arrives(sizes, helpers):
    generator = torch.Generator().manual_seed(1)
    sources = [torch.randint(256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
    outputs = [torch.zeros_like(source) for source in sources]
    ring = _host.Ring(device=-1)
    stager = _host.Stager(ring, helpers=helpers)
    pairs = zip(sources, outputs, strict=True)
    transfers = [(source.data_ptr(), output.data_ptr(), source.nbytes) for source, output in pairs]
    for repeats in range(3):
        copied = stager.copy(transfers, False, 0, 0, (sources, outputs))
        copied.wait()
        assert all(map(torch.equal, outputs, sources))
        assert ring.idle == ring.allocations == -(-sum(-(-size // 256) * 256 for size in sizes) // PIECE)
        for output in outputs:
            output.fill_(repeats)
    stager.close()
