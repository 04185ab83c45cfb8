"""Training loops that stay as they are: recorded, tuned and timed from outside."""
