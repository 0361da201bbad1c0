"""Text becomes token files, once: the frozen probe set, each seed's training stream, the evaluation texts.

A *stream* is made as the paper's authors make theirs: documents tokenised whole in a fixed order, blank ones
dropped, one end-of-text token after each, everything joined and cut into consecutive blocks. The stream's head is
the frozen probe set; training starts behind it (contamination guard), each seed at its own offset. A training
stream is written to disk with a manifest, and every arm of a seed reads those same bytes.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from scaleop import texts
from scaleop.paths import STORE
from scaleop.progress import progress
from scaleop.store import StoreError, atomic, atomic_folder, digest, locked, read_json, sha256, write_json

EOS = "<|endoftext|>"


class CorpusError(ValueError):
    """The corpus cannot give what was asked: too little text, or seeds that would share tokens."""


@dataclass(frozen=True)
class TokenFile:
    """Token ids on disk: `tokens.bin` (little-endian unsigned ints) and `manifest.json` in one folder."""

    folder: Path

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """Source, tokenizer hash, offset, length, dtype and SHA-256 of the tokens, as written with them."""
        return read_json(self.folder / "manifest.json")

    @cached_property
    def tokens(self) -> np.ndarray:
        """(n,) memory-mapped ids. StoreError when the file's length is not the manifest's."""
        path, dtype = self.folder / "tokens.bin", np.dtype(self.manifest["dtype"])
        if path.stat().st_size != self.manifest["tokens"] * dtype.itemsize:
            raise StoreError(f"{path} is truncated. Delete {self.folder} and run again: it will be rebuilt.")
        return np.memmap(path, dtype=dtype, mode="r")

    @cached_property
    def documents(self) -> np.ndarray:
        """(m,) int64 offset of each document's first token."""
        return np.load(self.folder / "documents.npy", allow_pickle=False)

    def verify(self) -> "TokenFile":
        """Compare the bytes with the manifest's SHA-256; StoreError when they differ."""
        if sha256(self.folder / "tokens.bin") != self.manifest["sha256"]:
            raise StoreError(f"{self.folder}/tokens.bin is not what its manifest says. "
                             f"Delete {self.folder} and run again: it will be rebuilt.")
        return self

    def block(self, step: int, batch: int, length: int) -> np.ndarray:
        """(batch, length) int64: the rows of optimiser step `step`, consecutive pieces of the stream."""
        start, size = step * batch * length, batch * length
        return np.asarray(self.tokens[start : start + size], dtype=np.int64).reshape(batch, length)


def write_tokens(folder: Path, tokens: np.ndarray, documents: np.ndarray, **manifest: Any) -> TokenFile:
    """Write a token file whole or not at all. Integer dtype is kept: uint16 below 65,536 ids, else uint32."""
    with atomic_folder(folder) as part:
        tokens.tofile(part / "tokens.bin")
        np.save(part / "documents.npy", documents.astype(np.int64), allow_pickle=False)
        write_json(part / "manifest.json", {**manifest, "tokens": len(tokens), "dtype": tokens.dtype.str,
                                            "documents": len(documents), "sha256": sha256(part / "tokens.bin")})
    return TokenFile(folder)


def train_tokenizer(documents: Iterable[str], vocabulary: int, context: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on `documents`; id 0 is the end-of-text token. The same text gives the same ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[EOS], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, bos_token=EOS, unk_token=EOS,
                                   model_max_length=context, clean_up_tokenization_spaces=False)


def tokenizer_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    """A key for the tokenizer's exact behaviour: the SHA-256 of its serialised rules and vocabulary, shortened."""
    return digest(tokenizer.backend_tokenizer.to_str())


def encode(documents: list[str], tokenizer: PreTrainedTokenizerFast) -> list[np.ndarray]:
    """Ids of each document: all of it, no BOS, one EOS behind it; none at all where there is only whitespace."""
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    filled = [text for text in documents if text.strip()]
    ids = iter(tokenizer(filled, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
               if filled else [])
    return [np.array([*next(ids), tokenizer.eos_token_id] if text.strip() else [], dtype=dtype) for text in documents]


def tokenise(documents: Iterable[str], tokenizer: PreTrainedTokenizerFast) -> tuple[np.ndarray, np.ndarray]:
    """Documents -> (token ids (n,), offsets (m,) of those that are not blank), each as `encode` has it."""
    pieces = [encode([text], tokenizer)[0] for text in progress(documents, desc="tokenise", unit=" documents")]
    pieces = [piece for piece in pieces if len(piece)]
    if not pieces:
        raise CorpusError("the corpus holds no text: every document is blank")
    return np.concatenate(pieces), np.cumsum([0, *map(len, pieces[:-1])], dtype=np.int64)


def corpus_folder(name: str) -> Path:
    """Where token files of one text under one tokenizer lie."""
    return STORE / "corpus" / name


class Corpus:
    """The embedded corpus under one tokenizer: frozen set, training streams, evaluation texts.

    `frozen` is (sequences, length) of the probe set, `seed_stride` the tokens between the starts of two seeds. What an
    experiment reads, whatever its world (`scaleop.hub_corpus` is the other one): `key` and `identity`, `guard`,
    `frozen()`, `train`, `start`, `stream`, `evaluation`, and for a reader's eyes `sources`, `extent` and `places`.
    """

    tasks = "embedded"  # which of `scaleop.tasks.SETS` its models are asked

    def __init__(self, tokenizer: PreTrainedTokenizerFast, frozen: tuple[int, int], seed_stride: int) -> None:
        self.tokenizer, self.frozen_shape, self.seed_stride = tokenizer, frozen, seed_stride
        self.key = tokenizer_hash(tokenizer)
        self.folder = corpus_folder(f"embedded-{self.key}")

    @property
    def identity(self) -> str:
        """What determines the frozen set and the training text: the SHA-256 of the training split's tokens."""
        return self.train.manifest["sha256"]

    @cached_property
    def train(self) -> TokenFile:
        """The whole training split as one stream, written on first use (seconds for the embedded corpus).

        Its bytes are compared with its manifest's hash when first opened; StoreError when they differ.
        """
        return self._once("train", texts.training_documents).verify()

    def _once(self, name: str, documents: Any) -> TokenFile:
        with locked(self.folder):
            if not (self.folder / name / "manifest.json").exists():
                tokens, starts = tokenise(documents(), self.tokenizer)
                write_tokens(self.folder / name, tokens, starts, source=f"embedded/{name}", tokenizer=self.key,
                             offset=0)
        return TokenFile(self.folder / name)

    @property
    def guard(self) -> int:
        """Tokens of the stream's head that belong to the frozen set; no training stream touches them."""
        return self.frozen_shape[0] * self.frozen_shape[1]

    def frozen(self) -> np.ndarray:
        """(sequences, length) int64 frozen probe set: the stream's head; blocks may cross documents."""
        if self.guard > len(self.train.tokens):
            raise CorpusError(f"corpus.frozen asks for {self.guard:,} tokens but the training split has "
                              f"{len(self.train.tokens):,}: lower corpus.frozen.sequences")
        return np.asarray(self.train.tokens[: self.guard], dtype=np.int64).reshape(self.frozen_shape)

    def start(self, seed: int) -> int:
        """Offset of a seed's first token: the first document start at or behind guard + seed x seed_stride."""
        wanted = self.guard + seed * self.seed_stride
        at = int(np.searchsorted(self.train.documents, wanted))
        if seed < 0 or at == len(self.train.documents):
            last = (int(self.train.documents[-1]) - self.guard) // self.seed_stride
            raise CorpusError(f"seed={seed} lies outside the corpus: use a seed from 0 to {last}, "
                              "or lower corpus.seed_stride")
        return int(self.train.documents[at])

    def stream(self, seed: int, tokens: int, repeat: bool = False) -> TokenFile:
        """The training stream of a seed: `tokens` ids from its offset on, written once, read by every arm.

        With `repeat` the stream may run on into later seeds' text and wrap around to the guard (never into the
        frozen set); epochs and overlap then stand in the manifest. Without it, CorpusError says what to change.
        """
        start, first = self.start(seed), self.start(0)
        available = len(self.train.tokens) - first
        if not repeat:
            end = start + tokens
            if end > len(self.train.tokens):
                raise CorpusError(f"tokens={tokens:,} from seed {seed}'s offset need {end - len(self.train.tokens):,} "
                                  "more tokens than the corpus has: use fewer tokens, a lower seed, or set "
                                  "corpus.repeat: true in the experiment (repeats are recorded)")
            following = self.guard + (seed + 1) * self.seed_stride
            if end > following:
                raise CorpusError(f"tokens={tokens:,} would run into seed {seed + 1}'s text: use at most "
                                  f"{following - start:,} tokens, raise corpus.seed_stride (now "
                                  f"{self.seed_stride:,}), or set corpus.repeat: true (overlap is recorded)")
        facts = {"source": "embedded/train", "tokenizer": self.key, "parent": self.identity,
                 "seed": seed, "offset": start, "seed_stride": self.seed_stride, "guard": self.guard,
                 "repeat": repeat, "epochs": round(tokens / available, 4), "length": tokens}
        folder = self.folder / "streams" / digest(facts)
        with locked(self.folder):
            if not (folder / "manifest.json").exists():
                positions = first + (start - first + np.arange(tokens)) % available
                inside = self.train.documents[(self.train.documents >= start)
                                              & (self.train.documents < start + tokens)] - start
                write_tokens(folder, self.train.tokens[positions], inside, **facts)
        return TokenFile(folder).verify()

    def evaluation(self, name: str, limit: int | None = None) -> np.ndarray:
        """(n,) int64 ids of an evaluation text (`heldout`, `foreign`), tokenised as one sequence, first `limit`.

        StoreError names the file and the remedy when the one on disk is damaged.
        """
        path = self.folder / f"{name}.npy"
        if not path.exists():
            ids = self.tokenizer(texts.evaluation_text(name), add_special_tokens=False, verbose=False)["input_ids"]
            with atomic(path) as part, open(part, "wb") as file:
                np.save(file, np.array(ids, dtype=np.uint32), allow_pickle=False)
        try:
            return np.load(path, allow_pickle=False).astype(np.int64)[:limit]
        except (ValueError, EOFError) as error:  # cut short, or not an array at all
            raise StoreError(f"{path} is damaged ({error}). Delete it and run again: it will be rebuilt.") from error

    def sources(self) -> list[dict[str, Any]]:
        """The texts as rows of a table: which, documents, characters."""
        training, held_out = texts.addresses()
        parts = {"addresses, training": training, "dictionary, training": texts.dictionary(),
                 "addresses, held out": held_out,
                 "King James Bible, never trained on": [texts.evaluation_text("foreign")]}
        return [{"text": name, "documents": len(documents), "characters": sum(map(len, documents))}
                for name, documents in parts.items()]

    def extent(self) -> str:
        """How long the training text is, as a sentence."""
        return f"training stream: {len(self.train.tokens):,} tokens in {self.train.manifest['documents']:,} documents"

    def places(self, seeds: Iterable[int], tokens: int) -> list[dict[str, Any]]:
        """Where in the training text each seed's `tokens` lie, as rows of a table."""
        return [{"seed": seed, "first token": self.start(seed), "last token": self.start(seed) + tokens - 1}
                for seed in seeds]
