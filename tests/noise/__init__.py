"""Noise of machines: recorded step times and a simulator, for tests and benchmarks of decisions."""
