"""Cascaded compensation: the small model is built block by block, and every matrix is fitted on what the small model
itself feeds it, to what the donor computes at the same place. No training, no trained target.

For calibration tokens, with donor stream h, small stream s and a residual map P (`scaleop.cascade_streams`):

    embedding   E P'; s is its output
    read-ins    W A, where A is the ridge regression of the donor's normed stream on the small model's: so the rows kept
                of W x are the donor's pre-activations as nearly as s tells them. This is the regression of these
                pre-activations themselves, once for all matrices behind a norm. With an intercept where a bias is
    read-outs   the ridge regression, on their own inputs, of P h' - s: h' is the donor's stream where the next thing
                that is kept reads it. So errors made so far are corrected, and what deleted blocks did is part of it.
                Read-outs that write at once (parallel attention and MLP) are fitted together
    head        W_U A, A between the final norms. A tied head has no matrix of its own, and to untie it would be another
                shape: it stays tied, and the one thing free behind the last block, the final norm's gain (and bias),
                is fitted to the logits (`regression.gains`)

Heads, rotary pairs and MLP units stay as the arm's maps have them; only the stream is blended, since all that reads it
is re-fitted. The paper leaves both read-ins and deleted blocks open (section 9); this is beyond it.
"""

import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scaleop.blocks import InMemory, final_norm, inputs, reads
from scaleop.cascade_settings import Cascade
from scaleop.maps import Basis, Maps
from scaleop.progress import progress
from scaleop.regression import Fit, Gram, Regression, gains
from scaleop.roles import Role
from scaleop.shrink import shrink
from scaleop.streaming import SPILL, OneBlock, Stream
from scaleop.weights import Weights
from scaleop.wiring import RESIDUAL, shape_of, wiring_of


def cascade(settings: Cascade, source: Any, maps: Maps, target: Any, sequences: np.ndarray, folder: Path,
            batch: int = 16, spill: int = SPILL, device: str = "cpu") -> tuple[Weights, dict[str, Regression]]:
    """The weights of the config `target`, and diagnostics of every fit by "<target block>.<role>" ("head").

    `source`: the donor, a `shards.Checkpoint` or `blocks.InMemory`; of it one block is in memory at a time. `maps`: of
    all axes, the residual's included. `sequences`: (n, length) calibration tokens, the last fifth of which say how well
    each fit does on others, before they join it. Both hidden streams wait in `folder` where larger than `spill` bytes.

    Costs, a kept block: a forward pass of the donor's block (and of the deleted ones behind it) and about two of the
    small one's, and fp64 Gram matrices (`cascade_cost.flops`). Warns where tokens are fewer than a fit's features.
    Raises FloatingPointError for activations that are not finite, with block and role.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="cascade-") as scratch:
        work = _Work(settings, source, maps, target, sequences, Path(scratch), batch, spill, device)
        for b in progress(range(len(maps.blocks)), desc="cascade", unit=" blocks"):
            work.block(b)
        if settings.head:
            work.head()
    return work.small, work.solves


class _Work:
    """The two models, a block of each at a time, their streams, and what has been fitted so far."""

    def __init__(self, settings: Cascade, source: Any, maps: Maps, target: Any, sequences: np.ndarray, scratch: Path,
                 batch: int, spill: int, device: str) -> None:
        self.settings, self.source, self.maps, self.batch = settings, source, maps, batch
        self.wiring, self.stages = wiring_of(target), wiring_of(target).stages(target)
        self.donor, self.shape, self.sequences = shape_of(source.config), shape_of(target), len(sequences)
        self.neutral = isinstance(maps(None, RESIDUAL), Basis)  # no diagonal gain fits a blended stream
        self.small: Weights = shrink(source.weights(None), self.wiring, maps, self.neutral)
        self.solves: dict[str, Regression] = {}
        self._warn(sequences.size)
        self.ours, self.theirs = OneBlock(InMemory(self.small, target), device), OneBlock(source, device)
        (self.s, self.h, self.before) = (Stream((*sequences.shape, width), scratch / name, spill) for name, width in (
            ("small", self.shape.width), ("donor", self.donor.width), ("before", self.shape.width)))
        for rows in self._rows():
            ids = torch.as_tensor(sequences[rows])
            self.h.write(rows, source.rows("EMB_IN", ids), start=True)
            self.s.write(rows, self.small[None, "EMB_IN"][ids], start=True)

    def _warn(self, positions: int) -> None:
        features = max(self.shape.width, *(sum(self.shape.size(role.axes[1]) for role in stage.read_outs)
                                           for stage in self.stages))
        if positions < features + 1:
            warnings.warn(f"a cascade on {positions:,} calibration tokens fits matrices of up to {features:,} inputs: "
                          "there the ridge decides, not the donor. Take ten times as many tokens as inputs, or more",
                          stacklevel=4)

    def _rows(self) -> Iterator[slice]:
        for first in range(0, self.sequences, self.batch):
            yield slice(first, min(first + self.batch, self.sequences))

    def block(self, b: int) -> None:
        """Make target block b, and take both streams to where the next one begins."""
        block, blocks = self.maps.blocks[b], self.maps.blocks
        self.given = self.source.weights(block)
        one = Maps((block,), {(0 if key[0] == b else key[0], key[1]): map_ for key, map_ in self.maps.axes.items()
                              if key[0] in (b, None)})
        self.small.update({(b, name): tensor for (_, name), tensor in
                           shrink(self.given, self.wiring, one, self.neutral).items()})
        self.theirs.load(block)
        self.ours.load(b)
        for i, stage in enumerate(self.stages):
            if self.settings.read_ins:
                self._read_ins(b, i)
            if stage is self.stages[-1]:
                self._advance(range(block, blocks[b + 1] if b + 1 < len(blocks) else self.donor.layers))
            if self.settings.read_outs:
                self._read_outs(b, i)
        for rows in self._rows():
            self.s.write(rows, self._forward(self.ours, self.s.read(rows)))
        self.s.advance()

    @torch.no_grad()
    def _forward(self, model: OneBlock, stream: torch.Tensor) -> torch.Tensor:
        return model(stream).cpu()

    def _advance(self, passed: range) -> None:
        """The donor's stream through the block that is kept and those deleted behind it."""
        last = len(self.stages) - 1
        for block in passed:
            self.theirs.load(block)
            for rows in self._rows():
                h = self.h.read(rows)
                if block == passed[0] and self.settings.read_outs and not self.settings.correct:
                    self.before.write(rows, self._mapped(reads(self.theirs, self.stages, last, h)[0]), start=True)
                self.h.write(rows, self._forward(self.theirs, h))
            self.h.advance()

    def _mapped(self, stream: torch.Tensor) -> torch.Tensor:
        return self.maps(None, RESIDUAL).apply(stream.cpu(), stream.ndim - 1)

    def _read_ins(self, b: int, i: int) -> None:
        stage = self.stages[i]
        grams = {norm: Gram(self.shape.width, self.donor.width, self.sequences) for norm in stage.norms}
        for rows in self._rows():
            _, ours = reads(self.ours, self.stages, i, self.s.read(rows))
            _, theirs = reads(self.theirs, self.stages, i, self.h.read(rows))
            for norm, gram in grams.items():
                gram.add(rows.start, ours[norm], theirs[norm])
        for role in stage.read_ins:
            bias = f"{role.name}_BIAS"
            weight, free = self._kept(b, role, role.name).double(), (b, bias) in self.small
            fit = self._fit(grams[role.norm], f"{b}.{role.name}", free)
            if free:
                self._put((b, bias), self._kept(b, role, bias).double() + weight @ fit.intercept)
            self._report((b, role.name), grams[role.norm], fit, free, weight @ fit.matrix, weight)
            self._put((b, role.name), weight @ fit.matrix)
        self.ours.load(b)

    def _kept(self, b: int, role: Role, name: str) -> torch.Tensor:
        """The donor's matrix or bias with its outputs mapped, its inputs whole."""
        return self.maps(b, role.axes[0]).apply(self.given[self.maps.blocks[b], name], 0)

    def _read_outs(self, b: int, i: int) -> None:
        roles, last = self.stages[i].read_outs, i == len(self.stages) - 1
        sizes = [self.shape.size(role.axes[1]) for role in roles]
        gram = Gram(sum(sizes), self.shape.width, self.sequences)
        for rows in self._rows():
            now, seen = inputs(self.ours, self.stages, i, self.s.read(rows))
            h = self.h.read(rows)  # behind the last stage already where the next block begins
            after = h if last else reads(self.theirs, self.stages, i + 1, h)[0]
            if not self.settings.correct:
                now = self.before.read(rows) if last else self._mapped(reads(self.theirs, self.stages, i, h)[0])
            x = torch.cat(seen, dim=-1)
            gram.add(rows.start, x, (self._mapped(after) - now.cpu()).to(x.device))
        biased = [role.name for role in roles if (b, f"{role.name}_BIAS") in self.small]
        fit = self._fit(gram, f"{b}.{roles[-1].name}", bool(biased))
        for role, part in zip(roles, fit.matrix.split(sizes, dim=1), strict=True):
            self._report((b, role.name), gram, fit, bool(biased), part)
            self._put((b, role.name), part)
        for name in biased:  # what is written at once has one intercept: the last one's bias holds it
            self._put((b, f"{name}_BIAS"), fit.intercept if name == biased[-1] else torch.zeros_like(fit.intercept))
        self.ours.load(b)

    def head(self) -> None:
        """The output embedding, or the final norm's gain where it is tied."""
        own = {role.name for role in self.wiring.roles}
        tied, biased = "EMB_OUT" not in own, "LN_FINAL_BIAS" in own
        if tied:
            for name in own & {"LN_FINAL_GAIN", "LN_FINAL_BIAS"}:
                self.small[None, name] = torch.full_like(self.small[None, name], self.wiring[name].neutral)
        ours, theirs = final_norm(self.ours), final_norm(self.theirs)
        gram = Gram(self.shape.width, self.donor.width, self.sequences)
        with torch.no_grad():
            for rows in self._rows():
                gram.add(rows.start, ours(self.s.read(rows).to(self.ours.device)),
                         theirs(self.h.read(rows).to(self.theirs.device)))
        name = "EMB_IN" if tied else "EMB_OUT"
        table = self.maps(None, self.wiring[name].axes[0]).apply(self.source.weights(None, [name])[None, name], 0)
        if not tied:
            fit, table = self._fit(gram, name, False), table.double()
            self._report((None, name), gram, fit, False, table @ fit.matrix, table)
            self._put((None, name), table @ fit.matrix)
            return
        fit, r2 = self._checked(name, lambda: gains(gram, self.small[None, "EMB_IN"], table, biased))
        self.solves["head"] = Regression("gain", fit.ridge, fit.condition, fit.effective_rank,
                                         fit.matrix.norm().item() / self.shape.width**0.5, r2, int(gram.total[0, 0]))
        self._put((None, "LN_FINAL_GAIN"), fit.matrix.diagonal())
        if biased:
            self._put((None, "LN_FINAL_BIAS"), fit.intercept)

    def _report(self, key: tuple[int | None, str], gram: Gram, fit: Fit, intercept: bool, matrix: torch.Tensor,
                weight: torch.Tensor | None = None) -> None:
        """Note what a fit was like, before its `matrix` takes the place of what the maps alone made."""
        rule, place = self.settings.ridge, "head" if key[0] is None else f"{key[0]}.{key[1]}"
        ratio = (matrix.norm() / self.small[key].double().norm()).item()
        self.solves[place] = Regression(rule, fit.ridge, fit.condition, fit.effective_rank, ratio,
                                        gram.r2(rule, intercept, weight), int(gram.total[0, 0]))

    def _put(self, key: tuple[int | None, str], tensor: torch.Tensor) -> None:
        self.small[key] = tensor.to(self.small[key].dtype).contiguous()

    def _fit(self, gram: Gram, place: str, intercept: bool) -> Fit:
        return self._checked(place, lambda: gram.fit(self.settings.ridge, intercept))

    @staticmethod
    def _checked(place: str, fit: Callable[[], Any]) -> Any:
        try:
            return fit()
        except FloatingPointError as error:
            raise FloatingPointError(f"{place}: {error} on the calibration tokens. Look at the donor there: does it "
                                     "compute on these tokens at all?") from error
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
