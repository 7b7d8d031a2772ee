"""``shoal train lr``, ``fm`` and ``ctr``: train a model, or a grid of models, and save the result.

Options, files of settings, reading, passes, metrics and saving are the same for all kinds; each makes its own model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from shoal.base.defaults import CLICK_BATCH_SIZE
from shoal.cli.answers import Answer
from shoal.cli.options import Command, Group, option
from shoal.cli.reading import Reading, delayed, format_of, open_reader, schema_of, source_of, without
from shoal.cli.train_grid import fitted_grid, grid_values
from shoal.cli.train_options import TrainOptions
from shoal.cli.train_run import Data, check_names, fitted, open_data, open_store, restarted_with_workers, tidied
from shoal.config import FactorizationConfig, FTRLConfig, RegressionConfig, TrainConfig

if TYPE_CHECKING:
    from shoal.data import FeatureNames, Reader
    from shoal.models import DBPG
    from shoal.optim import FTRL

EXAMPLES = """\
examples:
  $ shoal train lr --data train.libsvm --format libsvm --output first
  $ shoal train lr --help                   # logistic regression
  $ shoal train fm --help                   # factorization machines
  $ shoal train ctr --help                  # deep click-through-rate models in PyTorch
"""

LR_EXAMPLES = """\
examples:
  one pass over a click log, validated on the next day:
  $ shoal train lr --data day_0.tsv --format criteo --valid day_1.tsv --alpha 0.05 --l1 1 --output ctr

  six settings in one pass, which parses the data once; the best on the next day is saved:
  $ shoal train lr --data day_0.tsv --format criteo --valid day_1.tsv \\
      --grid alpha=0.02,0.05,0.1 --grid l1=0,1 --output best

  a small file in shuffled small batches, until two passes bring no improvement (.gz, .bz2 and .xz work too):
  $ shoal train lr --data train.libsvm.gz --format libsvm --valid test.libsvm \\
      --epochs 50 --patience 2 --shuffle --batch-size 256 --output small

  CSV with a header, with the pairs of two columns as features; and standard input:
  $ shoal train lr --data ads_0.csv ads_1.csv --format csv --label click --numeric price --interactions site,user \\
      --output ads
  $ cat ads_0.csv | shoal train lr --data - --format csv --label click --output stream

  numeric columns as they are: by default each value is divided by the root mean square of its column, so that columns
  of any scale are learned; --ignore leaves columns out:
  $ shoal train lr --data ads_0.csv --format csv --label click --numeric price --no-normalized --ignore user \\
      --output sizes

  a tenth of the negative examples, with ten times the weight, and probabilities calibrated on the validation data:
  $ shoal train lr --data day_0.tsv --format criteo --valid day_1.tsv --negative-rate 0.1 --calibrate isotonic \\
      --output sampled

  with the progressive loss at powers of two, as Vowpal Wabbit prints it, instead of a progress bar:
  $ shoal train lr --data train.libsvm --format libsvm --progress 2.0 --output lines

  of five classes, whose numbers 0 to 4 are the labels:
  $ shoal train lr --data stars.csv --format csv --label stars --classes 5 --output stars

  to convergence under an L1 penalty, with the examples in memory:
  $ shoal train lr --data train.libsvm --format libsvm --solver dbpg --l1 2 --output sparse

  on a cluster of processes on this machine (several machines: run N times with --cluster tcp://HOST:PORT --workers N),
  with compressed messages:
  $ shoal launch --servers 2 --workers 2 \\
      shoal train lr --cluster --data day_0.tsv --format criteo --output shared --filters zeros,gradients=bfloat16

  rows only for keys that occur twice, removed when they are not used for 100,000 batches:
  $ shoal train lr --data day_0.tsv --format criteo --admit bloom:2:100000000 --expire ttl:100000 --output lean

  for scripts: replace the model, skip malformed lines, print JSON:
  $ shoal train lr --data day_0.tsv --format criteo --on-error skip --overwrite --output ctr --json --quiet

  with a checkpoint every 1000 batches; after a crash or Ctrl-C the same command continues, with the same result:
  $ shoal train lr --data day_0.tsv --format criteo --output long --checkpoint-every 1000 --resume

  the settings of a run as a file, and a run with them:
  $ shoal train lr --data day_0.tsv --format criteo --alpha 0.05 --print-config > run.toml
  $ shoal train lr --config run.toml --output again

--output, --data and --valid also take URLs such as s3://bucket/name. Ctrl-C and SIGTERM save the model as trained so
far and exit with status 130 and 143. An existing model is replaced only with --overwrite, atomically and at the end; a
directory that holds anything else is never written to.
A grid needs the memory of one table per setting. On a cluster each worker trains on its split of the examples and
predicts its split of --valid; metrics are those of all workers, and worker 0 saves the model. Ctrl-C then writes no
checkpoint, and the last one remains; of a stream all workers end at the same clock, and one of them writes one.
"""

FM_EXAMPLES = """\
examples:
  eight factors per key, one pass over a click log, validated on the next day:
  $ shoal train fm --data day_0.tsv --format criteo --valid day_1.tsv --dim 8 --output pairs

  a small file in shuffled small batches, until two passes bring no improvement:
  $ shoal train fm --data train.libsvm --format libsvm --valid test.libsvm --dim 4 --factors-lr 0.1 \\
      --epochs 50 --patience 2 --shuffle --batch-size 64 --output few

  with regularized factors, for many keys with little data:
  $ shoal train fm --data train.libsvm --format libsvm --factors-l2 0.03 --l2 1 --output careful

--alpha, --beta, --l1 and --l2 are the settings of FTRL for the linear weights; Adagrad trains the factors. Ctrl-C and
SIGTERM save the model as trained so far and exit with status 130 and 143.
"""

CTR_EXAMPLES = """\
examples:
  $ shoal train ctr --config ctr.toml --output clicks          # docs/ctr.md has a complete configuration
  $ shoal train ctr --config ctr.toml --set model.name=dcnv2 --set model.dim=8 --set train.optimizer.lr=0.0005 \\
      --output other

  on two workers and two servers; [train] dense = "servers" keeps the dense part on the servers:
  $ shoal launch --servers 2 --workers 2 shoal train ctr --cluster --config ctr.toml --output shared

  a model for each combination of settings, trained in one pass; the best one is saved:
  $ shoal train ctr --config ctr.toml --grid model.dim=4,8 --grid train.optimizer.lr=0.0005,0.001 \\
      --grid model.dropout=0,0.2 --output best

  continue after Ctrl-C or a crash from the last checkpoint:
  $ shoal train ctr --config ctr.toml --output clicks --resume

  use the result:
  $ shoal report clicks
  $ shoal evaluate clicks --data day_2.csv

architectures: lr, fm, wide_deep, deepfm, dcnv2, dlrm, din, bst, autoint, fwfm, masknet, final_mlp, mmoe, ple, esmm,
two_tower, or your own, mypkg.models:Class. The command writes a checkpoint to the output directory after every pass,
and every N batches with --checkpoint-every N. Ctrl-C and SIGTERM also write one; the exit status is then 130 or 143. On
a cluster each worker trains on its split of the examples and worker 0 saves the model; Ctrl-C then writes no
checkpoint, and the last one remains; of a stream all workers end at the same clock, and one of them writes one.
"""


def train_lr(options: TrainOptions) -> Answer:
    """Train a logistic regression, of two classes or several, or a grid of them."""
    from shoal.models import LogisticRegression, LogisticRegressionGrid, MulticlassRegression

    settings = options.lr
    solver = _solver(options, settings)
    is_multiclass = settings.classes > 2
    if is_multiclass:
        _check_classes(options, settings)
    elif settings.multi_class is not None:
        raise ValueError("--multi-class requires --classes of 3 or more")
    how = _how(options, settings, is_exact=settings.solver == "online")
    if options.grid:
        values = {name: list(map(_number, given)) for name, given in grid_values(options).items()}
        data = open_data(options)
        with open_store(options) as store:
            names = ("seed", "normalized", "negative_rate", "warm_up")
            some = {name: how[name] for name in names}
            grid = LogisticRegressionGrid(values, optimizer=_ftrl(settings), store=store, **some)
            return fitted_grid(options, grid, data, grid.fit, lambda one: replace(options, lr=replace(settings, **one)))
    data = open_data(options)
    with open_store(options) as store:
        if is_multiclass:
            loss = settings.multi_class or "multinomial"
            del how["negative_rate"]
            several = MulticlassRegression(settings.classes, optimizer=_ftrl(settings), store=store, loss=loss, **how)
            return fitted(options, several, data)
        optimizer: Any = {"optimizer": _ftrl(settings)} if solver is None else {"solver": solver}
        return fitted(options, LogisticRegression(store=store, **optimizer, **how), data)


def train_fm(options: TrainOptions) -> Answer:
    """Train a factorization machine."""
    from shoal.models import FactorizationMachine
    from shoal.optim import Adagrad, Normal

    settings: FactorizationConfig = options.fm
    how = _how(options, settings, is_exact=True)
    factors = Adagrad(lr=settings.factors_lr, n0=settings.factors_n0, weight_decay=settings.factors_l2)
    init = Normal(settings.init_std, seed=options.train.seed)
    data = open_data(options)
    with open_store(options) as store:
        optimizer = _ftrl(settings)
        model = FactorizationMachine(settings.dim, optimizer=optimizer, factors=factors, init=init, store=store, **how)
        return fitted(options, model, data)


def train_ctr(options: TrainOptions) -> Answer:
    """Train a click-through-rate model in PyTorch, or a grid of them."""
    try:
        import torch
    except ImportError:
        raise ValueError("click-through-rate models require PyTorch: pip install 'shoal[torch]'") from None
    from shoal.data import FeatureNames
    from shoal.torch.config import build, checked, with_intervals
    from shoal.torch.grid import ClickModelGrid

    if options.train.metric == "accuracy":
        raise ValueError("--metric accuracy is of several classes: pass --metric logloss or auc")
    if not options.data.data:
        raise ValueError("the run has no examples: pass --data FILE, or set data in [data]")
    source = source_of(options.data)
    form = format_of(options.data.data, options.data.format, quiet=options.quiet)
    config = checked(replace(options, data=replace(options.data, format=form)))
    valid = open_config_reader(config, config.data.valid) if config.data.valid else None
    names = FeatureNames() if config.output.names else None
    train = delayed(open_config_reader(config, source, names), config.data)
    data = Data(without(train, config.data), valid)
    check_names(config, data.train)
    config = with_intervals(config, data.train)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    data.check(config, kept=True)
    if options.grid:
        values = grid_values(options)
        with ClickModelGrid(config, values, threads=options.threads, slots=options.tables.slots) as grid:

            def fit(reader: Reader, *, valid: Reader | None, progress: bool | float, **_: Any) -> None:
                grid.fit(reader, valid=valid, progress=progress)  # the rest is in its configuration

            return fitted_grid(config, grid, data, fit, lambda one: grid.configs[grid.settings.index(one)])
    with open_store(options) as store:
        model = build(config, store)
        if options.init_from is not None:
            model.init_from(options.init_from)
        return fitted(config, model, data)


def open_config_reader(config: TrainConfig, files: Any, names: FeatureNames | None = None) -> Reader:
    """Create the reader of files in the format and with the columns of a configuration of a click model."""
    form = config.data.format or ""
    size = config.train.batch_size or CLICK_BATCH_SIZE
    from shoal.torch.config import schema_of as columns_of

    schema = {**schema_of(config.data, form), **columns_of(config)}
    return open_reader(files, form, Reading.of(config.data, size), schema, names)


def _ftrl(settings: FTRLConfig) -> FTRL:
    from shoal.optim import FTRL

    return FTRL(alpha=settings.alpha, beta=settings.beta, l1=settings.l1 or 0.0, l2=settings.l2)


def _how(options: TrainOptions, settings: FTRLConfig, *, is_exact: bool) -> dict[str, Any]:
    """Return the arguments that all models over one table have.

    Values are normalized unless the options say otherwise: if columns are numeric, and messages are exact.
    """
    from shoal.lifecycle import parse_admission, parse_expiry

    if options.train.metric == "gauc":
        raise ValueError("--metric gauc is of click models with a group: pass --metric logloss or auc")
    normalized = settings.normalized
    if normalized is None:
        normalized = bool(options.data.numeric) and is_exact and options.cluster.filters is None
    tables = options.tables
    return {
        **({} if tables.table is None else {"table": tables.table}),
        "seed": options.train.seed,
        "admit": None if tables.admit is None else parse_admission(tables.admit),
        "expire": [parse_expiry(rule) for rule in tables.expire or ()],
        "normalized": normalized,
        "negative_rate": options.train.negative_rate,
        "warm_up": options.train.warm_up,
    }


def _check_classes(options: TrainOptions, settings: RegressionConfig) -> None:
    """Raise ValueError for what only models of two classes have."""
    given = {
        "solver": settings.solver != "online",
        "grid": options.grid,
        "save_all": options.save_all,
        "positive": options.data.positive,
        "negative_rate": options.train.negative_rate != 1.0,
        "calibrate": options.train.calibrate,
    }
    for name in (name for name, value in given.items() if value):
        raise ValueError(f"{option(name)} is for two classes and does not apply to --classes: leave it out")
    if options.train.metric == "auc":
        raise ValueError("--metric auc is for two classes: pass --metric logloss or accuracy")


def _solver(options: TrainOptions, settings: RegressionConfig) -> DBPG | None:
    """Return the batch solver, if it was requested."""
    from shoal.models import DBPG

    names = ("blocks", "delay", "slack", "tolerance", "passes")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(settings, name)) is not None}
    if settings.solver == "online":
        if given:
            raise ValueError(f"--{next(iter(given))} requires --solver dbpg")
        return None
    usual = RegressionConfig()
    others = {"grid": options.grid, **{name: getattr(settings, name) != getattr(usual, name) for name in _OF_FTRL}}
    for name in (name for name, value in others.items() if value):
        raise ValueError(f"--{name} does not apply to --solver dbpg: leave it out")
    for name, default in {"epochs": 1, "shuffle": False, "patience": None}.items():
        if getattr(options.train, name) != default:
            raise ValueError(f"--{name} does not apply to --solver dbpg: pass --passes and --tolerance")
    if settings.normalized:
        raise ValueError("--normalized does not apply to --solver dbpg: leave it out")
    if given.get("slack", 0) < 0:
        given["slack"] = None
    if settings.l1 is not None:
        given["l1"] = settings.l1
    return DBPG(**given)


_OF_FTRL = ("alpha", "beta", "l2")


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"--grid has {value!r}, which is not a number: write it as alpha=0.05,0.1")
    return float(value)


def _command(kind: str, what: str, examples: str, run: Any) -> Command:
    run = restarted_with_workers(tidied(run))
    return Command(f"train {kind}", what, examples, TrainOptions, run, model=kind, reads_file=True, role="worker")


COMMANDS = (
    Group("train", "Train a model.", EXAMPLES, "kinds of models", "KIND"),
    _command("lr", "Train a logistic regression with FTRL-Proximal.", LR_EXAMPLES, train_lr),
    _command("fm", "Train a factorization machine.", FM_EXAMPLES, train_fm),
    _command("ctr", "Train a click-through-rate model in PyTorch: DeepFM, DCN-V2, DLRM, ...", CTR_EXAMPLES, train_ctr),
)
