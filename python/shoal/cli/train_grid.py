"""``shoal train lr --grid``: train a model for each setting in one pass, and save the best one or all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.cli.answers import Answer, warn
from shoal.cli.tracking import make_trackers, tracking_options
from shoal.cli.train_run import (
    calibrate,
    check_learned,
    exit_status,
    keeping_what_was_learned,
    saving,
    training_data,
)
from shoal.cli.train_summary import (
    count_names,
    grid_lines,
    model_facts,
    name_lines,
    pass_lines,
    settings_name,
    table_lines,
)

if TYPE_CHECKING:
    import argparse

    from shoal.models import LogisticRegressionGrid, Model
    from shoal.storage.base import StoragePath


def fitted_grid(arguments: argparse.Namespace, grid: LogisticRegressionGrid) -> Answer:
    """Fit the models of a grid, save the best or all of them, and return the summary."""
    from shoal.storage.open import open_dir

    target = open_dir(arguments.output)
    folders = [target.child(settings_name(settings)) for settings in grid.settings] if arguments.save_all else [target]
    options = tracking_options(arguments)
    train, how = training_data(arguments, folders)
    interrupted: KeyboardInterrupt | None = None

    def learned() -> list[tuple[Model, StoragePath]]:
        found = grid.results(arguments.metric)[: None if arguments.save_all else 1] if grid.examples else []
        return [
            (one.model, target.child(settings_name(one.settings)) if arguments.save_all else target) for one in found
        ]

    try:
        with keeping_what_was_learned(learned, train.names):
            grid.fit(train, **how)
    except KeyboardInterrupt as interrupt:
        interrupted = interrupt
    check_learned(grid.examples, train, interrupted)
    results = grid.results(arguments.metric)
    saved = results if arguments.save_all else results[:1]
    where = [target.child(settings_name(result.settings)) if arguments.save_all else target for result in saved]
    interrupted = interrupted or calibrate(arguments, [result.model for result in saved], how["valid"])
    with saving(interrupted) as stopped:
        for result, folder in zip(saved, where, strict=True):
            result.model.save(folder, overwrite=arguments.overwrite, names=train.names)
            for tracker in make_trackers(options, folder, settings=result.settings):
                tracker.log_fitted(result.model, folder)
    if interrupted:
        warn(f"interrupted after {grid.examples:,} examples; the models as trained so far are in {target}")
    best = results[0]
    of_models = [model_facts(result.model) for result in results]
    lines = [
        *grid_lines(results, "weights", lambda model: model.count_nonzero()),
        "",
        f"{'best':<12} {settings_name(best.settings)}",
        *pass_lines(best.model),
        *table_lines(best.model, of_models[0]),
    ]
    lines += name_lines(train)
    lines.append(f"{'model':<12} {where[0]}" if len(where) == 1 else f"{'models':<12} {target}, one folder each")
    facts = [
        {
            "settings": result.settings,
            "model": str(where[i]) if i < len(where) else None,
            "progressive": result.progressive,
            "valid": result.valid,
            **of_models[i],
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
