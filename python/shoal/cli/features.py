"""The keys and names of a saved model's features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.models.files import ModelFile
    from shoal.storage.base import StorageDir


def names_of(directory: StorageDir, described: ModelFile | None) -> Mapping[int, str]:
    """Return the names of a model's features, as far as they are saved or follow from its description."""
    from collections import ChainMap

    from shoal.models import load_names

    if described is None:
        return {}
    saved: Any = load_names(directory) or {}
    features = _features_of(described)
    return saved if features is None else ChainMap(saved, features.names)


def keys_by(described: ModelFile | None) -> Callable[[str], int]:
    """Return the function that returns the key of a feature's name."""
    from shoal.data.key_names import key_of_name

    features = None if described is None else _features_of(described)
    if features is not None:
        key_of: Callable[[str], int] = features.key_of
        return key_of
    form, schema = ("", {}) if described is None else (described.format or "", described.schema)
    return lambda name: key_of_name(form, name, schema)


def _features_of(described: ModelFile) -> Any:
    """Return the features of a click model that was made by a configuration, or None."""
    if not described.click:
        return None
    from shoal.torch import Features

    return Features.from_json(described.click["features"])
