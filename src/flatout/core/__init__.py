"""Parts that several rooms share: snapshots, random state, batches, torch's flags, formatting."""
