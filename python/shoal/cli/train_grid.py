"""``shoal train --grid``: train a model for each setting in one pass, and save the best one or all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.cli.answers import Answer, warn
from shoal.cli.tracking import make_trackers
from shoal.cli.train_run import (
    Data,
    calibrate,
    check_learned,
    exit_status,
    flat_settings,
    keep_config,
    keeping_what_was_learned,
    output_of,
    progress_of,
    saving,
)
from shoal.cli.train_summary import (
    count_names,
    grid_lines,
    is_click,
    model_summary,
    name_lines,
    pass_lines,
    settings_name,
)

if TYPE_CHECKING:
    from shoal.cli.train_options import TrainOptions
    from shoal.config import TrainConfig
    from shoal.models import LogisticRegressionGrid
    from shoal.torch.grid import ClickModelGrid


def parse_values(text: str) -> tuple[str, list[Any]]:
    """Read model.dim=8,16: values as in TOML, where words need no quotation marks."""
    import tomllib

    name, equals, values = text.partition("=")
    if not (name and equals and values):
        raise ValueError(f"{text!r} is not a setting with values: write it as alpha=0.05,0.1 or model.dim=8,16")
    try:
        found: list[Any] = tomllib.loads(f"values = [{values}]")["values"]
    except tomllib.TOMLDecodeError:
        found = [value.strip() for value in values.split(",")]
    return name, found


def grid_values(options: TrainOptions) -> dict[str, list[Any]]:
    """Return the values of each setting of a grid."""
    given = list(map(parse_values, options.grid))
    if len(dict(given)) < len(given):
        raise ValueError("--grid names a setting twice: give all its values at once, as in alpha=0.05,0.1")
    return dict(given)


def fitted_grid(
    options: TrainOptions,
    grid: LogisticRegressionGrid | ClickModelGrid,
    data: Data,
    fit: Callable[..., Any],
    config_of: Callable[[dict[str, Any]], TrainConfig],
) -> Answer:
    """Fit the models of a grid by ``fit``, save the best or all of them, and return the summary.

    ``config_of`` returns the configuration of the model with some settings.
    """
    from shoal.models import files
    from shoal.models.plan import early_stopping_of
    from shoal.storage.open import open_dir

    target = open_dir(output_of(options))
    train = data.train

    def places(settings: list[dict[str, Any]]) -> list[Any]:
        return [target.child(settings_name(one)) for one in settings] if options.save_all else [target]

    for place in places(grid.settings):
        files.check_target(place, overwrite=options.overwrite)
    for place in places(grid.settings):
        files.make_target(place)
    if options.tables.expected_keys is not None:
        for table in (table for model in grid.models for table in model.tables):
            table.reserve(options.tables.expected_keys)
    metric = options.train.metric
    interrupted: KeyboardInterrupt | None = None

    def learned() -> list[tuple[Any, Any]]:
        found = grid.results(metric) if grid.examples else []
        return list(zip([one.model for one in found], places([one.settings for one in found]), strict=False))

    try:
        with keeping_what_was_learned(learned, train.names):
            fit(
                train,
                valid=data.valid,
                epochs=options.train.epochs,
                shuffle=options.train.shuffle,
                early_stopping=early_stopping_of(options.train),
                progress=progress_of(options),
            )
    except KeyboardInterrupt as interrupt:
        interrupted = interrupt
    check_learned(grid.examples, train, interrupted)
    results: list[Any] = list(grid.results(metric))
    where = places([one.settings for one in results])
    saved = results[: len(where)]
    interrupted = interrupted or calibrate(options, [one.model for one in saved], data.valid)
    with saving(interrupted) as stopped:
        for result, place in zip(saved, where, strict=True):
            has_dense, config = is_click(result.model), config_of(result.settings)
            result.model.save(place, overwrite=options.overwrite, names=train.names)
            keep_config(config, place)
            settings = flat_settings(config) if has_dense else result.settings
            for tracker in make_trackers(options.logging, place, settings=settings):
                tracker.log_fitted(result.model, place)
    if interrupted:
        warn(f"interrupted after {grid.examples:,} examples; the models as trained so far are in {target}")
    described, _ = model_summary(results[0].model)
    lines = [
        *grid_lines(results),
        "",
        f"{'best':<12} {settings_name(results[0].settings)}",
        *pass_lines(results[0].model),
        *described,
        *name_lines(train),
        f"{'model':<12} {where[0]}" if len(where) == 1 else f"{'models':<12} {target}, one folder each",
    ]
    facts = [
        {
            "settings": result.settings,
            "model": str(where[i]) if i < len(where) else None,
            "progressive": result.progressive,
            "valid": result.valid,
            **model_summary(result.model)[1],
        }
        for i, result in enumerate(results)
    ]
    return Answer(
        "\n".join(lines),
        {
            "model": str(where[0]),
            "interrupted": interrupted is not None,
            "names": count_names(train),
            "examples": grid.examples,
            "grid": facts,
        },
        exit_status(stopped()),
    )
