"""Errors that several rooms raise or handle."""


class Unsuitable(Exception):
    """A way of running a step cannot be used here. The message is one sentence for the report."""
