"""Least squares from Gram matrices: y from x over many positions, of which only sums of products are ever kept.

A batch of positions joins one fp64 matrix and is dropped, so memory is (1 + k + m)^2 numbers for k features and m
targets, whatever the number of positions. The last fifth of the sequences is summed apart: every fit says how well its
like, fitted on the first four fifths alone, does on positions it has not seen.
"""

import math
from dataclasses import dataclass

import torch

from scaleop.donor import held_out_from
from scaleop.ridge import HeldOut, effective_rank, strength

TIED_RIDGE = 1e-6  # of `gains`, times each coordinate's own diagonal: there are k unknowns only, so none overfits


@dataclass(frozen=True)
class Regression:
    """Diagnostics of one fit; names as those of `shrink.Solve` where they mean the same."""

    rule: str | float  # how lambda was chosen
    ridge: float  # lambda itself
    condition: float  # of the features' moments + lambda I
    effective_rank: float  # of the features' moments
    norm_ratio: float  # Frobenius norm of the fitted matrix over that of the one it replaces
    r2: float | None  # on the held-out sequences, of the fit to the others; None where none were held out
    positions: int  # that the fit is made on, held-out ones among them


@dataclass(frozen=True)
class Fit:
    """y ~ matrix x + intercept: (m, k) and (m,) fp64, with what `Gram.fit` found on the way."""

    matrix: torch.Tensor
    intercept: torch.Tensor
    ridge: float
    condition: float
    effective_rank: float

    def residual(self) -> torch.Tensor:
        """(m, 1 + k + m): what takes [1, x, y] to the error of the fit."""
        return torch.cat([-self.intercept[:, None], -self.matrix, torch.eye(len(self.matrix))], dim=1)


def energy(rows: torch.Tensor, moments: torch.Tensor) -> float:
    """Sum over positions of |rows z|^2, from the `moments` sum of z z'. rows: (r, n); moments: (n, n)."""
    return ((rows.T @ rows) * moments).sum().item()


def centred(moments: torch.Tensor) -> torch.Tensor:
    """Sums over [1, z] (1 + n, 1 + n) -> those of z about its mean (n, n): a regression with a free intercept."""
    return moments[1:, 1:] - torch.outer(moments[1:, 0], moments[0, 1:]) / moments[0, 0]


class Gram:
    """Sums of [1, x, y] [1, x, y]' over positions, those of the held-out sequences apart; fp64, on the CPU.

    `features` k and `targets` m are the lengths of x and y; `sequences` how many there will be in all.
    """

    def __init__(self, features: int, targets: int, sequences: int) -> None:
        self.features, self.cut = features, held_out_from(sequences)
        self.early, self.late = (torch.zeros(1 + features + targets, 1 + features + targets, dtype=torch.float64)
                                 for _ in range(2))
        self._fits: dict[tuple[str | float, bool, bool], Fit] = {}

    def add(self, first: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Count in a batch of sequences, the first of which is number `first`: (sequences, length, k) and (..., m)."""
        z = torch.cat([torch.ones_like(x[..., :1]), x, y], dim=-1)
        early = min(max(self.cut - first, 0), len(z))
        for total, part in ((self.early, z[:early]), (self.late, z[early:])):
            rows = part.flatten(0, -2).double()
            total.add_((rows.T @ rows).to(total.device))

    @property
    def total(self) -> torch.Tensor:
        """Sums over all sequences."""
        return self.early + self.late

    def fit(self, rule: str | float, intercept: bool, early: bool = False) -> Fit:
        """The ridge regression of y on x over all positions (`early`: over those not held out), lambda by one of
        `ridge.RULES` or so many times the mean diagonal; an intercept is free of it. Call it when all is added.

        By one eigendecomposition, without the directions of which rounding leaves nothing: with fewer positions than
        features the fit is the regularised one, or that of least norm. Raises FloatingPointError for sums that are not
        finite and ValueError for features that are all zero.
        """
        if (rule, intercept, early) not in self._fits:
            self._fits[rule, intercept, early] = self._fit(rule, intercept, self.early if early else self.total)
        return self._fits[rule, intercept, early]

    def _fit(self, rule: str | float, intercept: bool, moments: torch.Tensor) -> Fit:
        if not math.isfinite(moments.sum().item()):
            raise FloatingPointError("activations are not finite")
        k = self.features
        both = centred(moments) if intercept else moments[1:, 1:]
        values, vectors = torch.linalg.eigh(both[:k, :k])
        if values[-1] <= 0:
            raise ValueError("all features are zero" if not intercept else "no feature varies")
        values, pick = values.clamp(min=0), torch.eye(len(both), dtype=torch.float64)[k:]
        held = HeldOut(*(self._columns(part, intercept) for part in (self.early, self.late))) \
            if rule == "holdout" and self.late[0, 0] > 0 else None
        damping = strength(rule, values, pick, torch.arange(k), held)
        floor = k * torch.finfo(torch.float64).eps * values[-1].item()
        inverse = torch.where(values > floor, 1 / (values.clamp(min=floor) + damping), 0.0)
        matrix = both[k:, :k] @ vectors * inverse @ vectors.T
        means = moments[0, 1:] / moments[0, 0]
        offset = means[k:] - matrix @ means[:k] if intercept else torch.zeros(len(matrix), dtype=torch.float64)
        condition = (values[-1].item() + damping) / (max(values[0].item(), floor) + damping)
        return Fit(matrix, offset, damping, condition, effective_rank(values))

    def _columns(self, moments: torch.Tensor, intercept: bool) -> torch.Tensor:
        return (centred(moments) if intercept else moments[1:, 1:])[:, : self.features]

    def r2(self, rule: str | float, intercept: bool, weight: torch.Tensor | None = None) -> float | None:
        """Held-out 1 - |weight (y - fitted)|^2 / |weight (y - mean y)|^2 of the fit to the other sequences; `weight`
        (r, m) reads y, by default as it is. None where no sequence is held out, where y does not vary there, and for
        the rule `holdout`, which has chosen lambda on those sequences."""
        if rule == "holdout" or self.late[0, 0] == 0 or self.early[0, 0] == 0:
            return None
        rows = self.fit(rule, intercept, early=True).residual()
        spread = centred(self.late)[self.features :, self.features :]
        if weight is None:
            weight = torch.eye(len(spread), dtype=torch.float64)
        whole = energy(weight, spread)
        return 1 - energy(weight @ rows, self.late) / whole if whole > 0 else None


def gains(gram: Gram, small: torch.Tensor, large: torch.Tensor, bias: bool) -> tuple[Fit, float | None]:
    """The final norm of a model whose head is its embedding: no matrix is free behind the last block, only a gain a
    coordinate (and a bias), so that small (gain x + bias) comes closest to the logits large y, over all tokens of the
    vocabulary and all positions, up to what softmax does not see (one number for all logits of a position).

    `gram`: of the small model's final stream, normed without gain or bias, and the donor's final normed stream;
    small: (vocab, k), large: (vocab, d) embeddings. Least squares in k unknowns, whose normal equations are the
    Hadamard product of two Gram matrices: the embeddings' and the stream's. Returns a diagonal Fit whose `intercept` is
    that bias, and the held-out R^2 of the logits.
    """
    k, tokens = gram.features, torch.cat([small, large], dim=1).double()
    tokens = tokens - tokens.mean(dim=0)
    metric = tokens.T @ tokens  # (k + d, k + d)

    def solved(moments: torch.Tensor) -> tuple[Fit, torch.Tensor]:
        both = centred(moments) if bias else moments[1:, 1:]
        normal, right = metric[:k, :k] * both[:k, :k], (metric[:k, k:] * both[:k, k:]).sum(dim=1)
        scale = normal.diagonal().clamp(min=torch.finfo(torch.float64).tiny).sqrt()  # every coordinate counts alike
        unit = normal / torch.outer(scale, scale)
        damped = unit + TIED_RIDGE * torch.eye(k, dtype=torch.float64)
        gain = torch.linalg.solve(damped, right / scale) / scale
        offset = torch.zeros(k, dtype=torch.float64)
        if bias:
            means = moments[0, 1:] / moments[0, 0]
            offset = torch.linalg.lstsq(metric[:k, :k], metric[:k, k:] @ means[k:]).solution - gain * means[:k]
        values = torch.linalg.eigvalsh(unit)
        fit = Fit(gain.diag(), offset, TIED_RIDGE, ((values[-1] + TIED_RIDGE) / (values[0].clamp(min=0) + TIED_RIDGE)
                                                    ).item(), effective_rank(values))
        into = torch.zeros(len(metric), 1 + len(metric), dtype=torch.float64)  # [1, x, y] -> what the embeddings read
        into[:k, 0], into[:k, 1 : 1 + k] = -offset, -gain.diag()
        into[k:, 1 + k :] = torch.eye(len(metric) - k)
        return fit, into

    fit, _ = solved(gram.total)
    if gram.late[0, 0] == 0 or gram.early[0, 0] == 0:
        return fit, None
    _, into = solved(gram.early)
    spread = (metric[k:, k:] * centred(gram.late)[k:, k:]).sum()
    return fit, 1 - ((into.T @ metric @ into) * gram.late).sum().div(spread).item()
