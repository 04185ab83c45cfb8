"""Search for techniques that pay: trials without a trace, statistics, numerics, and one ledger of decisions."""
