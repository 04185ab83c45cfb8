"""Mutation testing: see README.md."""
