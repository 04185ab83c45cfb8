"""Random bits of stochastic rounding: Philox, with a counter of position, tensor and step."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

import flatout.optim as fo
from tests.optim.random_bits import PUBLISHED, assert_rounding_is_philox, philox


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_the_model_gives_the_published_vectors(counter, key, expected):
    assert philox(counter, key) == expected


def test_rounding_on_the_cpu_draws_from_philox():
    assert_rounding_is_philox("cpu")


@pytest.mark.skipif(not dist.is_available(), reason="needs a torch with torch.distributed")
def test_every_part_of_thousands_has_other_bits():
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def bits(rank):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8192)
        try:
            mesh = init_device_mesh("cpu", (8192,))

            def spread():
                return DTensor.from_local(torch.ones(512, dtype=torch.bfloat16), mesh, [Shard(0)], run_check=False)

            p = torch.nn.Parameter(spread())
            p.grad = spread()
            fo.SGD([p], lr=2.0**-9, stochastic_rounding=True).step()
            return tuple(p.to_local().tolist())
        finally:
            dist.destroy_process_group()

    assert len({bits(rank) for rank in (0, 1, 4096, 8191)}) == 4
