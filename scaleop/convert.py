"""A pretrained checkpoint of one size made into one of another, block by block, ready for `from_pretrained`.

    python -m scaleop convert EleutherAI/pythia-1.4b --like EleutherAI/pythia-410m --arm hybrid_rs --out small
    python -m scaleop convert models/nano-l --like hidden=128,mlp=512 --arm hybrid_rs --out small

The result is a starting point for training. What is read off the donor is kept in the store, so that another shape or
another arm needs no second pass through it; a conversion that was killed finds the finished blocks again.
"""

import json
import os
import re
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from scaleop import hub
from scaleop.arms import arm_named
from scaleop.blockwise import Blockwise, check_arm
from scaleop.calibration import calibration
from scaleop.conversion_card import conversion_card
from scaleop.conversion_request import REMEDY, check_choices, claimed, text_asked, whole
from scaleop.devices import best_device
from scaleop.downloads import HubError
from scaleop.experiment import ExperimentError, nearest
from scaleop.measured import Statistics
from scaleop.paths import STORE
from scaleop.race import hub_origin, model_key
from scaleop.shards import Checkpoint, ShardWriter, bytes_of
from scaleop.store import atomic_folder, check_room, digest, provenance
from scaleop.weights import load_config
from scaleop.wiring import WiringError, check_pair, config_like, shape_of, wiring_of

ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
SIZES = {"hidden": "width", **{name: name for name in ("heads", "layers", "mlp", "vocab", "kv_heads", "head_dim")}}
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OSError, StrictDataclassError)
"""What transformers raises over a config that is no JSON, no object, of no model it knows, or has values amiss."""


def target_config(donor: Any, like: str | Path | Mapping[str, int]) -> Any:
    """The donor's config at other sizes: those of a model, of a config file, or of `hidden=1024,heads=16` (a mapping
    does too), where what is left out stays the donor's. Only the sizes are taken; all else is the donor's.

    Raises ExperimentError for sizes that cannot be read, WiringError for a shape that no selection reaches.
    """
    if isinstance(like, str) and "=" in like and not Path(like).exists():
        like = _read_sizes(like)
    if isinstance(like, Mapping):
        if strangers := like.keys() - SIZES.keys():
            raise ExperimentError(f"--like: unknown size {min(strangers)!r}; {nearest(min(strangers), list(SIZES))}")
        for name, value in like.items():
            whole(f"--like: {name}", value)
        sizes = shape_of(donor).sizes() | {SIZES[name]: value for name, value in like.items()}
        for name in {"kv_heads", "head_dim"} - like.keys():  # they follow heads and width
            sizes.pop(name, None)
    else:
        other = _config(like, "--like")
        if wiring_of(other).family != wiring_of(donor).family:
            raise ExperimentError(f"--like: {like} is a {other.model_type}, and the donor a {donor.model_type}: name a "
                                  "model of the donor's family, or give sizes")
        sizes = shape_of(other).sizes()
    target = config_like(donor, **sizes)
    check_pair(shape_of(donor), shape_of(target))
    return target


def _config(name: str | Path, asked: str) -> Any:
    """The config in a file, or of a folder or hub name. ExperimentError for what is no config, HubError where one
    asks for code of its own."""
    try:
        if not Path(name).is_file():
            return load_config(_here(name))
        hub.refuse_code(json.loads(Path(name).read_text(encoding="utf-8")), f"{asked}: {name}")
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (WiringError, HubError, ExperimentError):
        raise
    except UNREADABLE as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ExperimentError(f"{asked}: the config of {name} cannot be read ({said}): name a folder or a file with a "
                              "config.json that transformers reads") from error


def _here(name: str | Path) -> str | Path:
    """A folder below the current one, if there is one of that name; else as in an experiment."""
    return Path(name).resolve() if Path(name).is_dir() else name


def _read_sizes(text: str) -> dict[str, int]:
    sizes = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if not re.fullmatch(r"[1-9][\d_]*", value):
            raise ExperimentError(f"--like: {part.strip()!r} is no size: write {name or 'hidden'}=1024, for instance")
        sizes[name] = int(value)
    return sizes


def convert(donor: str | Path, like: str | Path | Mapping[str, int], out: str | Path, arm: str = "hybrid_rs", *,
            text: str | None = None, sequences: int | None = None, length: int | None = None,
            moment_sequences: int | None = None, moments: str = "full", dtype: str = "float32",
            spectra: bool = True, device: str | None = None, spill: float = 1.0, force: bool = False) -> dict[str, Any]:
    """Write the checkpoint `out`: `donor` (hub name, folder, or the packaged `smollm2.NAME`) at the sizes of `like`, by
    an arm of `scaleop.arms`.

    `text`: "embedded", "pile", or a .txt, .jsonl or .parquet file; with `sequences` of `length` tokens, the first
    `moment_sequences` of them for second moments. Left out: the Pile, 10,000 x 128 and 1,000 (the paper's) for a donor
    of the hub; the embedded text, 4,000 x 128 and 1,000 for a folder or the packaged one. `moments`: "full" keeps the
    whole square of every block's moments in the store (n^2 fp64 numbers a read-out), so that any later shape finds its
    own; "kept" only the columns of this one. `dtype` ("float32", "bfloat16", "float16") is that of the result. Without
    `spectra` the solves' condition numbers and effective ranks are left out, which halves their time. `device`: of the
    forward pass; None is `devices.best_device()`. `spill`: GB (10^9 bytes) of hidden states above which they wait on
    disk. `force` replaces a folder that an earlier conversion made, and no other.

    Peak memory is a block, its moments and the hidden states, however many blocks donor and target have. An arm that
    blends an axis (`projection` and what is made of it) takes an eigendecomposition of that axis on top, about 40 n^2
    bytes: 11 GB for the MLP of pythia-6.9b, n = 16,384.

    Returns what `conversion.json` holds. Raises ExperimentError, WiringError, WeightsError, HubError, CorpusError or
    StoreError with a sentence that says what to do; nothing is then left in `out`.
    """
    donor, out, began = _here(donor), Path(os.path.abspath(out)), time.monotonic()
    check_arm(chosen := arm_named(arm))
    asked = text_asked(chosen, not isinstance(hub.named(donor), Path), text, sequences, length, moment_sequences)
    check_choices(moments, dtype, spill, device := device or str(best_device()))
    target = target_config(_config(donor, "donor"), like)
    target.dtype = dtype
    with claimed(out, hub.config_folder(donor), force, STORE / "converting") as check:
        check_room(out.parent, bytes_of(target, getattr(torch, dtype)), f"the weights of {out.name}", REMEDY)
        checkpoint = Checkpoint(hub.folder(donor))
        tokenizer, generation = _tokenizer(checkpoint, target), _generation(checkpoint, target)
        origin = provenance(donor=donor_facts(donor, checkpoint), target=shape_of(target).sizes(), arm=chosen.facts())
        ids, read = np.zeros((0, 1), dtype=np.int64), None
        if chosen.reads_text:
            ids, read = calibration(asked.name, tokenizer, asked.sequences, asked.length)
            read["moments"] = asked.moments
        key = digest([origin["donor"]["digest"], read])
        statistics = Statistics(checkpoint, ids, read["moments"] if read else 0, STORE / "blocks" / key, moments,
                                int(spill * 1e9), device, say=lambda line: print(line, file=sys.stderr))
        conversion = Blockwise(chosen, statistics, target, spectra)
        conversion.prepare()
        prepared = time.monotonic()
        with atomic_folder(out, REMEDY, last=check) as part:
            writer = ShardWriter(part, checkpoint.wiring, getattr(torch, dtype))
            made = conversion.write(writer)
            writer.finish()
            target.save_pretrained(part)
            generation.save_pretrained(part)
            tokenizer.save_pretrained(part)
            seconds = {"statistics": round(prepared - began, 1), "conversion": round(time.monotonic() - prepared, 1)}
            facts = {**origin, "model": target.architectures[0] if target.architectures else target.model_type,
                     "calibration": read, "dtype": dtype, "made": made, "seconds": seconds,
                     "peak_memory_bytes": peak_memory(), "kept": conversion.kept() if conversion.selects else None}
            (part / "conversion.json").write_text(_compact(facts), encoding="utf-8")
            (part / "README.md").write_text(conversion_card(facts, out.name), encoding="utf-8")
    return facts


def donor_facts(donor: str | Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """What `conversion.json` says of the donor: name, hub revision and commit, digest of its files, shape."""
    return {"name": hub.short(donor), **hub_origin(donor), "digest": model_key(donor),
            "shape": shape_of(checkpoint.config).sizes()}


def _tokenizer(checkpoint: Checkpoint, target: Any) -> Any:
    """The donor's tokenizer; ExperimentError when it has none, or ids that the target's vocabulary has no rows for."""
    if not any((checkpoint.folder / name).exists() for name in TOKENIZERS):  # an empty one would be made up
        raise ExperimentError(f"the donor's folder has no tokenizer ({', '.join(TOKENIZERS)}): copy tokenizer.json and "
                              "tokenizer_config.json beside its weights")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False)
    if len(tokenizer) > target.vocab_size:
        raise ExperimentError(f"--like: vocab = {target.vocab_size:,} leaves no rows for some of the tokenizer's "
                              f"{len(tokenizer):,} tokens: ask for at least as many")
    return tokenizer


def _generation(checkpoint: Checkpoint, target: Any) -> GenerationConfig:
    """What `generate` starts from: the target's config, and where a text ends by the donor's own generation settings (a
    chat model names several ends there). How the donor's words are drawn is left behind: it was chosen for the donor.
    """
    found, file = GenerationConfig.from_model_config(target), checkpoint.folder / "generation_config.json"
    try:
        own = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        found.update(**{name: own[name] for name in ENDS if own.get(name) is not None})
    except UNREADABLE as error:
        raise ExperimentError(f"the donor's {file.name} cannot be read ({error}): copy it again, or delete "
                              "it") from error
    return found


def peak_memory() -> int:
    """Bytes: the largest resident set of this process so far. (Linux: since it began; what getrusage gives there may be
    the process's that started it.)"""
    if (status := Path("/proc/self/status")).exists():
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status.read_text(encoding="ascii"))[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _compact(facts: dict[str, Any]) -> str:
    """Indented JSON with every list of numbers on one line: kept coordinates are many."""
    text = json.dumps(facts, indent=1, allow_nan=False)
    return re.sub(r"\[[\d\s,]+\]", lambda match: " ".join(match[0].split()), text) + "\n"
