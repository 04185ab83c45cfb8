"""One training step and what surrounds it: loss, update, micro-batches, out-of-memory recovery, checkpoints."""
