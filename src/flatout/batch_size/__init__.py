"""Training with another number of samples: which is the fastest that memory holds, and what it asks of the rest."""

from flatout.batch_size.learning_rate import ScaledSchedule, lr_factor

__all__ = ["ScaledSchedule", "lr_factor"]
