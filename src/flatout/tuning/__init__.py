"""Search for techniques that speed up a training: trials, statistics, numerics, and the ledger of decisions."""
