"""Errors that several packages raise or handle."""


class Unsuitable(Exception):
    """Error of a way of running a step that cannot be used here. The message is one sentence for the report."""
