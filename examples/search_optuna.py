"""A search for the settings of a logistic regression by Optuna, which stops trials that fall behind.

    python examples/search_optuna.py                               # draws a log
    python examples/search_optuna.py --data day_0.tsv --valid day_1.tsv --trials 50 --mlflow mlruns

A callback reports the validation loss of each pass to the trial. Requires Optuna: pip install optuna
"""

import argparse
from pathlib import Path

import optuna

import shoal
from shoal.tools.planted import PlantedModel, write_log


def search(
    train: shoal.data.Reader, valid: shoal.data.Reader, trials: int, epochs: int, mlflow: str | None
) -> optuna.Study:
    """Search for the learning rate and the L1 penalty of FTRL."""

    def objective(trial: optuna.Trial) -> float:
        def prune(progress: shoal.models.FitProgress) -> None:
            assert progress.valid is not None
            trial.report(progress.valid.logloss, progress.pass_number)
            if trial.should_prune():
                raise optuna.TrialPruned

        alpha = trial.suggest_float("alpha", 0.005, 2.0, log=True)
        l1 = trial.suggest_float("l1", 0.0, 4.0)
        tracked = [shoal.tracking.MLflow(mlflow, "optuna", f"trial {trial.number}", log_model=False)] if mlflow else []
        with shoal.LogisticRegression(shoal.FTRL(alpha=alpha, l1=l1)) as model:
            model.fit(train, valid=valid, epochs=epochs, shuffle=True, callbacks=[prune, *tracked], progress=False)
            measured = model.history.passes[-1].valid
        assert measured is not None
        return measured.logloss

    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=0), pruner=optuna.pruners.MedianPruner(n_startup_trials=3)
    )
    study.optimize(objective, n_trials=trials)
    return study


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a log in Criteo's format; default: one that is drawn")
    parser.add_argument("--valid", help="a log to measure on")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--mlflow", help="tracking URI or folder: a run for each trial")
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if arguments.data is None:
        planted = PlantedModel(seed=1)
        for day, size in enumerate((2000, 1000)):
            write_log(Path(f"day_{day}.tsv"), planted, size, day << 40)
        arguments.data, arguments.valid = "day_0.tsv", "day_1.tsv"
    train, valid = (shoal.read_criteo(name, batch_size=256) for name in (arguments.data, arguments.valid))
    study = search(train, valid, arguments.trials, arguments.epochs, arguments.mlflow)
    pruned = sum(trial.state == optuna.trial.TrialState.PRUNED for trial in study.trials)
    print(f"best     {study.best_value:.4f} with {study.best_params}")
    print(f"trials   {len(study.trials)}, {pruned} pruned")


if __name__ == "__main__":
    main()
