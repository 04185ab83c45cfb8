"""Batches that are computed part by part, with the gradients of the whole."""

from flatout.micro_batches.buffers import Buffers, buffers_of
from flatout.micro_batches.gradients import LossWeight, MicroBatches, Part, part_sizes

__all__ = ["Buffers", "LossWeight", "MicroBatches", "Part", "buffers_of", "part_sizes"]
