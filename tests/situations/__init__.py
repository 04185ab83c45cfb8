"""Situations of real trainings, each in plain PyTorch and in the three forms of flatout."""
