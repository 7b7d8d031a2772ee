"""Experiment tracking: callbacks that write a fit to MLflow or TensorBoard.

    base.py          Tracker: the metrics of a fit, and when they are written
    mlflow.py        runs, artifacts and registered models of MLflow
    mlflow_model.py  a model of shoal as MLflow loads it
    tensorboard.py   event files

Both libraries are extras, imported when a tracker is made.
"""

from shoal.tracking.base import Tracker
from shoal.tracking.mlflow import MLflow
from shoal.tracking.tensorboard import TensorBoard

__all__ = ["MLflow", "TensorBoard", "Tracker"]
