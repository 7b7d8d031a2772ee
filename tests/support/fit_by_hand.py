"""A fit as its rows say, without a model that learns."""

import numpy as np

from shoal.base.fit_rows import (
    AUC_EXAMPLES,
    AUC_SUM,
    AUC_UNIT,
    DIM,
    HEADER,
    REPEATED,
    SUFFIX,
    SUMS,
    TOTALS,
    Header,
    place,
)
from shoal.data import unmix
from shoal.metrics import Accumulator


def sums_row(*workers: Accumulator, repeated: int = 0) -> np.ndarray:
    """Add up what workers have counted, as their pushes do."""
    row = np.zeros(DIM, np.int64)
    row[REPEATED] = repeated
    for one in workers:
        totals = one.totals()
        row[TOTALS : TOTALS + len(totals)] += totals
        if one.auc == one.auc:
            row[AUC_EXAMPLES] += one.examples
            row[AUC_SUM] += round(one.auc * one.examples * AUC_UNIT)
    return row


def write_fit(store, name: str, header: Header, *sums: np.ndarray) -> None:
    """Write the rows of a fit, and of the pass of its models."""
    table = store.table(name + SUFFIX, dim=DIM, dtype="int64")
    places = [place(HEADER), *(place(SUMS, model, header.epoch) for model in range(len(sums)))]
    table.assign(unmix(np.array(places, np.uint64)), np.array([header.to_row(), *sums]))
