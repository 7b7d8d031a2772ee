"""The categorical columns of a configuration that names none: those of the training data of which nothing is said.

It is the rule of ``shoal train lr``: a file of a configuration is read together with the header of its data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.data.readers import READERS

More = Mapping[tuple[str, str], Any]  # values by section and key

_COLUMNS = ("csv", "tsv", "parquet")


def with_other_columns(raw: Mapping[str, Any], more: More) -> More:
    """Return ``more`` with the categorical columns, if neither it nor the file ``raw`` names them."""
    section = raw.get("data", {})
    data = {
        **(section if isinstance(section, dict) else {}),
        **{key: more[at, key] for at, key in more if at == "data"},
    }
    if data.get("format") not in _COLUMNS or "categorical" in data:
        return more
    options = {name: data[name] for name in ("label", "numeric", "weight") if name in data}
    if data.get("history") is not None:
        options["lists"] = {data["history"]: data.get("item") or data["history"]}
    if data["format"] != "parquet":
        options |= {"columns": data.get("columns") or None, "sep": "\t" if data["format"] == "tsv" else ","}
    try:
        reader = READERS["parquet" if data["format"] == "parquet" else "csv"](data["train"], **options)
    except (KeyError, TypeError, ValueError):  # the check of the configuration says what is wrong
        return more
    found: list[str] | None = reader.with_columns().schema.get("categorical")
    if found is None:
        return more
    for name in data.get("ignore", []):
        if name not in found:
            raise ValueError(f"[data] ignore has {name!r}, none of the other columns: {', '.join(found)}")
    return {**more, ("data", "categorical"): [name for name in found if name not in data.get("ignore", [])]}
