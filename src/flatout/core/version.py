"""Version of flatout."""

__version__ = "0.1.0"
