"""Load a model of any kind from its directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal import models
from shoal.checkpoint.format import MANIFEST
from shoal.export.manifest import is_export
from shoal.models import files
from shoal.storage.base import StoragePath
from shoal.storage.open import open_dir
from shoal.store.base import Store

if TYPE_CHECKING:
    from shoal.models.saved_predictor import SavedPredictor


def load(
    directory: StoragePath, *, store: Store | None = None, storage_options: Mapping[str, Any] | None = None
) -> models.Model | SavedPredictor:
    """Read a model of any kind: logistic regression of two or more classes, factorization machine, click model.

    Parameters
    ----------
    directory : path or URL
        As written by `save`, or by ``shoal train``.
    store : Store, optional
        The store of the tables; default: a new local store, which the model's `close` closes.
    storage_options : mapping, optional
        Options of the file system of a URL: see `shoal.Store.save`.

    Returns
    -------
    LogisticRegression, FactorizationMachine, MulticlassRegression or shoal.torch.ClickModel
        Its predictions equal those of the saved model, bit for bit, and it can be trained further.

    Raises
    ------
    CorruptionError
        A file is missing, truncated or changed: the message names it.
    ImportError
        The model is a click model, and PyTorch is not installed (extra ``torch``).
    ValueError
        There is no such directory, or it holds anything but a model; or the store already has a table of one of the
        model's names.

    Examples
    --------
    >>> with shoal.load("model") as model:  # doctest: +SKIP
    ...     model.probabilities(shoal.read_libsvm("test.libsvm"))
    """
    storage_dir = open_dir(directory, storage_options)
    if storage_dir.kind() != "directory":
        raise ValueError(f"{storage_dir}: there is no such directory")
    if not files.is_model(storage_dir):
        if is_export(storage_dir):
            raise ValueError(f"{storage_dir} is an export, not a model: open it with shoal.export.open(...)")
        if storage_dir.version(MANIFEST) is not None:
            raise ValueError(f"{storage_dir} is a checkpoint of tables, not a model: read it with store.load(...)")
    if files.read(storage_dir).model != files.CLICK:
        return models.load(storage_dir, store=store)
    from shoal.torch import load as load_click

    return load_click(storage_dir, store=store)
