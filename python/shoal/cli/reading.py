"""The data of commands: the options that name and read it, and its readers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Self

from shoal.base.defaults import BATCH_SIZE
from shoal.base.settings import Setting
from shoal.cli.answers import warn
from shoal.cli.options import Imports, Output, option
from shoal.config import (
    COLUMN_FORMATS,
    BatchSize,
    DataConfig,
    Dir,
    Format,
    OnError,
    ReaderConfig,
    ReaderThreads,
    Threads,
    Words,
    separator,
)

if TYPE_CHECKING:
    from shoal.data import FeatureNames, Reader
    from shoal.models.predictor import Predictor
    from shoal.models.segments import Segmentation

Files = Annotated[tuple[str, ...], "examples: files, patterns, URLs, or -", Setting(metavar="FILE", several=True)]
ModelFormat = Annotated[Format, "format of the data (default: that of the training data)"]
Model = Annotated[str, "directory of the model, or s3://...", Setting(metavar="MODEL", positional=True)]
Segments = Annotated[
    Words,
    "columns, namespaces or fields: also measure by their texts, the 20 of the most examples and the others together",
]
Cache = Annotated[Dir | None, "directory for local copies of remote exports (default: ~/.cache/shoal)"]


class Reading(Output, frozen=True, kw_only=True):
    """How a command reads files."""

    batch_size: BatchSize = BATCH_SIZE
    on_error: OnError = "raise"
    reader_threads: ReaderThreads = None
    import_: Imports = ()

    @classmethod
    def of(cls, config: ReaderConfig, batch_size: int) -> Self:
        """Return how the files of a configuration are read."""
        return cls(batch_size=batch_size, on_error=config.on_error, reader_threads=config.reader_threads)


class ReadingForModel(Reading, frozen=True, kw_only=True):
    """How a command reads files with a model."""

    model: Model
    data: Files
    format: ModelFormat = None
    threads: Threads = None


@contextmanager
def opened_model(options: ReadingForModel) -> Iterator[tuple[Predictor, Reader]]:
    """Load the model, and open the data in the model's format."""
    from shoal import models
    from shoal.models import files
    from shoal.storage.open import open_dir

    where = open_dir(options.model)
    if where.kind() is None:
        raise ValueError(f"{where}: there is no such model")
    with files.store_for(where, threads=options.threads) as store:
        model: Predictor
        if files.read(where).model == files.CLICK:
            from shoal.torch import load

            model = load(where, store=store)
        else:
            model = models.load(where, store=store)
        form = format_for_model(options.data, options.format, options.model, model.format)
        reader = open_reader(options.data, form, options, model.schema, learned=model.format)
        reader = model.reading(reader)
        model.check_format(reader)
        yield model, reader


def columns_of(
    data: Any, reading: Reading, reader: Reader, columns: Sequence[str], option: str
) -> dict[str, Segmentation]:
    """Read the texts of some columns of a reader's files, which need not be features, in a pass of their own."""
    from shoal.models.segments import read_segments

    if reader.format == "libsvm":
        raise ValueError(f"{option} names a field, and libsvm has none: leave it out")
    schema = {name: value for name, value in reader.schema.items() if name != "interactions"}
    if reader.format in COLUMN_FORMATS:
        schema = {name: value for name, value in schema.items() if name not in _OTHER_ROLES}
        schema["categorical"] = list(columns)
    return read_segments(open_reader(data, reader.format, reading, schema), columns)


_OTHER_ROLES = ("numeric", "lists", "vectors", "labels", "weight")


def source_of(config: DataConfig) -> Any:
    """Return what a reader is made of: the files of a configuration, the directories that it follows, or a topic."""
    topics = [name for name in config.data if name.startswith("kafka://")]
    if topics:
        from shoal.data.kafka import Topic

        if len(config.data) > 1 or config.follow:
            raise ValueError(f"{topics[0]} is a stream of its own: pass it alone, without --follow")
        if config.format is None:
            raise ValueError(f"{topics[0]}: name the format of the messages, as in --format libsvm or --format json")
        return Topic.of_url(topics[0])
    if not config.follow:
        return config.data
    from shoal.data.folder import Following

    if config.format is None:
        raise ValueError("--follow reads files that are not there yet: name their format, as in --format libsvm")
    return Following(*config.data)


def delayed(reader: Reader, config: DataConfig) -> Reader:
    """Return a reader whose batches leave after the delay of a configuration."""
    from shoal.data.stream import MAX_DELAY, is_divided

    given = config.max_delay
    return reader.with_max_delay(MAX_DELAY if given is None and is_divided(reader) else given)


def format_of(data: Sequence[str], form: str | None, *, quiet: bool) -> str:
    """Return the format of the option, or detect it."""
    if form is not None:
        return form
    from shoal.data.guess import guess_format

    form = guess_format(data)
    if not quiet:
        warn(f"detected format {form}; pass --format to choose another one")
    return form


def format_for_model(data: Sequence[str], chosen: str | None, model: object, form: str | None) -> str:
    """Return the format of data for a model, named ``model`` in errors, that learned from ``form``.

    A column's text has the same key in a text file, in Parquet and in memory: there the files decide.
    """
    if chosen is not None:
        return chosen
    if form is None:
        raise ValueError(f"{model} does not record the format of its training data: pass --format")
    if form not in (*COLUMN_FORMATS, "arrow"):
        return form
    from shoal.data.guess import guess_format

    try:
        found = guess_format(data)
    except (OSError, ValueError):
        return form  # the reader says what is wrong
    is_other = form == "arrow" or "parquet" in (form, found)
    return found if is_other and found in COLUMN_FORMATS else form


def schema_of(config: ReaderConfig, form: str) -> dict[str, Any]:
    """Return the columns of a configuration as keyword arguments of the functions that create readers."""
    named = ("label", "categorical", "numeric", "weight", "positive", "sep", "columns", "na_values")
    schema = {name: value for name in named if (value := getattr(config, name))}
    if form not in COLUMN_FORMATS:
        for name in (*schema, *(["ignore"] if config.ignore else [])):
            raise ValueError(f"{option(name)} applies to {', '.join(COLUMN_FORMATS)}, not to {form}: leave it out")
    elif "sep" in schema and form != "csv":
        raise ValueError(f"--sep applies to csv, not to {form}: leave it out")
    elif "label" not in schema:
        raise ValueError(f"{form} requires --label, the name of a column")
    schema |= {name: list(value) for name, value in schema.items() if isinstance(value, tuple)}
    if "sep" in schema:
        schema["sep"] = separator(schema["sep"])
    if isinstance(config, DataConfig) and config.history is not None:
        schema["lists"] = {config.history: config.item or config.history}
    if isinstance(config, DataConfig) and form in ("csv", "tsv") and config.list_separator != "|":
        schema["list_separator"] = config.list_separator
    if config.interactions:
        if form == "libsvm":
            raise ValueError("libsvm has no fields: --interactions applies to the other formats")
        fields = [names.split(",") for names in config.interactions]
        for names in fields:
            if len(names) < 2:
                raise ValueError(f"--interactions {','.join(names)}: name two or more, as in site,user")
        schema["interactions"] = [pair for names in fields for pair in itertools.combinations(names, 2)]
    return schema


def open_reader(
    path: Any,
    form: str,
    reading: Reading,
    schema: Mapping[str, Any],
    names: FeatureNames | None = None,
    learned: str | None = None,
) -> Reader:
    """Create the reader of files; it collects the names of features into ``names``, if passed.

    ``schema`` is that of data of the format ``learned``, if it is not of this one.
    """
    from shoal.data.columns import missing_texts
    from shoal.data.kafka import Topic
    from shoal.data.readers import READERS
    from shoal.data.stream import topic_reader

    if form == "tsv":
        form, schema = "csv", {"sep": "\t", **schema}
    if form == "arrow":
        raise ValueError("the model was trained on a table in memory: pass --format csv, tsv or parquet")
    if form in COLUMN_FORMATS and "label" not in schema:
        raise ValueError(f"{form} requires the column of the label: the model was not trained on {form}")
    how: dict[str, Any] = {"batch_size": reading.batch_size, "names": names}
    if isinstance(path, Topic):
        if reading.reader_threads is not None:
            raise ValueError("--reader-threads applies to files, not to a topic: leave it out")
        return topic_reader(path, form, schema, on_error=reading.on_error, **how)
    if form == "json":
        raise ValueError("json is for messages: pass --data kafka://HOST:PORT/TOPIC, or files of another format")
    if form == "parquet":
        given = {"--on-error skip": reading.on_error != "raise", "--reader-threads": reading.reader_threads is not None}
        if refused := [name for name, is_given in given.items() if is_given]:
            raise ValueError(f"{refused[0]} applies to lines of text, not to parquet: leave it out")
        missing = missing_texts(learned, schema)
        schema = {name: value for name, value in schema.items() if name not in _OF_TEXT}
        if missing:
            schema["na_values"] = missing
    else:
        how |= {"on_error": reading.on_error, "reader_threads": reading.reader_threads}
    return READERS[form](list(path) if isinstance(path, tuple) else path, **schema, **how)


_OF_TEXT = ("sep", "list_separator", "columns", "na_values", "keep_default_na")


def without(data: Reader, config: DataConfig) -> Reader:
    """Return a reader without the examples that a configuration leaves out."""
    if not config.without and config.without_examples is None:
        return data
    from shoal.data import key_of_name
    from shoal.data.places import read_places

    places = [] if config.without_examples is None else read_places(config.without_examples)
    return data.without((key_of_name(data.format, one, data.schema) for one in config.without), examples=places)


def with_known_columns(data: Reader, ignored: Sequence[str]) -> Reader:
    """Return a reader of the same columns in every file, without the ignored ones.

    Raises ValueError if one of these is not a column that is taken because nothing is said of it.
    """
    known = data.with_columns()
    if not ignored:
        return known
    taken = known.schema.get("categorical")
    if taken is None or "categorical" in data.schema:
        why = "the columns of a stream are not known before it is read" if taken is None else "--categorical names them"
        raise ValueError(f"--ignore leaves out columns of which nothing is said, and {why}: leave it out")
    for name in ignored:
        if name not in taken:
            raise ValueError(
                f"--ignore {name}: there is no such column, or it has a role; the others are {', '.join(taken)}"
            )
    return data.with_columns([name for name in taken if name not in ignored])
