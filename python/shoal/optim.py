"""Descriptions of optimizers and initial rows.

Descriptions are frozen values: they can be compared, hashed, pickled and written into a manifest. The rules themselves
run in the engine, in the process that holds the rows. ``docs/optimizers.md`` has the formulas and their sources.
"""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from shoal import _core
from shoal.base.scalars import make_plain
from shoal.schedules import Schedule, make_schedule

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Add",
    "Constant",
    "GroupFTRL",
    "Init",
    "Momentum",
    "Normal",
    "Optimizer",
    "Proximal",
    "RowWiseAdagrad",
    "Uniform",
    "Zeros",
    "make_init",
    "make_optimizer",
]


def _number(owner: object, name: str, value: object) -> float:
    if not isinstance(value, (int, float)):
        raise TypeError(f"{type(owner).__name__} needs a number for {name}, got {type(value).__name__} {value!r}")
    return float(value)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Optimizer:
    """Base class of optimizers: bounds on the summed gradient of a row.

    Parameters
    ----------
    clip_value : float, optional
        Each element of the gradient is clipped to ``[-clip_value, clip_value]``, before ``clip_norm``.
    clip_norm : float, optional
        A row's gradient whose L2 norm is larger is scaled down to this.
    schedule : Schedule, optional
        Learning rate as a function of the table's clock, from `shoal.schedules`. For optimizers with an ``lr``, except
        `Proximal`.
    """

    clip_value: float | None = None
    clip_norm: float | None = None
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        if not isinstance(self.schedule, Schedule | None):
            raise TypeError(
                f"{type(self).__name__} needs a schedule such as shoal.schedules.Cosine(10_000), got {self.schedule!r}"
            )
        _core.check_optimizer(type(self).__name__, self.params())

    def __repr__(self) -> str:
        """Show the parameters that differ from the defaults, and the learning rate."""
        shown = [f for f in fields(self) if not f.kw_only or getattr(self, f.name) != f.default]
        sorted_fields = sorted(shown, key=lambda f: bool(f.kw_only))
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in sorted_fields)})"

    @property
    def has_rate(self) -> bool:
        """Whether there is a learning rate that may change between two steps, by a schedule for example."""
        return "lr" in type(self).__dataclass_fields__

    @property
    def rule(self) -> str:
        """Name of the engine's rule."""
        return type(self).__name__

    def params(self) -> dict[str, float]:
        """All hyper-parameters by name; unset bounds and the parameters of an unset schedule are left out."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "schedule"}
        numbers = {name: _number(self, name, value) for name, value in values.items() if value is not None}
        return numbers if self.schedule is None else numbers | self.schedule.params()

    def engine_params(self) -> dict[str, float]:
        """Parameters of the engine's rule."""
        return self.params()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SGD(Optimizer):
    """Stochastic gradient descent: ``w -= lr * g``.

    Parameters
    ----------
    lr : float
        Learning rate.
    weight_decay : float
        L2, as in torch: ``g += weight_decay * w``, on touched rows.

    Examples
    --------
    >>> SGD(0.1)
    SGD(lr=0.1)
    """

    lr: float = field(default=0.01, kw_only=False)
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Momentum(Optimizer):
    """SGD with momentum, as in torch with dampening 0; rows that a push does not touch keep their velocity.

    ``v = mu * v + g``, then ``w -= lr * v``, or with Nesterov's form ``w -= lr * (g + mu * v)``.

    Parameters
    ----------
    lr : float
        Learning rate.
    mu : float
        Share of the velocity that is kept, in [0, 1).
    nesterov : bool
        Nesterov's form (Sutskever et al., ICML'13).
    weight_decay : float
        L2, as in torch.
    """

    lr: float = field(default=0.01, kw_only=False)
    mu: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Adagrad(Optimizer):
    """Adagrad (Duchi, Hazan, Singer, JMLR'11), as in torch: ``n += g**2; w -= lr * g / (sqrt(n) + eps)``.

    Parameters
    ----------
    lr : float
        Learning rate. With ``n0 = 0`` the first step changes a weight by ``lr``, however small its gradient.
    eps : float
        Added to the root.
    n0 : float
        Initial value of ``n``.
    weight_decay : float
        L2, as in torch.
    """

    lr: float = field(default=0.01, kw_only=False)
    eps: float = 1e-10
    n0: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RowWiseAdagrad(Optimizer):
    """Adagrad with one accumulator per row (FBGEMM's EXACT_ROWWISE_ADAGRAD).

    ``m += mean(g**2); w -= lr * g / (sqrt(m) + eps)``: a row takes ``dim + 1`` floats.

    Parameters
    ----------
    lr : float
        Learning rate.
    eps : float
        Added to the root.
    weight_decay : float
        L2 (``g + weight_decay * w`` also enters ``m``), or decoupled.
    decoupled : bool
        Whether weight decay is decoupled: ``w *= 1 - lr * weight_decay``.
    """

    lr: float = field(default=0.01, kw_only=False)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FTRL(Optimizer):
    """FTRL-Proximal (McMahan et al., KDD'13, Algorithm 1): sparse weights from L1, no weights stored.

    A row is ``z`` and ``n``; ``w`` is 0 if ``|z| <= l1``, else
    ``-(z - sgn(z) * l1) / ((beta + sqrt(n)) / alpha + l2)``.

    Parameters
    ----------
    alpha : float
        Learning rate.
    beta : float
        Slows the first steps; 1 is customary.
    l1 : float
        Weights with ``|z| <= l1`` are exactly 0.
    l2 : float
        Shrinks all weights.
    n0 : float
        Initial value of ``n``.
    """

    alpha: float = field(default=0.1, kw_only=False)
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    n0: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GroupFTRL(Optimizer):
    """FTRL with a sparse group lasso: whole rows become 0 (Yue et al., ECML-PKDD'21).

    Parameters
    ----------
    alpha, beta, l1, l2, n0 : float
        As for :class:`FTRL`.
    l21 : float
        The group lasso's strength; it is multiplied by ``sqrt(dim)``.
    """

    alpha: float = field(default=0.1, kw_only=False)
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    l21: float = 0.0
    n0: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Adam(Optimizer):
    """Adam (Kingma, Ba, ICLR'15), lazy like torch's SparseAdam: only touched rows are updated.

    Parameters
    ----------
    lr : float
        Learning rate.
    b1, b2 : float
        Decay of the two means, in [0, 1).
    eps : float
        Added to the root.
    weight_decay : float
        L2, as in torch: ``g += weight_decay * w``.
    per_row_step : bool
        Whether the bias correction counts each row's own steps (4 bytes a row) instead of the table's pushes.
    """

    lr: float = field(default=0.001, kw_only=False)
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    per_row_step: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov, Hutter, ICLR'19) on touched rows: ``w *= 1 - lr * weight_decay``.

    Parameters are those of :class:`Adam`.
    """


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Proximal(Optimizer):
    """One step of proximal gradient for an L1 penalty, scaled by a bound of the curvature. Used by ``solver="dbpg"``.

    A row is a pair: a weight and the gradient of its last step, so the table's dim is 2. A push brings pairs too,
    ``(g, u)``; those of several workers add up, then
    ``v = w - lr * g / u; w = sgn(v) * max(|v| - lr * l1 / u, 0)`` (Li et al., OSDI'14). Rows with ``u <= 0`` stay.

    Parameters
    ----------
    lr : float
        Share of the step that the bound allows, at most 1.
    l1 : float
        Strength of the penalty ``l1 * sum(|w|)``.
    """

    lr: float = field(default=1.0, kw_only=False)
    l1: float = 1.0

    @property
    def has_rate(self) -> bool:
        """Whether there is a learning rate that may change: the state of a row depends on it."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Add(Optimizer):
    """Counters: a push adds to the row. For tables of ``dtype="int64"``, and their only rule.

    ``n += amount``, modulo 2^64 in two's complement: sums that leave the range of int64 wrap around, so that neither
    the order nor the grouping of additions matters. It takes no clipping and no schedule.

    Examples
    --------
    >>> import numpy as np
    >>> import shoal
    >>> with shoal.local() as store:
    ...     clicks = store.table("clicks", dtype="int64")
    ...     clicks.push(np.array([7, 9, 7]), np.array([1, 1, 2])).result()
    ...     clicks.optimizer, clicks.pull(np.array([7, 8, 9])).ravel().tolist()
    (Add(), [3, 0, 1])
    """


@dataclass(frozen=True, slots=True)
class Init:
    """Initial rows: a pure function of (seed, key, element), so a pull of an unseen key returns its initial row."""

    parameter_name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        make_plain(self)
        _core.check_init(type(self).__name__, self.parameter)

    @property
    def parameter(self) -> float:
        """The parameter of the initializer, 0 if it has none."""
        return _number(self, self.parameter_name, getattr(self, self.parameter_name)) if self.parameter_name else 0.0

    @property
    def init_seed(self) -> int:
        """The seed, 0 if there is none."""
        seed = getattr(self, "seed", 0)
        if not 0 <= seed < 2**64:
            raise ValueError(f"{type(self).__name__} needs a seed from 0 to 2**64 - 1, got {seed!r}")
        return seed


@dataclass(frozen=True, slots=True)
class Zeros(Init):
    """All weights start at 0."""


@dataclass(frozen=True, slots=True)
class Constant(Init):
    """All weights start at ``value``."""

    value: float
    parameter_name: ClassVar[str] = "value"


@dataclass(frozen=True, slots=True)
class Uniform(Init):
    """Weights start uniformly on ``[-scale, scale)``.

    Parameters
    ----------
    scale : float
        Half the width, at least 0.
    seed : int
        Tables with the same seed give a key the same row.
    """

    scale: float
    seed: int = field(default=0, kw_only=True)
    parameter_name: ClassVar[str] = "scale"


@dataclass(frozen=True, slots=True)
class Normal(Init):
    """Weights start normally distributed around 0.

    Parameters
    ----------
    std : float
        Standard deviation, at least 0.
    seed : int
        Tables with the same seed give a key the same row.
    """

    std: float
    seed: int = field(default=0, kw_only=True)
    parameter_name: ClassVar[str] = "std"


_FLAGS = {"nesterov", "decoupled", "per_row_step"}


def make_optimizer(name: str, params: dict[str, float]) -> Optimizer:
    """Rebuild an optimizer from the name of its class and its :meth:`Optimizer.params`.

    Raises
    ------
    ValueError, TypeError
        This version does not support the optimizer.
    """
    kind = _described(name, Optimizer)
    if kind is None:
        raise ValueError(f"no optimizer {name!r}")
    scheduled = {key: value for key, value in params.items() if key.startswith("schedule")}
    values: dict[str, Any] = {
        key: bool(value) if key in _FLAGS else value for key, value in params.items() if key not in scheduled
    }
    return kind(**values, schedule=make_schedule(scheduled) if scheduled else None)


def make_init(name: str, parameter: float, seed: int) -> Init:
    """Rebuild an initializer from the name of its class, its :attr:`Init.parameter` and its :attr:`Init.init_seed`.

    Raises
    ------
    ValueError, TypeError
        This version does not support the initializer.
    """
    kind = _described(name, Init)
    if kind is None:
        raise ValueError(f"no initializer {name!r}")
    values: dict[str, Any] = {kind.parameter_name: parameter} if kind.parameter_name else {}
    if "seed" in kind.__dataclass_fields__:
        values["seed"] = seed
    return kind(**values)


Described = TypeVar("Described")


def _described(name: str, base: type[Described]) -> type[Described] | None:
    kind = globals().get(name) if name in __all__ else None
    return kind if isinstance(kind, type) and issubclass(kind, base) and kind is not base else None
