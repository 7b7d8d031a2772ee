"""SavedPredictor: a predictor whose rows are in tables of a store, and its description in a model directory (files.py).

StoreOwner: the base of classes over a store, which may own it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, ClassVar, Self

from shoal.base.dtypes import Dtype
from shoal.models import files
from shoal.models.history import Record
from shoal.models.learner import FitState
from shoal.models.plan import Learning
from shoal.models.predictor import Predictor, read_calibration
from shoal.storage.base import StoragePath
from shoal.store.base import Store
from shoal.store.files import Exported, ModelParts
from shoal.table.table import Table


class StoreOwner:
    """Base class of objects over a store; a context manager that closes the store if the object owns it.

    Parameters
    ----------
    store : Store
    is_own : bool
        Whether `close` closes the store.
    """

    def __init__(self, store: Store, *, is_own: bool) -> None:
        self._store = store
        self._owns_store = is_own

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the store if this object owns it; a store that was passed in stays open."""
        if self._owns_store:
            self._store.close()


def check_moments(store: Store) -> None:
    """Raise ValueError if the rows of a store are of no one moment while its workers train."""
    if store.num_workers > 1 and not store.consistency.is_bulk:
        raise ValueError(
            f"under {store.consistency.text} the rows of several workers are not of one moment while they train: train "
            "under bsp, or save the model and export its directory (shoal export MODEL --output DIR --since OLDER)"
        )


class SavedPredictor(StoreOwner, Predictor):
    """A predictor over tables of a store."""

    kind: ClassVar[str]

    def __init__(self, store: Store, learning: Learning, *, is_own: bool) -> None:
        StoreOwner.__init__(self, store, is_own=is_own)
        Predictor.__init__(self)
        self._tables: tuple[Table, ...] = ()
        self._learning = learning

    @property
    def store(self) -> Store:
        """The store of the tables."""
        return self._store

    def described(self) -> tuple[files.ModelFile, dict[str, bytes]]:
        """Return the description of the model for an export, and the files beside its rows by name."""
        raise NotImplementedError

    def onnx_tower(self) -> bytes:
        """Return the dense part as a file of ONNX, whose margins on random batches are those of the model.

        Raises
        ------
        ImportError
            onnx, onnxscript or onnxruntime is not installed (extra: onnx).
        ValueError
            The model has no dense part, or it cannot be traced.
        """
        raise ValueError(f"a {self.kind} has no dense part that ONNX could compute: export it without onnx")

    def export(
        self,
        directory: StoragePath,
        *,
        dtype: Dtype | Mapping[str, Dtype] | None = None,
        since: StoragePath | None = None,
        track: bool = False,
        version: int | None = None,
        overwrite: bool = False,
        onnx: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Exported:
        """Write what predicts with the model: rows, dense part and calibration of one moment, as ``shoal serve`` reads.

        Parameters
        ----------
        directory : path or URL
            Created if missing; an export there is replaced only with ``overwrite``.
        dtype : numpy.dtype or its name, or dict of them by table, optional
            How weights are stored: see `shoal.Store.export`.
        since : path or URL, optional
            An earlier export of this model: write a delta, which has the rows that have changed since it, and the dense
            part and calibration of now.
        track : bool
            Whether a local store records changes from now on: a delta of this export then reads only these.
        version : int, optional
            The export's number; default: the next one.
        overwrite : bool
        onnx : bool
            Whether to write the dense part of a click model also as ONNX (extra: onnx), for predictions without
            PyTorch and in other languages.
        storage_options : mapping, optional
            Options of the file system of URLs.

        Returns
        -------
        shoal.export.Exported
            Rows, bytes and rounding errors of each table.

        Raises
        ------
        ValueError
            The model has not learned from anything yet; the store has several workers under SSP or ASP; ``since`` is of
            other tables; or as `shoal.Store.export`; or there is no ONNX graph with the margins of the model. Nothing
            was written.
        ImportError
            ``onnx``, and a package of the extra is not installed.

        Notes
        -----
        Of several workers under BSP one exports, between two clocks: the rows are those of its clock. The others wait.
        """
        store = self._store
        check_moments(store)
        self.check_fitted()
        store.flush()
        if store.num_workers > 1:
            self._tables[0].wait_for_clock()
        described, parts = self.described()
        if onnx:
            parts[files.ONNX_TOWER] = self.onnx_tower()
        description = files.describe(described)
        if self._record.event_time:
            description[files.EVENT_TIME] = self._record.event_time
        return store.export(
            directory,
            dtype=dtype,
            since=since,
            track=track,
            tables=[table.name for table in self._tables],
            version=version,
            overwrite=overwrite,
            model=ModelParts(description, parts),
            storage_options=storage_options,
        )

    def _model_file(
        self,
        *,
        bias: bool,
        fit_state: FitState | None,
        normalized: bool = False,
        click: dict[str, Any] | None = None,
        multiclass: dict[str, Any] | None = None,
    ) -> files.ModelFile:
        """Describe the model for a directory; the optimizer is that of its first table."""
        first = self._tables[0]
        return files.ModelFile(
            model=self.kind,
            table=first.name,
            more_tables=tuple(table.name for table in self._tables[1:]),
            bias=bias,
            normalized=normalized,
            optimizer=type(first.optimizer).__name__,
            params=first.optimizer.params(),
            seed=first.seed,
            examples=self.examples,
            format=self.format,
            schema=self.schema,
            calibration=None if self._calibration is None else self._calibration.to_dict(),
            history=self.history,
            classes=self._record.classes,
            columns=self._record.columns,
            click=click,
            multiclass=multiclass,
            fit_state=fit_state,
        )

    def _remember(self, described: files.ModelFile, where: object) -> None:
        """Set the record and the calibration from a description; ``where`` names its source in errors."""
        self._calibration = read_calibration(described.calibration, where)
        self._record = Record(
            described.history,
            described.examples,
            described.format,
            described.schema,
            described.classes,
            described.columns,
        )
        if described.history.fits:
            self._learning = described.history.fits[-1].plan.learning(described.classes)
