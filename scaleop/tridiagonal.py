"""Ridge solves at any number of strengths from one reduction of the moments to tridiagonal form.

An eigendecomposition gives them too, but at 8,192 inputs costs ten times the reduction (it makes the eigenvectors),
and a solve with a tridiagonal matrix is as cheap as one with a diagonal.
"""

import numpy as np
from scipy.linalg import blas, eigvalsh_tridiagonal, lapack


class Tridiagonal:
    """Symmetric (k, k) `square` as Q T Q', with `first` (k,) along Q's first column.

    Adding any multiple of first first' then changes one entry of T: the moments about zero and about the mean share
    one reduction. fp64; `square` is not kept. Costs 4/3 k^3 operations, half of them bound by memory.
    """

    def __init__(self, square: np.ndarray, first: np.ndarray) -> None:
        self.length = float(np.linalg.norm(first))
        self.mirror = first / (self.length or 1.0)  # Householder vector: swaps first's direction and -/+ e1
        self.sign = -1.0 if self.mirror[0] >= 0 else 1.0
        self.mirror[0] -= self.sign
        self.mirror *= np.sqrt(2) / (np.linalg.norm(self.mirror) or 1.0)
        turned = square @ self.mirror
        other = turned - (self.mirror @ turned) / 2 * self.mirror
        turned = blas.dsyr2(-1.0, self.mirror, other, a=square, lower=1)  # the lower triangle is all that is read
        size = int(lapack.dsytrd_lwork(len(square), lower=1)[0])
        reflectors, self.diagonal, self.beside, self.scales, _ = lapack.dsytrd(turned, lower=1, lwork=size,
                                                                              overwrite_a=1)
        self.reflectors = np.asfortranarray(reflectors[1:, :-1])

    def _times(self, rows: np.ndarray, transposed: str) -> np.ndarray:
        """Rows times the reflectors' part of Q ('T': what leads into T's coordinates; 'N': back)."""
        turned = np.asfortranarray(rows.T)
        moved, _, _ = lapack.dormqr("L", transposed, self.reflectors, self.scales, turned[1:], 64 * turned.shape[1])
        turned[1:] = moved
        return turned.T

    def into(self, rows: np.ndarray) -> np.ndarray:
        """(r, k) rows in T's coordinates: rows Q."""
        return self._times(rows - np.outer(rows @ self.mirror, self.mirror), "T")

    def back(self, rows: np.ndarray) -> np.ndarray:
        """(r, k) rows of T's coordinates in the original ones: rows Q'."""
        rows = self._times(rows, "N")
        return rows - np.outer(rows @ self.mirror, self.mirror)

    def _with(self, share: float) -> np.ndarray:
        diagonal = self.diagonal.copy()
        diagonal[0] += share * self.length**2
        return diagonal

    def eigenvalues(self, share: float = 0.0) -> np.ndarray:
        """(k,) ascending eigenvalues of square + share first first'."""
        return eigvalsh_tridiagonal(self._with(share), self.beside)

    def solve(self, rows: np.ndarray, ridge: float, share: float = 0.0) -> np.ndarray:
        """(r, k) rows, in T's coordinates, times the inverse of square + share first first' + ridge I.

        Raises ValueError when that matrix is not positive definite.
        """
        *_, solved, info = lapack.dptsv(self._with(share) + ridge, self.beside, np.asfortranarray(rows.T))
        if info:
            raise ValueError(f"moments with a ridge of {ridge:g} are not positive definite: take a stronger ridge")
        return solved.T
