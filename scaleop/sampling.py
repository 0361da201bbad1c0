"""Second moments of a wide read-out's inputs, drawn at their true width without drawing the inputs (section 7.6).

The inputs are Gaussian: x = mu + F diag(sqrt(d)) z, F the orthonormal DCT, d a power law in random order, of which a
random half K is kept. Random rows of such a transform mix the spectrum as random directions would, and it multiplies
in n log n. The moments of N positions are then a Wishart matrix, and Bartlett's decomposition draws one from a
triangle of independent numbers: at 8,192 kept inputs and 128,000 positions a tenth of the arithmetic, and 34 million
draws instead of 2 billion.
"""

from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.fft import dct, idct
from scipy.linalg import blas, cholesky, lapack, solve_triangular

CHUNK = 1024  # columns of Sigma[K, K] made at a time


def power_law(n: int, exponent: float) -> np.ndarray:
    """(n,) eigenvalues proportional to rank^-exponent, with mean 1."""
    spectrum = np.arange(1, n + 1, dtype=float) ** -exponent
    return spectrum / spectrum.mean()


class Population:
    """Inputs with known moments, and a read-out M (rows, n) of independent N(0, 1) weights that reads them.

    `exponent` of the power law of n = 2 `width` eigenvalues of the covariance, whose mean is 1. `mean_share`: the
    share of the mean mu, in a random direction, of the energy E|x|^2 (0 up to, without, 1). fp64 throughout.
    """

    def __init__(self, width: int, exponent: float, mean_share: float = 0.0, rows: int = 64, seed: int = 0) -> None:
        if not 0 <= mean_share < 1:
            raise ValueError(f"mean_share = {mean_share} of the energy must lie in [0, 1)")
        rng = np.random.default_rng([seed, width])
        n = 2 * width
        self.spectrum = rng.permutation(power_law(n, exponent))  # (n,)
        self.kept = np.sort(rng.permutation(n)[:width])  # (k,)
        self.matrix = rng.standard_normal((rows, n))
        direction = rng.standard_normal(n)
        self.mean = direction / np.linalg.norm(direction) * np.sqrt(n * mean_share / (1 - mean_share))  # (n,)
        self.energy = n / (1 - mean_share)  # E|x|^2

    def without_mean(self) -> "Population":
        """The same inputs less their mean (what has been computed of the covariance is shared)."""
        other = copy(self)
        other.mean, other.energy = np.zeros_like(self.mean), float(len(self.mean))
        return other

    def times_covariance(self, rows: np.ndarray) -> np.ndarray:
        """(r, n) rows times the covariance F diag(d) F'."""
        return idct(dct(rows, norm="ortho") * self.spectrum, norm="ortho")

    def square(self) -> np.ndarray:
        """(k, k) covariance of the kept inputs, made some columns at a time."""
        k, n = len(self.kept), len(self.spectrum)
        square = np.empty((k, k), order="F")
        for start in range(0, k, CHUNK):
            units = np.zeros((min(CHUNK, k - start), n))
            units[np.arange(len(units)), self.kept[start : start + CHUNK]] = 1
            square[:, start : start + CHUNK] = self.times_covariance(units)[:, self.kept].T
        return square

    @cached_property
    def factor(self) -> np.ndarray:
        """(k, k) lower Cholesky factor of `square`, which is not kept."""
        return cholesky(self.square(), lower=True, overwrite_a=True, check_finite=False)

    def solve(self, rows: np.ndarray) -> np.ndarray:
        """(r, k) rows times the inverse of `square`."""
        half = solve_triangular(self.factor, rows.T, lower=True, check_finite=False)
        return solve_triangular(self.factor, half, lower=True, trans=1, check_finite=False).T

    @cached_property
    def regression(self) -> tuple[np.ndarray, np.ndarray]:
        """What Mx - M mu is, given the kept inputs: B (r, k) times x_K - mu_K, plus noise of covariance S (r, r)."""
        cross = self.times_covariance(self.matrix)
        slopes = self.solve(cross[:, self.kept])
        return slopes, cross @ self.matrix.T - cross[:, self.kept] @ slopes.T

    def error(self, fitted: np.ndarray) -> float:
        """E|Mx - M'x_K|^2 over r E|x|^2, exactly: the held-out error of M' (r, k), relative to what a read-out of
        independent weights puts out on average."""
        off = self.matrix.copy()
        off[:, self.kept] -= fitted
        energy = (dct(off, norm="ortho") ** 2 @ self.spectrum).sum() + np.square(off @ self.mean).sum()
        return float(energy / (len(off) * self.energy))

    def selection_error(self) -> float:
        """The same for plain selection M' = M[:, K], averaged over all read-outs: the share of the dropped inputs."""
        kept = np.linalg.norm(self.factor) ** 2 + np.square(self.mean[self.kept]).sum()  # the norm's: the trace
        return float(1 - kept / self.energy)

    def optimum(self) -> np.ndarray:
        """(r, k) the M' of least error: Eq. 3 with the true moments (about zero, not the mean) and no ridge."""
        slopes, _ = self.regression
        pull = self.solve(self.mean[None, self.kept])[0]
        left = self.matrix @ self.mean - slopes @ self.mean[self.kept]  # of the mean, unpredicted
        return slopes + np.outer(left, pull) / (1 + pull @ self.mean[self.kept])

    def positions(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """(count, n) inputs, drawn one by one."""
        scaled = rng.standard_normal((count, len(self.spectrum))) * np.sqrt(self.spectrum)
        return self.mean + idct(scaled, norm="ortho")


@dataclass(frozen=True)
class Moments:
    """Means over N positions of x_K x_K' (k, k) and of Mx x_K' (r, k), both about the sample's own mean; `mean` (k,)
    and `output` (r,) are those means. About zero the moments are square + mean mean' and cross + output mean'."""

    square: np.ndarray
    cross: np.ndarray
    mean: np.ndarray
    output: np.ndarray

    def single(self, share: int) -> tuple[np.ndarray, np.ndarray]:
        """`square` and `cross` plus `share` times the means' part, each number rounded to fp32 once."""
        square = np.empty(self.square.shape, np.float32)
        for start in range(0, len(square), CHUNK):  # the fp64 sum would take more memory than all the rest
            rows = slice(start, start + CHUNK)
            square[rows] = self.square[rows] + share * np.outer(self.mean[rows], self.mean)
        return square, (self.cross + share * np.outer(self.output, self.mean)).astype(np.float32)


def bartlett(size: int, degrees: int, rng: np.random.Generator, dtype: type = np.float64) -> np.ndarray:
    """Lower triangular A (size, size) with A A' a Wishart matrix of identity covariance and that many degrees of
    freedom: N(0, 1) below the diagonal, chi of degrees, degrees - 1, ... on it. Raises ValueError for degrees < size.
    """
    if degrees < size:
        raise ValueError(f"{degrees} positions cannot fill moments of {size} inputs: draw at least {size + 1}")
    lower = np.zeros((size, size), dtype=dtype, order="F")
    for column in range(size):
        lower[column + 1 :, column] = rng.standard_normal(size - column - 1, dtype=dtype)
    np.fill_diagonal(lower, np.sqrt(rng.chisquare(degrees - np.arange(size))))
    return lower


def draw(population: Population, positions: int, rng: np.random.Generator) -> Moments:
    """The moments of that many positions, as if they had been drawn one by one.

    The sample's mean is independent of its moments about the mean, which are Wishart with N - 1 degrees of freedom:
    C C' with C = L A. Given the kept inputs the outputs are regression plus noise, whose moments with them are
    S^1/2 G C', G independent N(0, 1). L A is formed in fp32: an error of 6e-8 in the *factor* changes an eigenvalue a
    thousandth of the mean by about 4e-6 of itself, far below its sampling error. C C' is formed in fp64.
    """
    k, n = len(population.kept), positions
    slopes, noise = population.regression
    noise = cholesky(noise, lower=True)
    triangle = bartlett(k, n - 1, rng, np.float32)
    factor = blas.strmm(1.0, population.factor.astype(np.float32, order="F"), triangle, lower=1, overwrite_b=1)
    factor = factor.astype(np.float64, order="F") / np.sqrt(n)  # C
    mixed = noise @ rng.standard_normal((len(noise), k)) / np.sqrt(n) @ factor.T  # of outputs' noise with inputs
    square = gram(factor)
    mean = population.factor @ rng.standard_normal(k) / np.sqrt(n)  # about the true mean
    output = (population.matrix @ population.mean + slopes @ mean
              + noise @ rng.standard_normal(len(noise)) / np.sqrt(n))
    return Moments(square, slopes @ square + mixed, mean + population.mean[population.kept], output)


def gram(factor: np.ndarray) -> np.ndarray:
    """C C' of a lower triangular C, in a sixth of the operations of a full product. LAPACK's routine is for upper
    triangles, so rows and columns are taken in reverse. `factor` is left as it is."""
    square, _ = lapack.dlauum(np.asfortranarray(factor[::-1, ::-1]), lower=0, overwrite_c=1)
    for column in range(len(square)):
        square[column + 1 :, column] = square[column, column + 1 :]
    return np.asfortranarray(square[::-1, ::-1])
