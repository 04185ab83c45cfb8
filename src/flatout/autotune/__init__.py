"""Tuning of training loops whose code does not change."""
