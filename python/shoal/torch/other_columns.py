"""The categorical columns of a configuration that names none: those of the training data of which nothing is said.

It is the rule of ``shoal train lr``: a file of a configuration is read together with the header of its data.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from shoal.config import COLUMN_FORMATS, DataConfig
from shoal.data.readers import READERS


def with_other_columns(data: DataConfig) -> DataConfig:
    """Return the configuration with the categorical columns, if it names none."""
    if data.format not in COLUMN_FORMATS or data.categorical or not data.data:
        return data
    options: dict[str, Any] = {
        name: value for name in ("label", "weight") if (value := getattr(data, name)) is not None
    }
    options |= {"numeric": list(data.numeric)}
    if data.history is not None:
        options["lists"] = {data.history: data.item or data.history}
    if data.format != "parquet":
        options |= {"columns": list(data.columns) or None, "sep": "\t" if data.format == "tsv" else data.sep or ","}
    try:
        reader = READERS["parquet" if data.format == "parquet" else "csv"](list(data.data), **options)
    except (KeyError, TypeError, ValueError):  # the check of the configuration says what is wrong
        return data
    found: list[str] | None = reader.with_columns().schema.get("categorical")
    if found is None:
        return data
    for name in data.ignore:
        if name not in found:
            raise ValueError(f"[data] ignore has {name!r}, none of the other columns: {', '.join(found)}")
    return replace(data, categorical=tuple(name for name in found if name not in data.ignore))
