"""Training steps, with loss, update, micro-batches, out-of-memory recovery and checkpoints."""
