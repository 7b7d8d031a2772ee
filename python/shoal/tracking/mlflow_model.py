"""A model of shoal as MLflow loads it: ``mlflow.pyfunc.load_model("models:/NAME/1").predict(frame)``.

MLflow imports this module by the name that the file MLmodel has, and calls `_load_pyfunc`.

Threads: those of the model's predictions.
"""

from __future__ import annotations

from typing import Any

from shoal.tools.load import load


class TrackedModel:
    """The model of a run."""

    def __init__(self, path: str) -> None:
        self.model = load(path)

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> Any:
        """Compute the probabilities of a frame, an array or batches; see `shoal.models.Model.predict_proba`."""
        return self.model.predict_proba(model_input)


def _load_pyfunc(path: str) -> TrackedModel:
    return TrackedModel(path)
