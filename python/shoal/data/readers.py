"""The functions that make readers, one a format. ``docs/readers.md`` defines the formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.base.defaults import BATCH_SIZE
from shoal.data.arrow import ArrowSource, TableReader
from shoal.data.columns import Columns, Texts
from shoal.data.criteo import column_of
from shoal.data.csv import csv_format
from shoal.data.files import Wheres, files_of
from shoal.data.folder import Following
from shoal.data.interactions import Field, Interactions, field_of
from shoal.data.names import FeatureNames
from shoal.data.reader import Reader
from shoal.data.rows import CRITEO, LIBFFM, LIBSVM, VW
from shoal.data.settings import OnError, Settings
from shoal.data.text import TextReader


def read_libsvm(
    path: Wheres,
    *,
    batch_size: int = BATCH_SIZE,
    on_error: OnError = "raise",
    reader_threads: int | None = None,
    names: FeatureNames | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Reader:
    r"""Read libsvm (svmlight) text: ``label key:value key:value ...``.

    Parameters
    ----------
    path : path, pattern, URL, "-", binary file, or list of them
        Plain, gzip, bzip2, xz or Zstandard; see `Reader`.
    batch_size : int, default 8192
        Examples in each batch but the last.
    on_error : {"raise", "skip"}, default "raise"
        A malformed line raises ValueError with its position, its text and the fault, or is skipped and counted.
    reader_threads : int, optional
        Number of threads that parse; default: one for every four cores, at most eight.
    names : FeatureNames, optional
        Filled by the passes with a name for each feature.
    storage_options : mapping, optional
        For URLs; see `Reader`.

    Returns
    -------
    Reader

    Raises
    ------
    OSError, ValueError
        As `Reader`.

    Notes
    -----
    Keys are the whole numbers as written, all of 0 to 2^64 - 1; values are the nearest float32. Labels are 0/1 or
    -1/+1. ``docs/readers.md`` has the grammar.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "train.libsvm")
    ...     _ = path.write_text("+1 3:1 18446744073709551615:0.5\n-1 3:2\n")
    ...     for batch in read_libsvm(path):
    ...         print(batch.labels, batch.indptr, batch.keys, batch.values)
    [1. 0.] [0 2 3] [                   3 18446744073709551615                    3] [1.  0.5 2. ]
    """
    settings = Settings(batch_size, on_error, reader_threads, names)
    return TextReader(path, LIBSVM, settings, storage_options)


def read_libffm(
    path: Wheres,
    *,
    batch_size: int = BATCH_SIZE,
    on_error: OnError = "raise",
    interactions: Interactions = (),
    reader_threads: int | None = None,
    names: FeatureNames | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Reader:
    r"""Read libffm text: ``label field:key:value field:key:value ...``.

    Parameters
    ----------
    path : path, pattern, URL, "-", binary file, or list of them
        Plain, gzip, bzip2, xz or Zstandard; see `Reader`.
    batch_size : int, default 8192
        Examples in each batch but the last.
    on_error : {"raise", "skip"}, default "raise"
        A malformed line raises ValueError with its position, its text and the fault, or is skipped and counted.
    interactions : list of pairs of fields, or list of fields, default none
        Pairs of fields whose features are combined, or fields, of which all pairs are. Fields are numbers.
    reader_threads : int, optional
        Number of threads that parse; default: one for every four cores, at most eight.
    names : FeatureNames, optional
        Filled by the passes with a name for each feature.
    storage_options : mapping, optional
        For URLs; see `Reader`.

    Returns
    -------
    Reader

    Raises
    ------
    OSError, ValueError
        As `Reader`.

    Notes
    -----
    The keys of libffm data number the features of all fields together, so a key is taken as it is written. Otherwise as
    `read_libsvm`; ``docs/readers.md`` has the grammar.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "train.ffm")
    ...     _ = path.write_text("1 0:3:1 1:17:0.5\n0 0:4:1\n")
    ...     for batch in read_libffm(path):
    ...         print(batch.labels, batch.indptr, batch.keys, batch.values)
    [1. 0.] [0 2 3] [ 3 17  4] [1.  0.5 1. ]
    """
    settings = Settings(batch_size, on_error, reader_threads, names)
    return TextReader(path, LIBFFM.with_interactions(interactions, _whole), settings, storage_options)


def read_criteo(
    path: Wheres,
    *,
    batch_size: int = BATCH_SIZE,
    on_error: OnError = "raise",
    interactions: Interactions = (),
    reader_threads: int | None = None,
    names: FeatureNames | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Reader:
    r"""Read Criteo's tab-separated click logs: a label, 13 integers, 26 categories.

    Parameters
    ----------
    path : path, pattern, URL, "-", binary file, or list of them
        Plain, gzip, bzip2, xz or Zstandard; see `Reader`.
    batch_size : int, default 8192
        Examples in each batch but the last.
    on_error : {"raise", "skip"}, default "raise"
        A malformed line raises ValueError with its position, its text and the fault, or is skipped and counted.
    interactions : list of pairs of fields, or list of fields, default none
        Pairs of fields whose features are combined, or fields, of which all pairs are. Fields are columns by number,
        1 to 39, or by their customary names, I1 to I13 and C1 to C26.
    reader_threads : int, optional
        Number of threads that parse; default: one for every four cores, at most eight.
    names : FeatureNames, optional
        Filled by the passes with a name for each feature.
    storage_options : mapping, optional
        For URLs; see `Reader`.

    Returns
    -------
    Reader

    Raises
    ------
    OSError, ValueError
        As `Reader`.

    Notes
    -----
    An empty column produces no feature, and every value is 1 (`Batch.values` is None). A category's key is
    ``hash_strings([text], field=column)``, columns counted from 0, the label's. An integer v becomes the text
    ``floor(ln(v)^2)`` if it is above 2, else ``SP`` and v, and is then hashed in the same way. ``docs/readers.md`` has
    the details.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from shoal.data import hash_strings
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "day_0.tsv")
    ...     _ = path.write_text("1\t20" + "\t" * 12 + "\t68fd1e64" + "\t" * 25 + "\n")
    ...     (batch,) = read_criteo(path)
    >>> keys = [hash_strings(["8"], field=1)[0], hash_strings(["68fd1e64"], field=14)[0]]  # ln(20)^2 = 8.97
    >>> batch.labels, batch.keys.tolist() == keys
    (array([1.], dtype=float32), True)
    """
    settings = Settings(batch_size, on_error, reader_threads, names)
    return TextReader(path, CRITEO.with_interactions(interactions, column_of), settings, storage_options)


def read_vw(
    path: Wheres,
    *,
    batch_size: int = BATCH_SIZE,
    on_error: OnError = "raise",
    interactions: Interactions = (),
    reader_threads: int | None = None,
    names: FeatureNames | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Reader:
    r"""Read Vowpal Wabbit's text: ``label importance tag|namespace name:value ... |namespace ...``.

    Parameters
    ----------
    path : path, pattern, URL, "-", binary file, or list of them
        Plain, gzip, bzip2, xz or Zstandard; see `Reader`.
    batch_size : int, default 8192
        Examples in each batch but the last.
    on_error : {"raise", "skip"}, default "raise"
        A malformed line raises ValueError with its position, its text and the fault, or is skipped and counted.
    interactions : list of pairs of fields, or list of fields, default none
        Pairs of fields whose features are combined, or fields, of which all pairs are. Fields are namespaces.
    reader_threads : int, optional
        Number of threads that parse; default: one for every four cores, at most eight.
    names : FeatureNames, optional
        Filled by the passes with a name for each feature.
    storage_options : mapping, optional
        For URLs; see `Reader`.

    Returns
    -------
    Reader

    Raises
    ------
    OSError, ValueError
        As `Reader`.

    Notes
    -----
    A name's key is ``hash_strings([name], field=namespace)``, with a namespace's number being
    ``hash_strings([namespace])[0]``: 64 bits of (namespace, name), so that names do not share weights as they do in
    Vowpal Wabbit's table of 2^b. A namespace's scale multiplies its values. The importance becomes the example's
    weight; `Batch.weights` is None where all are 1. Tags are ignored. ``docs/readers.md`` has the grammar.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from shoal import hash_strings
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "train.vw")
    ...     _ = path.write_text("1 2.0 'first|user ann |price:0.5 :3\n-1 |user bob\n")
    ...     for batch in read_vw(path):
    ...         print(batch.labels, batch.weights, batch.indptr, batch.values)
    ...         print(batch.keys[0] == hash_strings(["ann"], field=int(hash_strings(["user"])[0]))[0])
    [1. 0.] [2. 1.] [0 2 3] [1.  1.5 1. ]
    True
    """
    settings = Settings(batch_size, on_error, reader_threads, names)
    return TextReader(path, VW.with_interactions(interactions, _namespace), settings, storage_options)


def read_csv(
    path: Wheres,
    *,
    label: str | None,
    categorical: Sequence[str] | None = None,
    numeric: Sequence[str] = (),
    weight: str | None = None,
    positive: str | float | None = None,
    lists: Mapping[str, str] | None = None,
    vectors: Sequence[str] = (),
    labels: Sequence[str] = (),
    list_separator: str = "|",
    sep: str = ",",
    columns: Sequence[str] | None = None,
    na_values: Texts = (),
    keep_default_na: bool = True,
    interactions: Interactions = (),
    batch_size: int = BATCH_SIZE,
    on_error: OnError = "raise",
    reader_threads: int | None = None,
    names: FeatureNames | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Reader:
    r"""Read CSV or TSV by the names of its columns.

    Parameters
    ----------
    path : path, pattern, URL, "-", binary file, or list of them
        Plain, gzip, bzip2, xz or Zstandard; see `Reader`. Each file has its own header, and its columns in any order.
    label : str or None
        The column of labels: 0/1, -1/+1, or see ``positive``. None: no labels, and `Batch.labels` is NaN.
    categorical : list of str, optional
        Columns in which each text is a feature with the value 1. Default: all columns without another role.
    numeric : list of str, default none
        Columns that are one feature each, with the number as its value.
    weight : str, optional
        The column of the examples' weights, 0 or more.
    positive : str or number, optional
        The label that is 1; any other is 0. Default: labels are the numbers 0 and 1, or -1 and 1.
    lists : mapping of str to str, optional
        Columns whose cells are lists of texts; each text is a feature with the value 1. ``{"clicked": "ad"}`` gives
        those of "clicked" the keys that the same texts have in "ad"; name the column itself for keys of its own.
    vectors : list of str, default none
        Columns whose cells are lists of numbers: each number is a feature with the key that the column would have as a
        numeric one, and the number as its value. An item that is missing keeps its place, with the value 0.
    labels : list of str, default none
        Columns of numbers that are the labels of other tasks of a `shoal.torch.Model`: features as those of numeric
        columns, which data without labels lacks.
    list_separator : str, default "|"
        Separator of the items of a list or a vector; an empty text of a list keeps its place, as a feature of its own.
    sep : str, default ","
        Separator of cells; ``"\t"`` for TSV.
    columns : list of str, optional
        The columns of files without a header.
    na_values : list of str or numbers, default none
        Additional texts of missing cells, which produce no feature.
    keep_default_na : bool, default True
        Whether an empty cell and the texts that pandas treats as missing ("NA", "null", ...) are missing.
    interactions : list of pairs of columns, or list of columns, default none
        Pairs of columns whose features are combined, or columns, of which all pairs are.
    batch_size : int, default 8192
        Examples in each batch but the last.
    on_error : {"raise", "skip"}, default "raise"
        A malformed line raises ValueError with its position, its text and the fault, or is skipped and counted.
    reader_threads : int, optional
        Number of threads that parse; default: one for every four cores, at most eight.
    names : FeatureNames, optional
        Filled by the passes with a name for each feature.
    storage_options : mapping, optional
        For URLs; see `Reader`.

    Returns
    -------
    Reader

    Raises
    ------
    OSError, TypeError, ValueError
        As `Reader`; a column has two roles. During a pass: a file lacks a column.

    Notes
    -----
    A text's key is ``hash_strings([text], field=column)``, with a column's number being ``hash_strings([name])[0]``; a
    numeric column's is that of the empty text. Cells may be enclosed in double quotes, but a row is one line.
    ``docs/readers.md`` has the details.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from shoal import hash_strings
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "ads.csv")
    ...     _ = path.write_text("click,site,price,user\n1,a.com,0.5,17\n0,b.com,NA,18\n")
    ...     for batch in read_csv(path, label="click", categorical=["site"], numeric=["price"]):
    ...         print(batch.labels, batch.indptr, batch.values)
    ...         print(batch.keys[0] == hash_strings(["a.com"], field=int(hash_strings(["site"])[0]))[0])
    [1. 0.] [0 2 3] [1.  0.5 1. ]
    True
    """
    asked = Columns(
        label=label,
        categorical=categorical,
        numeric=numeric,
        weight=weight,
        positive=positive,
        lists=lists or {},
        vectors=vectors,
        labels=labels,
        interactions=interactions,
    )
    settings = Settings(batch_size, on_error, reader_threads, names)
    return TextReader(
        path,
        csv_format(
            asked,
            sep=sep,
            list_separator=list_separator,
            names=columns,
            na_values=na_values,
            keep_default_na=keep_default_na,
        ),
        settings,
        storage_options,
    )


def read_parquet(
    path: Wheres,
    *,
    label: str | None,
    categorical: Sequence[str] | None = None,
    numeric: Sequence[str] = (),
    weight: str | None = None,
    positive: str | float | None = None,
    lists: Mapping[str, str] | None = None,
    vectors: Sequence[str] = (),
    labels: Sequence[str] = (),
    na_values: Texts = (),
    interactions: Interactions = (),
    batch_size: int = BATCH_SIZE,
    names: FeatureNames | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Reader:
    """Read Parquet by the names of its columns.

    Parameters
    ----------
    path : path, pattern, URL, or list of them
        See `Reader`.
    label : str or None
        The column of labels: 0/1, -1/+1, true and false, or see ``positive``. None: there are none, and `Batch.labels`
        is NaN.
    categorical : list of str, optional
        Columns of which each text is a feature with the value 1; other types are taken as their text. Default: all
        columns that nothing else is said of.
    lists : mapping of str to str, optional
        Columns of Arrow's list type, whose elements are taken as text: a feature each, with the value 1.
        ``{"clicked": "ad"}`` gives those of "clicked" the keys that the same texts have in "ad"; name the column itself
        for keys of its own.
    vectors : list of str, default none
        Columns of Arrow's list type, whose elements are numbers, or texts that are: each is a feature with the key that
        the column would have as a numeric one, and the number as its value. A null keeps its place, with the value 0.
    na_values : list of str or numbers, default none
        Texts of missing cells, which produce no feature.
    numeric, weight, positive, labels, interactions, batch_size, names, storage_options
        As `read_csv`.

    Returns
    -------
    Reader

    Raises
    ------
    ImportError
        pyarrow is not installed (extra ``arrow``).
    OSError, TypeError, ValueError
        As `Reader`; a column has two roles. During a pass: a file lacks a column, or a cell does not fit its role.
    CorruptionError
        During a pass: a file is not Parquet, or is damaged.

    Notes
    -----
    Keys are those of `read_csv`. Nulls and NaN produce no feature. ``docs/readers.md`` has the details.

    Examples
    --------
    >>> reader = read_parquet("ads_*.parquet", label="click", numeric=["price"])  # doctest: +SKIP
    """
    columns = Columns(
        label=label,
        categorical=categorical,
        numeric=numeric,
        weight=weight,
        positive=positive,
        lists=lists or {},
        vectors=vectors,
        labels=labels,
        interactions=interactions,
    )
    files = files_of(path, storage_options)
    for file in files:
        if not (file.seekable or isinstance(file, Following)):
            raise ValueError(f"{file.name} is a stream, and Parquet is read from its end: write the data to a file")
    return TableReader(files, "parquet", columns, Settings(batch_size, names=names), na_values)


def read_arrow(
    data: Any,
    *,
    label: str | None,
    categorical: Sequence[str] | None = None,
    numeric: Sequence[str] = (),
    weight: str | None = None,
    positive: str | float | None = None,
    lists: Mapping[str, str] | None = None,
    vectors: Sequence[str] = (),
    labels: Sequence[str] = (),
    na_values: Texts = (),
    interactions: Interactions = (),
    batch_size: int = BATCH_SIZE,
    names: FeatureNames | None = None,
) -> Reader:
    """Read a table in memory, or any other Arrow stream, by the names of its columns.

    Parameters
    ----------
    data : object with ``__arrow_c_stream__``
        A frame of pandas or polars, a table, a dataset's scanner or a RecordBatchReader of pyarrow, a relation of
        DuckDB. Data without a length is a stream, which allows one pass.
    label, categorical, numeric, weight, positive, lists, vectors, labels, na_values, interactions, batch_size, names
        As `read_parquet`.

    Returns
    -------
    Reader

    Raises
    ------
    ImportError
        pyarrow is not installed (extra ``arrow``).
    TypeError
        ``data`` is not an Arrow stream, or a parameter is not a list.
    ValueError
        As `read_parquet`.

    Examples
    --------
    >>> import pandas
    >>> ads = pandas.DataFrame({"click": [1, 0], "site": ["a.com", "b.com"], "price": [0.5, None]})
    >>> for batch in read_arrow(ads, label="click", numeric=["price"]):
    ...     print(batch.labels, batch.indptr, batch.values)
    [1. 0.] [0 2 3] [1.  0.5 1. ]
    """
    if not hasattr(data, "__arrow_c_stream__"):
        name = type(data).__name__
        remedy = f"pass {name}.collect()" if hasattr(data, "collect") else "pass a frame of pandas 2.2 or later or of "
        remedy += "" if hasattr(data, "collect") else "polars, or a table of pyarrow"
        raise TypeError(f"{name} is not an Arrow stream (it lacks __arrow_c_stream__): {remedy}")
    columns = Columns(
        label=label,
        categorical=categorical,
        numeric=numeric,
        weight=weight,
        positive=positive,
        lists=lists or {},
        vectors=vectors,
        labels=labels,
        interactions=interactions,
    )
    return TableReader((ArrowSource(data),), "arrow", columns, Settings(batch_size, names=names), na_values)


def _whole(name: Field) -> int:
    """Return a field of libffm."""
    if isinstance(name, str) and not name.isdecimal():
        raise ValueError(f"{name!r} is not a field of libffm, whose fields are numbers: pass 0, 1, ...")
    return int(name)


def _namespace(name: Field) -> int:
    return field_of(str(name))


_NUMBERS: dict[str, Callable[[Field], int]] = {
    LIBFFM.name: _whole,
    VW.name: _namespace,
    CRITEO.name: column_of,
    "csv": _namespace,
    "parquet": _namespace,
    "arrow": _namespace,
}


def field_number(form: str, name: Field) -> int:
    """Return the number of a format's field, as in `Batch.fields`."""
    if form not in _NUMBERS:
        raise ValueError(f"{form!r} is not a format with fields: these are {', '.join(_NUMBERS)}")
    return _NUMBERS[form](name)


# Formats of named columns, whose keys are the same.
NAMED_FORMATS = ("csv", "parquet", "arrow")

# By the names of the formats.
READERS: dict[str, Callable[..., Reader]] = {
    LIBSVM.name: read_libsvm,
    LIBFFM.name: read_libffm,
    VW.name: read_vw,
    CRITEO.name: read_criteo,
    "csv": read_csv,
    "parquet": read_parquet,
}
