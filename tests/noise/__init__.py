"""Noise of machines: recorded step times, and a simulator of them for tests and benchmarks of decisions."""
