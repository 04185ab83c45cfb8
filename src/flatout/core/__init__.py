"""Parts that several packages share, such as snapshots, random state, batches, torch's flags and formatting."""
