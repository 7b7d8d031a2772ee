"""Models: what is learned from batches, on top of a store's tables."""

from shoal.models.history import History, Pass, Point, merged
from shoal.models.logistic import BIAS_KEY, LogisticRegression

__all__ = ["BIAS_KEY", "History", "LogisticRegression", "Pass", "Point", "merged"]
