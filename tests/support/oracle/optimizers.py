"""The update rules in plain float64, one class each, element by element as the papers print them.

A state is a dict of float64 arrays whose last axis is the row (``[dim]``, or ``[rows, dim]`` for many rows at
once; a number per row has a last axis of 1). ``start`` makes it from initial weights, ``step`` returns the next
one and never changes its argument, ``weights`` reads the weights out of it.

``push`` is what a table does with a row's summed gradient: a gradient of zeros changes nothing, a gradient that is
not finite changes nothing, clipping comes before the rule.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

State = dict[str, np.ndarray]


def norm(x: np.ndarray) -> np.ndarray:
    """Euclidean length of each row, kept as a column."""
    return np.sqrt(np.sum(x * x, axis=-1, keepdims=True))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What all rules share: clipping of the row's summed gradient, first by value, then by norm."""

    clip_value: float | None = None
    clip_norm: float | None = None

    def clipped(self, g: np.ndarray) -> np.ndarray:
        if self.clip_value is not None:
            g = np.clip(g, -self.clip_value, self.clip_value)
        if self.clip_norm is not None:
            length = norm(g)
            g = np.where(length > self.clip_norm, g * (self.clip_norm / np.where(length > 0, length, 1)), g)
        return g

    def push(self, state: State, g: np.ndarray, t: int) -> State:
        """Apply one row's summed gradient as push number ``t``, counted from 1."""
        g = np.asarray(g, np.float64)
        if not np.any(g) or not np.all(np.isfinite(g)):
            return state
        return self.step(state, self.clipped(g), t)

    def start(self, w0: np.ndarray) -> State:
        raise NotImplementedError

    def step(self, state: State, g: np.ndarray, t: int) -> State:
        raise NotImplementedError

    def weights(self, state: State) -> np.ndarray:
        return state["w"]

    def assigned(self, state: State, w: np.ndarray) -> State:
        """Return the state whose weights are ``w``; whatever else there is stays."""
        return state | {"w": np.array(w, np.float64)}


class Run:
    """Many steps of one rule, and how far a float32 twin may have strayed from it after them.

    The bound is 8u sqrt(T) S, u = 2^-24, T steps, with S the size of what was added up:
    n for n, |z| + l1 + sqrt(n) for z, that over the denominator for the weights derived from it, and
    |w0| + sum |step| for weights that are stored. Running means (Momentum's v, Adam's m and v) have the running mean
    of absolute values for S. Where weight decay and gradient cancel, their rounding errors do not: a step then counts
    for as much as its two parts.
    """

    def __init__(self, rule: Rule, w0: np.ndarray):
        self.rule = rule
        self.state = rule.start(w0)
        self.steps = 0
        self.path = np.abs(rule.weights(self.state))
        self.squares = self.state.get("n", np.zeros_like(self.path))
        self.mean = np.zeros_like(self.path)

    def push(self, g: np.ndarray) -> None:
        """Step every row by its own gradient (none of them all zeros)."""
        g = self.rule.clipped(np.asarray(g, np.float64))
        before = self.rule.weights(self.state)
        self.steps += 1
        self.state = self.rule.step(self.state, g, self.steps)
        decay = getattr(self.rule, "weight_decay", 0.0)
        coupled = 0.0 if isinstance(self.rule, AdamW) or getattr(self.rule, "decoupled", False) else decay
        slope, size = np.abs(g + coupled * before), np.abs(g) + coupled * np.abs(before)
        step = np.abs(self.rule.weights(self.state) - before)
        self.path = self.path + step * np.maximum(divided(size, slope), 1) + decay * np.abs(before)
        self.squares = self.squares + slope * size
        if isinstance(self.rule, Momentum):
            self.mean = self.rule.mu * self.mean + size
        elif isinstance(self.rule, Adam):
            self.mean = np.maximum(self.mean, size)

    @property
    def weights(self) -> np.ndarray:
        return self.rule.weights(self.state)

    def sizes(self) -> dict[str, np.ndarray]:
        """S for every column of the state, and for the weights as ``w``."""
        state = self.state
        if isinstance(self.rule, FTRL):
            z = np.abs(state["z"]) + self.rule.l1 + np.sqrt(state["n"])
            return {"z": z, "n": state["n"], "w": z / self.rule.denominator(state["n"])}
        sizes = {"w": self.path, "t": np.zeros(1)}
        if isinstance(self.rule, Momentum):
            return sizes | {"v": self.mean}
        if isinstance(self.rule, Adam):
            return sizes | {"m": self.mean, "v": self.mean**2}
        return sizes | {"n": self.squares, "m": np.mean(self.squares, axis=-1, keepdims=True)}

    def bounds(self) -> dict[str, np.ndarray]:
        return {name: 8 * 2.0**-24 * np.sqrt(self.steps) * size for name, size in self.sizes().items()}


@dataclass(frozen=True, kw_only=True)
class SGD(Rule):
    lr: float = 0.01
    weight_decay: float = 0.0

    def start(self, w0):
        return {"w": np.array(w0, np.float64)}

    def step(self, state, g, t):
        w = state["w"]
        return {"w": w - self.lr * (g + self.weight_decay * w)}


@dataclass(frozen=True, kw_only=True)
class Momentum(Rule):
    lr: float = 0.01
    mu: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0

    def start(self, w0):
        w = np.array(w0, np.float64)
        return {"w": w, "v": np.zeros_like(w)}

    def step(self, state, g, t):
        w, v = state["w"], state["v"]
        g = g + self.weight_decay * w
        v = self.mu * v + g
        return {"w": w - self.lr * (g + self.mu * v if self.nesterov else v), "v": v}


@dataclass(frozen=True, kw_only=True)
class Adagrad(Rule):
    """Duchi, Hazan, Singer, JMLR 2011, as torch, TF ApplyAdagradV2 and FBGEMM have it: eps outside the root."""

    lr: float = 0.01
    eps: float = 1e-10
    n0: float = 0.0
    weight_decay: float = 0.0

    def start(self, w0):
        w = np.array(w0, np.float64)
        return {"w": w, "n": np.full_like(w, self.n0)}

    def step(self, state, g, t):
        w, n = state["w"], state["n"]
        g = g + self.weight_decay * w
        n = n + g * g
        return {"w": w - self.lr * divided(g, np.sqrt(n) + self.eps), "n": n}


@dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad(Rule):
    """FBGEMM EXACT_ROWWISE_ADAGRAD: one accumulator a row, of the mean square."""

    lr: float = 0.01
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def start(self, w0):
        w = np.array(w0, np.float64)
        return {"w": w, "m": np.zeros((*w.shape[:-1], 1))}

    def step(self, state, g, t):
        w = state["w"]
        h = g if self.decoupled else g + self.weight_decay * w
        m = state["m"] + np.mean(h * h, axis=-1, keepdims=True)
        k = divided(self.lr, np.sqrt(m) + self.eps)
        c = 1 - (self.lr if self.decoupled else k) * self.weight_decay
        return {"w": c * w - k * g, "m": m}


@dataclass(frozen=True, kw_only=True)
class FTRL(Rule):
    """McMahan et al., KDD'13, Algorithm 1. The row is z and n; weights are derived."""

    alpha: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    n0: float = 0.0

    def denominator(self, n):
        return (self.beta + np.sqrt(n)) / self.alpha + self.l2

    def start(self, w0):
        w = np.array(w0, np.float64)
        return self.assigned({"n": np.full_like(w, self.n0)}, w)

    def assigned(self, state, w):
        w = np.array(w, np.float64)
        return state | {"z": -w * self.denominator(state["n"]) - np.sign(w) * self.l1}

    def weights(self, state):
        z, n = state["z"], state["n"]
        w = -divided(z - np.sign(z) * self.l1, self.denominator(n))
        return np.where((np.abs(z) <= self.l1) | (self.denominator(n) == 0), 0.0, w)

    def step(self, state, g, t):
        z, n = state["z"], state["n"]
        w = self.weights(state)
        grown = n + g * g
        sigma = (np.sqrt(grown) - np.sqrt(n)) / self.alpha
        return {"z": z + g - sigma * w, "n": grown}


@dataclass(frozen=True, kw_only=True)
class GroupFTRL(FTRL):
    """Sparse group lasso: Yue et al., 2021, as in tfplus. The row's weights are zero together or not."""

    l21: float = 0.0

    def assigned(self, state, w):
        w = np.array(w, np.float64)
        pull = w * self.denominator(state["n"])
        # What weights() shrinks by the group's threshold must be that much longer.
        s = pull * (1 + divided(self.l21 * np.sqrt(w.shape[-1]), norm(pull)))
        return state | {"z": -s - np.sign(w) * self.l1}

    def weights(self, state):
        z, n = state["z"], state["n"]
        s = np.clip(z, -self.l1, self.l1) - z
        length = norm(s)
        t = self.l21 * np.sqrt(s.shape[-1])
        w = divided(s * (1 - divided(t, length)), self.denominator(n))
        return np.where((length <= t) | (s == 0) | (self.denominator(n) == 0), 0.0, w)


@dataclass(frozen=True, kw_only=True)
class Adam(Rule):
    """Kingma and Ba, ICLR'15, in the lazy form of torch SparseAdam and TF; ``t`` is the table's push number."""

    lr: float = 0.001
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    per_row_step: bool = False

    def start(self, w0):
        w = np.array(w0, np.float64)
        state = {"w": w, "m": np.zeros_like(w), "v": np.zeros_like(w)}
        if self.per_row_step:
            state["t"] = np.zeros((*w.shape[:-1], 1))
        return state

    def step(self, state, g, t):
        return self.moved(state, state["w"], g + self.weight_decay * state["w"], t)

    def moved(self, state, w, g, t):
        following = {}
        if self.per_row_step:
            t = following["t"] = state["t"] + 1
        m = state["m"] + (1 - self.b1) * (g - state["m"])
        v = state["v"] + (1 - self.b2) * (g * g - state["v"])
        rate = self.lr * np.sqrt(1 - self.b2**t) / (1 - self.b1**t)
        return {"w": w - rate * divided(m, np.sqrt(v) + self.eps), "m": m, "v": v} | following


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Loshchilov and Hutter, ICLR'19, on touched rows only: decay first, then Adam."""

    def step(self, state, g, t):
        return self.moved(state, (1 - self.lr * self.weight_decay) * state["w"], g, t)


@dataclass(frozen=True, kw_only=True)
class Proximal(Rule):
    """Li et al., OSDI'14, section 6 of the numerics: rows are (weight, last gradient), gradients are (g, u)."""

    lr: float = 1.0
    l1: float = 1.0

    def start(self, w0):
        return {"w": np.array(w0, np.float64)}

    def step(self, state, g, t):
        w, slope, curvature = state["w"][..., 0], g[..., 0], g[..., 1]
        v = w - self.lr * divided(slope, curvature)
        near = np.sign(v) * np.maximum(np.abs(v) - self.lr * divided(self.l1, curvature), 0)
        moved = np.stack([near, slope], axis=-1)
        return {"w": np.where(curvature[..., None] > 0, moved, state["w"])}


def divided(a, b):
    """``a / b``, and 0 where b is 0."""
    a, b = np.broadcast_arrays(np.asarray(a, np.float64), np.asarray(b, np.float64))
    return np.divide(a, b, out=np.zeros(a.shape), where=b != 0)


RULES = {
    rule.__name__: rule for rule in (SGD, Momentum, Adagrad, RowWiseAdagrad, FTRL, GroupFTRL, Adam, AdamW, Proximal)
}


def rule_of(optimizer) -> Rule:
    """Return the oracle of a description: the class of the same name with the same parameters."""
    rule = RULES[type(optimizer).__name__]
    known = {field.name for field in fields(rule)}
    return rule(**{f.name: getattr(optimizer, f.name) for f in fields(optimizer) if f.name in known})
