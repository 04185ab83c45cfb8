"""Search for what pays: trials without a trace, statistics, numerics, and one ledger of decisions."""
