"""One drawn population, solved by every ridge rule in fp64 and by the paper's rule in the authors' precision."""

import numpy as np
import torch

from scaleop.ridge import GRID, RIDGE, RULES, clamp_rows, strength
from scaleop.sampling import Moments, Population
from scaleop.tridiagonal import Tridiagonal

SINGLE = "mean_diagonal, fp32"  # what the paper's rule is called in the authors' precision, beside the rules in ours
BATCH = 2_048  # positions whose moments the authors form and add at a time: 16 sequences of 128
HELD_OUT = 1_024  # further positions for the rule `holdout` to err on


def accumulated(total: np.ndarray, batches: int, rng: np.random.Generator) -> torch.Tensor:
    """fp32 `total` as a running fp32 sum of that many batches ends up, each holding about its share of it.

    This is where an fp32 moment matrix loses its digits: the sum inside a batch is as precise, but of smaller numbers.
    """
    running, whole = torch.zeros(total.shape), torch.from_numpy(total)
    for share in rng.dirichlet(np.full(batches, float(BATCH))):
        running.add_(whole, alpha=share)
    return running


def solve_single(moments: Moments, mean: int, batches: int, rng: np.random.Generator) -> np.ndarray:
    """(r, k) M' as the authors get it: moments summed in fp32, ridge and LU solve in fp32. `mean` as for `Fits`."""
    square, cross = (accumulated(total, batches, rng) for total in moments.single(mean))
    square.diagonal().add_(RIDGE * square.diagonal().mean())
    return torch.linalg.solve(square, cross.T).T.double().numpy()


class Fits:
    """Every rule's M' for one drawn population, from one reduction; `mean` 1 solves with the moments about zero, as
    the paper does, and 0 with those about the mean."""

    def __init__(self, population: Population, moments: Moments, rng: np.random.Generator) -> None:
        self.reduced = Tridiagonal(moments.square, moments.mean)
        self.population, self.moments = population, moments
        self.held = population.positions(HELD_OUT, rng) - population.mean
        rows = np.vstack([moments.cross, moments.mean, population.mean[population.kept],
                          self.held[:, population.kept]])
        self.cross, sample, true, self.inputs = np.split(
            self.reduced.into(rows), np.cumsum([len(moments.cross), 1, 1]))
        self.sample, self.true = sample[0], true[0]

    def solve(self, ridge: float, mean: int) -> np.ndarray:
        """(r, k) M' in the reduction's coordinates."""
        return self.reduced.solve(self.cross + mean * np.outer(self.moments.output, self.sample), ridge, mean)

    def held_out(self, mean: int, average: float) -> float:
        """The rule `holdout` (`ridge.holdout_errors` has it with an eigendecomposition): lambda of the grid with the
        least error on further positions."""
        outputs = (self.held + mean * self.population.mean) @ self.population.matrix.T
        inputs = self.inputs + mean * self.true
        errors = [np.square(outputs - inputs @ self.solve(multiple * average, mean).T).sum()
                  for multiple in GRID.tolist()]
        return GRID[int(np.argmin(errors))].item() * average

    def by_rule(self, mean: int) -> tuple[np.ndarray, dict[str, tuple[float, np.ndarray]]]:
        """(k,) eigenvalues of the undamped moments, and {rule: (lambda, M' (r, k) in the inputs' own coordinates)}."""
        eigenvalues = self.reduced.eigenvalues(mean)
        matrix, kept = torch.from_numpy(self.population.matrix), torch.from_numpy(self.population.kept)
        ridges, fits = {}, {}
        for rule in RULES:
            if rule == "holdout":
                ridges[rule] = self.held_out(mean, eigenvalues.mean())
            else:
                ridges[rule] = strength(rule, torch.from_numpy(eigenvalues), matrix, kept)
            fits[rule] = self.solve(ridges[rule], mean)
        fits["clamp"] = clamp_rows(torch.from_numpy(fits["clamp"]), matrix).numpy()
        rows = np.split(self.reduced.back(np.vstack(list(fits.values()))), len(fits))  # together: cheaper by half
        return eigenvalues, {rule: (ridges[rule], mine) for rule, mine in zip(fits, rows, strict=True)}
