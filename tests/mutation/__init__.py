"""Mutation testing. See README.md."""
