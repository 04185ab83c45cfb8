"""Training on several devices, with process groups, agreement of all ranks, and data-parallel models."""
