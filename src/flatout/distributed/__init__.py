"""Training on several devices: process group, agreement of all ranks, and data-parallel models."""
