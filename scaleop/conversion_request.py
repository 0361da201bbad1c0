"""What may be asked of a conversion and where its result may go: what may not is refused in a sentence, before work."""

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from scaleop.arms import Arm
from scaleop.donor import held_out_from
from scaleop.experiment import ExperimentError, nearest
from scaleop.replacing import recover
from scaleop.store import digest, locked, refusals_as_sentences

DTYPES, KEEP = ("float32", "bfloat16", "float16"), ("full", "kept")
DEFAULTS = {True: ("pile", 10_000, 128, 1_000), False: ("embedded", 4_000, 128, 1_000)}
"""Calibration text, sequences, tokens each and sequences for moments: of a hub donor (the paper's), of a local one."""
REMEDY = "name an --out on another disk"


class Text(NamedTuple):
    """Calibration text: its name, `sequences` of `length` tokens, and how many of them give second moments."""

    name: str
    sequences: int
    length: int
    moments: int


def whole(name: str, value: Any, least: int = 1) -> int:
    """`value`, if it is a whole number from `least` on; ExperimentError about `name` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ExperimentError(f"{name} = {value!r}: give a whole number, {least} or more")
    return int(value)


def text_asked(arm: Arm, of_hub: bool, name: str | None, sequences: int | None, length: int | None,
               moments: int | None) -> Text:
    """The text to measure on, with defaults for what is None. ExperimentError for numbers that no arm, or not this
    one, can do with."""
    known, *defaults = DEFAULTS[of_hub]
    sequences = whole("sequences", defaults[0] if sequences is None else sequences, 2)  # a variance needs two
    length = whole("length", defaults[1] if length is None else length)
    moments = whole("moment-sequences", min(defaults[2], sequences) if moments is None else moments)
    if moments > sequences:
        raise ExperimentError(f"--moment-sequences: {moments:,} is more than the {sequences:,} sequences")
    if arm.ridge == "holdout" and not 0 < held_out_from(moments) < moments:
        raise ExperimentError(f"--moment-sequences: of {moments} none can be held out, as arm = {arm.name!r} wants it: "
                              "give 3 or more")
    return Text(name or known, sequences, length, moments)


def check_choices(moments: str, dtype: str, spill: float, device: str) -> None:
    """ExperimentError for what is none of the choices."""
    for name, value, choices in (("moments", moments, KEEP), ("dtype", dtype, DTYPES)):
        if value not in choices:
            raise ExperimentError(f"{name} = {value!r}: it may be {', '.join(choices)}; {nearest(str(value), choices)}")
    if not (isinstance(spill, int | float) and 0 <= spill < math.inf):
        raise ExperimentError(f"spill = {spill!r}: give GB of hidden states to keep in memory, 0 or more")
    try:
        torch.empty(1, dtype=torch.float64, device=device)  # moments are summed in it
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ExperimentError(f"device = {device!r} is not to be had here ({str(error).splitlines()[0]}): give cpu or "
                              "cuda, or leave it out for the best there is") from error


@contextmanager
def claimed(out: Path, donor: Path, force: bool, locks: Path) -> Iterator[Callable[[], None]]:
    """Claim the absolute path `out` for a result, of a donor in the folder `donor`, until the end of the block.

    Yields the check that nothing is there that must stay, for right before the result takes its place. ExperimentError
    where that is so already, or where `out` would hold the donor or lie in it; StoreError where another process
    converts to the same place (it holds a lock in `locks`), or nothing can be written there.
    """
    place, donor, here = out.resolve(), donor.resolve(), Path.cwd()
    if place == donor or place in donor.parents or donor in place.parents:
        raise ExperimentError(f"--out: {out} is the donor's folder, lies in it or holds it: name a folder beside it")
    if place == here or place in here.parents:
        raise ExperimentError(f"--out: {out} is the current folder or holds it: name a folder in it, or another")

    def check() -> None:
        if os.path.lexists(out) and not force:
            raise ExperimentError(f"--out: {out} exists: name another folder, or overwrite it with --force")
        if os.path.lexists(out) and not (out / "conversion.json").is_file():
            raise ExperimentError(f"--out: {out} holds no conversion.json, and --force replaces only what a conversion "
                                  "made: name another folder, or delete this one yourself")

    with locked(locks / f"{out.name}-{digest(str(place))}", wait=False):
        recover(out)
        check()
        with refusals_as_sentences(out, REMEDY):
            out.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=out.parent):
                pass
        yield check
