"""What dense projection misses (section 5), and the strongest linear map between the weights of two sizes.

An *operator* is one pair (A, B) per weight type, shared by all blocks: W -> A W B'. Fitting it needs a trained target,
so it is a diagnostic and never a starting point of the race. Two ways to fit: Adam, as the authors do, and alternating
least squares (ALS), whose half steps are solved in closed form. Stacks are (blocks, out, in).
"""

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from scaleop.progress import progress
from scaleop.weights import Weights
from scaleop.wiring import Wiring

ADAM_STEPS, ADAM_RATE = 1_500, 5e-3  # the authors' choice
DAMPING = {torch.float32: 1e-6, torch.float64: 1e-10}  # of the mean diagonal: what a factor leaves unseen stays put
EXACT = 1e-5  # a relative error below this is rounding: ALS ends there
INTERPOLATES = 1e-3  # below this Adam ends early: its target is reproduced, and the rest of its steps would only jitter
SMALLEST_SHARE = 1e-3  # of a proposed step: what is tried last before a step is refused

Move = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # a step of B, the gradient's change along it, 1 / their product


@dataclass(frozen=True)
class Operator:
    """A shared linear map W -> A W B': `left` is A (m, p), `right` is B (n, q), for donor matrices of (p, q)."""

    left: torch.Tensor
    right: torch.Tensor


@dataclass(frozen=True)
class Fit:
    """A fitted operator and how it got there.

    `errors[i]` is the pooled relative error (the fit's objective) after `seconds[i]` of work; entry 0 is the start.
    """

    operator: Operator
    errors: tuple[float, ...]
    seconds: tuple[float, ...]


def matrix_types(wiring: Wiring) -> tuple[str, ...]:
    """The weight types of Table 4: roles with two axes that every block has, in the table's order (Q, K, V, O, ...)."""
    return tuple(role.name for role in wiring.roles if role.per_block and len(role.axes) == 2)


def stack(weights: Weights, role: str, blocks: Iterable[int]) -> torch.Tensor:
    """(blocks, out, in): one weight type of the named blocks, in that order."""
    return torch.stack([weights[block, role] for block in blocks])


def block_errors(predicted: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """(blocks,) fp64 relative Frobenius errors ||predicted - actual|| / ||actual|| of two (blocks, m, n) stacks.

    Predicting zero has error 1. Table 4 prints the mean over blocks.
    """
    actual = actual.double()
    return (predicted.double() - actual).norm(dim=(1, 2)) / actual.norm(dim=(1, 2))


def pooled_error(predicted: torch.Tensor, actual: torch.Tensor) -> float:
    """Relative Frobenius error over all blocks together: what both fits minimise."""
    return ((predicted.double() - actual.double()).norm() / actual.double().norm()).item()


def operator_outputs(operator: Operator, donor: torch.Tensor) -> torch.Tensor:
    """A W B' for every block: (blocks, p, q) -> (blocks, m, n), computed and returned in the operator's dtype."""
    return operator.left @ donor.to(operator.left.dtype) @ operator.right.T


def residuals(operator: Operator, donor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Eq. 2: target - A W B' for every block, (blocks, m, n), in the operator's dtype."""
    return target.to(operator.left.dtype) - operator_outputs(operator, donor)


def authors_start(donor: torch.Tensor, m: int, n: int, generator: torch.Generator) -> Operator:
    """Where the authors' fit starts, fp64: orthonormal rows on both sides.

    Leading singular vectors of the block-mean donor matrix (of `donor`, (blocks, p, q)) if m and n both fit its rank;
    otherwise (both MLP types) QR factors of Gaussian draws, A's before B's.
    """
    p, q = donor.shape[1:]
    if max(m, n) <= min(p, q):
        u, _, vh = torch.linalg.svd(donor.double().mean(dim=0), full_matrices=False)
        return Operator(u[:, :m].T.contiguous(), vh[:n].contiguous())
    draws = (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((p, m), (q, n)))
    return Operator(*(torch.linalg.qr(draw).Q.T.contiguous() for draw in draws))


def free_share(donor: torch.Tensor, target: torch.Tensor) -> float:
    """Free numbers of an operator ((A, B) less their common scale) per number it has to explain.

    At 1 or above the fit can interpolate any target, and its error says nothing about a relation of the two sizes.
    """
    (_, p, q), (blocks, m, n) = donor.shape, target.shape
    return (m * p + n * q - 1) / (blocks * m * n)


def shuffled(target: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """`target` with the entries of each block's matrix permuted: what is there to explain once structure is gone."""
    flat = target.flatten(1)
    order = torch.stack([torch.randperm(flat.shape[1], generator=generator) for _ in flat])
    return flat.gather(1, order).view_as(target)


def fit_adam(donor: torch.Tensor, target: torch.Tensor, start: Operator, steps: int = ADAM_STEPS,
             rate: float = ADAM_RATE, name: str = "Adam") -> Fit:
    """The authors' fit: full-batch Adam on the pooled squared error over the pooled squared target, fp32.

    donor: (blocks, p, q); target: (blocks, m, n); start: (A, B) of those sizes. Costs `steps` forward and backward
    passes; each contracts in the cheaper order. Ends before them only when the target is reproduced (INTERPOLATES).
    """
    wide, goal = _folded(donor.float()), _folded(target.float())  # (p, blocks, q), (m, blocks, n)
    left, right = (side.float().clone().requires_grad_() for side in (start.left, start.right))
    optimizer, total = torch.optim.Adam([left, right], lr=rate), goal.square().sum()
    errors, seconds, began = [], [], time.perf_counter()
    for step in progress(range(steps + 1), desc=name, unit=" steps"):
        loss = (_apply(left, right, wide) - goal).square().sum() / total
        errors.append(math.sqrt(loss.item()))
        seconds.append(time.perf_counter() - began)
        if step == steps or errors[-1] < INTERPOLATES:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Fit(Operator(left.detach(), right.detach()), tuple(errors), tuple(seconds))


def fit_als(donor: torch.Tensor, target: torch.Tensor, start: Operator, sweeps: int = 160, tolerance: float = 1e-5,
            memory: int = 10, dtype: torch.dtype = torch.float32, name: str = "ALS") -> Fit:
    """Alternating least squares: with B fixed the best A is a regression in closed form, with A fixed so is B.

    Plain alternation creeps: B's regression takes A for fixed, which then moves. So from the second sweep on B's step
    is corrected by what the last `memory` sweeps have shown of A's answer (L-BFGS on B with A eliminated, B's
    regression as its metric; `memory=0` is the plain method). A step that raises the error is cut back and in the end
    refused: the error never rises. Ends after `sweeps`, when five sweeps lower the error by less than `tolerance` of
    it, or when nothing is left to explain. `errors` has an entry a sweep. The factors come back equally large: their
    common scale is a gauge that the product does not see. Raises ValueError for what is not finite or all zero.
    """
    wide, goal = _folded(donor.to(dtype)), _folded(target.to(dtype))  # (p, blocks, q), (m, blocks, n)
    total = goal.norm().item()
    if not (math.isfinite(total) and total > 0 and wide.isfinite().all()):
        raise ValueError("fitting needs finite matrices and a target that is not zero")
    left, right, began = start.left.to(dtype), start.right.to(dtype), time.perf_counter()
    moves: deque[Move] = deque(maxlen=memory)
    errors, seconds = [(_apply(left, right, wide) - goal).norm().item() / total], [0.0]
    left, seen, gradient, error = _regress_left(left, right, wide, goal)
    with progress(total=sweeps, desc=name, unit=" sweeps") as bar:
        for _ in range(sweeps):
            step, share = _corrected(gradient, seen, moves), 1.0
            while True:
                tried = _regress_left(left, right + share * step, wide, goal)
                if tried[-1] < error or share < SMALLEST_SHARE:
                    break
                share *= 0.4
            if tried[-1] < error:
                moved, turned = share * step, tried[2] - gradient
                if (curvature := (moved * turned).sum()) > 0:
                    moves.append((moved, turned, 1 / curvature))
                right = right + share * step
                left, seen, gradient, error = tried
            elif moves:
                moves.clear()  # what they say of the curvature no longer holds: a plain step comes next
            else:
                break
            errors.append(error / total)
            seconds.append(time.perf_counter() - began)
            bar.update()
            if errors[-1] < EXACT or (len(errors) > 6 and errors[-6] - errors[-1] <= tolerance * errors[-1]):
                break
    balance = (right.norm() / left.norm()).sqrt()
    return Fit(Operator(left * balance, right / balance), tuple(errors), tuple(seconds))


def _regress_left(left: torch.Tensor, right: torch.Tensor, wide: torch.Tensor, goal: torch.Tensor
                  ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """The best A for this B: (A, what B then multiplies (m blocks, q), gradient (n, q) of half the squared error in
    B, absolute error). A is moved by a regression of its residual, so damping never raises the error."""
    seen = (wide.flatten(0, 1) @ right.T).view(wide.shape[0], -1)  # (p, blocks n): what A multiplies
    residual = goal.flatten(1) - left @ seen
    step = _solve(seen @ seen.T, seen @ residual.T).T
    left, residual = left + step, residual - step @ seen
    then = (left @ wide.flatten(1)).view(-1, wide.shape[2])
    return left, then, -(residual.reshape(-1, len(right)).T @ then), residual.norm().item()


def _corrected(gradient: torch.Tensor, seen: torch.Tensor, moves: Sequence[Move]) -> torch.Tensor:
    """B's next step: its regression -gradient (Y'Y)^-1, corrected by past moves (the L-BFGS two-loop recursion)."""
    direction, shares = gradient, []
    for s, y, inverse in reversed(moves):
        shares.append(inverse * (s * direction).sum())
        direction = direction - shares[-1] * y
    direction = _solve(seen.T @ seen, direction.T).T
    for (s, y, inverse), share in zip(moves, reversed(shares), strict=True):
        direction = direction + (share - inverse * (y * direction).sum()) * s
    return -direction


def _solve(gram: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(gram + e I)^-1 right for a positive semidefinite Gram matrix; e is the least of a scale at which it factors."""
    damping = DAMPING[gram.dtype] * gram.diagonal().mean()
    while True:
        damped = gram.clone()
        damped.diagonal().add_(damping)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            return torch.cholesky_solve(right, factor)
        damping = 10 * damping


def _folded(blocks: torch.Tensor) -> torch.Tensor:
    """(blocks, out, in) -> (out, blocks, in), so that either factor acts on all blocks in one product."""
    return blocks.transpose(0, 1).contiguous()


def _apply(left: torch.Tensor, right: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """A W B' on a folded stack: (p, blocks, q) -> (m, blocks, n), contracting in the cheaper order."""
    (p, blocks, q), m, n = wide.shape, len(left), len(right)
    if m * q * (p + n) <= p * n * (q + m):  # A first
        return ((left @ wide.flatten(1)).view(m * blocks, q) @ right.T).view(m, blocks, n)
    return (left @ (wide.flatten(0, 1) @ right.T).view(p, blocks * n)).view(m, blocks, n)
