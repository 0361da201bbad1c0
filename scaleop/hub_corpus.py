"""The second world's text: data sets of the hub, or local files, behind the interface of `scaleop.corpus.Corpus`.

Every training stream is a stretch of one data set's token stream, whose head lies on disk (`scaleop.token_head`). Its
first tokens are the frozen probe set. Where seeds start is the experiment's choice: `disjoint: documents` counts
documents, as the paper's authors do, and seeds then share text where a budget needs more documents than lie between
them; what they share is counted, stands in the stream's manifest and is said. `disjoint: tokens` rules it out.
"""

from collections.abc import Iterable
from functools import cached_property
from itertools import chain, count, islice
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from scaleop.corpus import Corpus, CorpusError, TokenFile, tokenizer_hash, write_tokens
from scaleop.documents import Documents, described, identity
from scaleop.settings import CorpusSettings, EvaluationText
from scaleop.store import digest, locked
from scaleop.token_head import TokenHead, text_folder

NAMED = 4  # seeds that a note about shared text names
MOST = 2**26  # tokens of the training text that are counted where a page asks how often each occurs


class AtHand(NamedTuple):
    """A stretch from the start of the training text: (n,) token ids, memory-mapped, and (m,) offsets of documents."""

    tokens: np.ndarray
    documents: np.ndarray


def open_corpus(settings: CorpusSettings, tokenizer: PreTrainedTokenizerFast) -> Corpus:
    """The text that an experiment's `corpus` names, under its donor's tokenizer."""
    if settings.source == "hub":
        return HubCorpus(settings, tokenizer)
    return Corpus(tokenizer, (settings.frozen.sequences, settings.frozen.length), settings.seed_stride)


def facts(settings: CorpusSettings) -> dict[str, Any]:
    """What of an experiment's `corpus` determines a run's numbers, JSON-able: of local text not where it lies."""
    found = settings.model_dump(exclude_defaults=True)
    if settings.source == "hub":
        found["train"] = identity(settings.train)
        found["evaluations"] = {name: identity(source) for name, source in settings.evaluations}
    return found


class HubCorpus(Corpus):
    """A data set's documents under one tokenizer; nothing is read before it is needed, and nothing twice."""

    tasks = "hub"

    def __init__(self, settings: CorpusSettings, tokenizer: PreTrainedTokenizerFast) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self.frozen_shape = (settings.frozen.sequences, settings.frozen.length)
        self.source, self.seed_stride = settings.train, settings.seed_stride
        self.key = digest([self.identity, *map(identity, self.evaluations.values())])
        self.folder = text_folder(self.source, tokenizer)

    @cached_property
    def identity(self) -> str:
        """What determines the training text's tokens: data set, commit (or files) and tokenizer, as a key."""
        return digest([identity(self.source), tokenizer_hash(self.tokenizer)])

    @property
    def evaluations(self) -> dict[str, EvaluationText]:
        """The evaluation texts by name."""
        return dict(self.settings.evaluations)

    @cached_property
    def head(self) -> TokenHead:
        """The data set's token stream, as far as it has been needed."""
        return TokenHead(self.folder / "head", self.source, self.tokenizer)

    def _need(self, what: str, *, tokens: int = 0, documents: int = 0) -> None:
        """Have so much of the stream on disk; CorpusError when the data set is too small for it."""
        self.head.grow(tokens=tokens, documents=documents)
        if self.head.tokens < tokens or self.head.documents < documents:
            wanted = f"{documents:,} documents" if self.head.documents < documents else f"{tokens:,} tokens"
            raise CorpusError(f"{what} needs {wanted} from the start of {described(self.source)}, which has no more "
                              f"than {self.head.tokens:,} tokens in {self.head.documents:,} documents: use fewer "
                              "tokens, a lower seed, a smaller corpus.seed_stride or a larger data set")

    @property
    def train(self) -> AtHand:
        """The training text as far as it is on disk: the frozen set at least, and no more than `MOST` tokens."""
        self._need("the frozen set", tokens=self.guard)
        last = min(self.head.tokens, max(MOST, self.guard))
        return AtHand(self.head.read(0, last), self._inside(0, last))

    def frozen(self) -> np.ndarray:
        """(sequences, length) int64 frozen probe set: the stream's head; blocks may cross documents."""
        return np.asarray(self._probes.tokens, dtype=np.int64).reshape(self.frozen_shape)

    @cached_property
    def _probes(self) -> TokenFile:
        """The frozen set's tokens as a file, which every experiment on this text shares."""
        self._need("the frozen set", tokens=self.guard)
        folder = self.folder / f"frozen-{self.guard}"
        with locked(self.folder):
            if not (folder / "manifest.json").exists():
                write_tokens(folder, self.head.read(0, self.guard), self._inside(0, self.guard),
                             source=described(self.source), tokenizer=tokenizer_hash(self.tokenizer), offset=0,
                             parent=self.identity)
        return TokenFile(folder).verify()

    def _inside(self, first: int, last: int) -> np.ndarray:
        """(m,) offsets, counted from `first`, of the documents that start in [first, last); blank ones have none."""
        starts = np.unique(self.head.starts[:-1])
        return starts[(starts >= first) & (starts < last)] - first

    def place(self, seed: int) -> tuple[int, int]:
        """(document, token) where a seed's text starts; never inside the frozen set (CorpusError)."""
        if seed < 0:
            raise CorpusError(f"seed={seed} lies outside the corpus: use a seed from 0 on")
        if self.settings.disjoint == "documents":
            document = self.settings.skip + seed * self.seed_stride
            self._need(f"seed {seed}", documents=document + 1)
            if (token := int(self.head.starts[document])) < self.guard:
                raise CorpusError(f"seed {seed} would start at token {token:,}, inside the frozen set's "
                                  f"{self.guard:,}: raise corpus.skip (now {self.settings.skip:,} documents)")
            return document, token
        wanted = self.guard + seed * self.seed_stride
        self._need(f"seed {seed}", tokens=wanted + 1)
        document = int(np.searchsorted(self.head.starts, wanted))
        return document, int(self.head.starts[document])

    def start(self, seed: int) -> int:
        """Offset of a seed's first token in the data set's stream."""
        return self.place(seed)[1]

    def stream(self, seed: int, tokens: int, repeat: bool = False) -> TokenFile:
        """The training stream of a seed: `tokens` ids from its first document on, written once, read by every arm.

        What it shares with other seeds' streams of this length stands in its manifest and is printed.
        """
        if repeat:
            raise CorpusError("repeat is for the embedded text, which is short: a data set is read once")
        document, start = self.place(seed)
        following = self.guard + (seed + 1) * self.seed_stride
        if self.settings.disjoint == "tokens" and start + tokens > following:
            raise CorpusError(f"tokens={tokens:,} would run into seed {seed + 1}'s text: use at most "
                              f"{following - start:,} tokens, raise corpus.seed_stride (now {self.seed_stride:,}), or "
                              "set corpus.disjoint: documents (overlap is recorded)")
        self._need(f"seed {seed} with tokens={tokens:,}", tokens=start + tokens)
        overlap = self.overlap(seed, tokens)
        if overlap["tokens"]:
            most = sorted(overlap["with"], key=overlap["with"].get, reverse=True)[:NAMED]
            shared = ", ".join(f"seed {other}: {overlap['with'][other]:,}" for other in sorted(most, key=int))
            shared += f" and {more} more" if (more := len(overlap["with"]) - len(most)) else ""
            print(f"note: {overlap['tokens']:,} of the {tokens:,} tokens of seed {seed} ({overlap['share']:.1%}) are "
                  f"read by other seeds too ({shared}); corpus.disjoint: tokens keeps seeds apart")
        last = int(np.searchsorted(self.head.starts, start + tokens - 1, side="right")) - 1
        facts = {"source": described(self.source), "tokenizer": tokenizer_hash(self.tokenizer), "parent": self.identity,
                 "seed": seed, "offset": start, "document_range": [document, last], "guard": self.guard,
                 "disjoint": self.settings.disjoint, "skip": self.settings.skip, "seed_stride": self.seed_stride,
                 "repeat": False, "epochs": "below 1", "length": tokens}
        folder = self.folder / "streams" / digest(facts)
        with locked(self.folder):
            if not (folder / "manifest.json").exists():
                end = start + tokens
                write_tokens(folder, self.head.read(start, end), self._inside(start, end), **facts, overlap=overlap)
        return TokenFile(folder).verify()

    def overlap(self, seed: int, tokens: int) -> dict[str, Any]:
        """What `tokens` of a seed share with as many of any other seed, whether anybody trains on it or not: tokens
        that others read too, their share, and tokens by seed. Needs the seed's own text on disk: what starts behind
        that shares nothing. (With `disjoint: tokens` no stream is long enough to share anything.)
        """
        if self.settings.disjoint == "tokens":
            return {"tokens": 0, "share": 0.0, "with": {}}
        start = self.start(seed)

        def shared(others: Iterable[int]) -> dict[int, int]:
            found = {}
            for other in others:  # the next seed, and on until one is too far away to share anything
                begins = self._begins(other)
                if begins is None or (common := tokens - abs(begins - start)) <= 0:
                    break
                found[other] = common
            return found

        before, behind = shared(range(seed - 1, -1, -1)), shared(count(seed + 1))
        union = min(tokens, max(before.values(), default=0) + max(behind.values(), default=0))
        return {"tokens": union, "share": round(union / tokens, 6),
                "with": {str(other): common for other, common in sorted((before | behind).items())}}

    def _begins(self, seed: int) -> int | None:
        """The token that a seed's first document starts at; None if that is behind all that is on disk, or inside the
        frozen set, where no seed may start."""
        document = self.settings.skip + seed * self.seed_stride
        begins = int(self.head.starts[document]) if document < self.head.documents else 0
        return begins if begins >= self.guard else None

    def evaluation(self, name: str, limit: int | None = None) -> np.ndarray:
        """(n,) int64 ids of an evaluation text: its non-blank rows joined by two newlines, as one sequence."""
        source = self.evaluations[name]
        folder = text_folder(source, self.tokenizer) / "text"
        with locked(folder.parent):
            if not (folder / "manifest.json").exists():
                rows = list(islice(chain.from_iterable(Documents(source).batches(256)), source.documents))
                if len(rows) < (source.documents or 1) or not any(map(str.strip, rows)):
                    raise CorpusError(f"{described(source)} has {len(rows):,} rows: lower documents of "
                                      f"corpus.evaluations.{name}, or name another text")
                text = "\n\n".join(row for row in rows if row.strip())
                ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
                write_tokens(folder, np.array(ids, dtype=np.uint32), np.zeros(1), source=described(source),
                             tokenizer=tokenizer_hash(self.tokenizer), rows=len(rows), characters=len(text))
        return TokenFile(folder).verify().tokens[:limit].astype(np.int64)

    def sources(self) -> list[dict[str, Any]]:
        """The texts as rows of a table: which, what for, documents and tokens (of the training text: so far)."""
        self.frozen()
        rows = [{"text": described(self.source), "for": "frozen set, training", "documents": self.head.documents,
                 "tokens": self.head.tokens}]
        for name, source in self.evaluations.items():
            ids = self.evaluation(name)
            manifest = TokenFile(text_folder(source, self.tokenizer) / "text").manifest
            rows.append({"text": described(source), "for": name, "documents": manifest["rows"], "tokens": len(ids)})
        return rows

    def extent(self) -> str:
        """How much of the training text is on disk, as a sentence."""
        return (f"training stream: {self.head.tokens:,} tokens in {self.head.documents:,} documents of "
                f"{described(self.source)} so far")

    def places(self, seeds: Iterable[int], tokens: int) -> list[dict[str, Any]]:
        """Where each seed's `tokens` lie, and what it shares with other seeds, as rows of a table."""
        rows = []
        for seed in seeds:
            document, start = self.place(seed)
            self._need(f"seed {seed} with tokens={tokens:,}", tokens=start + tokens)
            overlap = self.overlap(seed, tokens)
            rows.append({"seed": seed, "first document": document, "first token": start,
                         "last token": start + tokens - 1, "tokens shared with other seeds": overlap["tokens"]})
        return rows
