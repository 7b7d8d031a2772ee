"""A look at the first examples of a fit: whether lists and sequences have keys of the field whose rows they share.

A history whose texts are spelled in another way than those of its item shares no row with it, and no error says so.

Threads: one, which prepares batches.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from shoal.models.features import Features, column_of
from shoal.torch.inputs import Inputs

log = logging.getLogger(__name__)

EXAMPLES = 1000  # to look at


class SharedRows:
    """Compares the keys of the first examples, and warns of features that have no key in common."""

    def __init__(self, features: Features, names: Mapping[int, str] | None) -> None:
        self._features = features
        self._names = {} if names is None else names
        fixed = {one.name: number for number, one in enumerate(features.fixed)}
        jagged = (*features.lists, *features.sequences)
        self._shared = {one.name: fixed[one.share] for one in jagged if one.share in fixed}
        self._seen: list[Inputs] = []
        self._examples = 0

    def look(self, prepared: Inputs) -> bool:
        """Look at a batch; return whether that was the last one, after which a warning is logged if there is cause."""
        self._seen.append(prepared)
        self._examples += prepared.keys.shape[0]
        if self._shared and self._examples < EXAMPLES:
            return False
        for name, number in self._shared.items():
            self._compare(name, number)
        self._seen = []
        return True

    def _compare(self, name: str, number: int) -> None:
        missing = self._features.missing[number].view(np.int64)
        items = [{**seen.lists, **seen.sequences}[name].keys for seen in self._seen]
        item_keys = np.unique(torch.cat(items).numpy())
        keys = np.unique(torch.cat([seen.keys[:, number] for seen in self._seen]).numpy())
        item_keys, keys = item_keys[item_keys != missing], keys[keys != missing]
        if not len(item_keys) or not len(keys) or np.any(np.isin(item_keys, keys)):
            return
        one, other = self._features[name], self._features.fixed[number]
        log.warning(
            "%r shares the rows of %r, and the columns have no text in common in the first %s examples%s: if they "
            "spell the same things in two ways, they have rows of their own and learn nothing from each other",
            column_of(one),
            column_of(other),
            f"{self._examples:,}",
            self._spelled(item_keys, keys),
        )

    def _spelled(self, *keys: npt.NDArray[np.int64]) -> str:
        """Return an example of each, if names are known."""
        first, second = (
            next((name for key in some.view(np.uint64).tolist() if (name := self._names.get(key))), None)
            for some in keys
        )
        if first is None or second is None:
            return ""
        return f" ({first.partition('=')[2]!r} and {second.partition('=')[2]!r})"
