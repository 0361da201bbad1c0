"""What an experiment is made of, as typed data: pair, text, measurements, race; and the recipe of the ladder.

`scaleop.experiment` reads files of `params/` into these.
"""

import re
from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, SerializerFunctionWrapHandler, model_serializer, model_validator

from scaleop.paths import resolve
from scaleop.strict import ExperimentError, Strict


class TargetShape(Strict):
    """The shape a donor is converted to (a config only: no arm ever sees trained target weights)."""

    layers: PositiveInt
    width: PositiveInt  # residual stream
    heads: PositiveInt
    mlp: PositiveInt  # hidden units
    vocab: PositiveInt | None = None  # rows of the embeddings; None: as many as the donor
    kv_heads: PositiveInt | None = None  # where queries share them; None: groups as large as the donor's
    head_dim: PositiveInt | None = None  # where it may differ from width / heads; None: as `wiring.config_like` says

    @model_serializer(mode="wrap")
    def _without_the_new(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What came after `vocab` is left out where it is not given: runs from before keep their keys."""
        return {name: value for name, value in dump(self).items() if value is not None or name == "vocab"}


class TrainingSeeds(Strict):
    """The same pair from other pretraining runs (PolyPythias): names with {seed} in place of the number.

    A model that is left out is as the pair has it: only the sibling may be of another run.
    """

    seeds: list[int] = Field(min_length=1)
    donor: str | None = None
    like: str | None = None
    reference: str | None = None

    @model_validator(mode="after")
    def _placeholders(self) -> Self:
        named = [name for name in (self.donor, self.like, self.reference) if name is not None]
        for name in named:
            if "{seed}" not in name:
                raise ValueError(f"{name} would be the same for every seed: write {{seed}} where the number goes")
        if not named:
            raise ValueError("no model differs between these seeds: give donor or reference, or leave them all out")
        return self


class Pair(Strict):
    """Donor, target shape, and a trained model of that shape to compare with, if one exists.

    A model is a folder below the repository, a folder anywhere, a hub name and revision ("owner/name@revision"), or the
    one that a pip package carries (`scaleop.smollm2.NAME`).
    """

    donor: str
    target: TargetShape | None = None
    like: str | None = None  # in place of `target`: a model of that shape, of which only the config is ever read
    reference: str | None = None
    training_seeds: TrainingSeeds | None = None  # named as `<experiment>@seed3`

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        if (self.target is None) == (self.like is None):
            raise ValueError("give the shape once: either target: {layers, width, heads, mlp} or like: a model")
        return self


class Frozen(Strict):
    """The frozen probe set: the stream's head, never trained on."""

    sequences: PositiveInt
    length: PositiveInt  # tokens
    similarity: PositiveInt = 500  # sequences for CKA, all positions
    moments: PositiveInt = 1000  # sequences for the second moments of compensation

    @model_validator(mode="after")
    def _parts_of_it(self) -> Self:
        for name, value in (("similarity", self.similarity), ("moments", self.moments)):
            if value > self.sequences:
                raise ValueError(f"{name} = {value} is more than the sequences = {self.sequences} that are frozen; "
                                 f"lower {name}, or raise sequences")
        return self


class TextSource(Strict):
    """A data set that `datasets` streams, one document a row: from the hub, or from local files.

    A hub data set is pinned by its commit. Local: `path` names a folder of parquet or JSON files, or is the format
    itself (`json`, `parquet`, `text`; JSON lines, also as .zst or .gz, are `json`) and `files` says where they lie.
    """

    path: str
    name: str | None = None  # the data set's configuration
    revision: str | None = None  # 40 hex digits of a commit; hub only
    files: str | list[str] | None = None  # paths or patterns, below the repository or absolute; local formats only
    split: str = "train"
    field: str = "text"  # the column that holds a document's text

    @property
    def local(self) -> bool:
        """Read from this machine's disk?"""
        return self.files is not None or not isinstance(resolve(self.path), str)

    @model_validator(mode="after")
    def _pinned(self) -> Self:
        if self.files is not None:
            if self.path not in ("json", "parquet", "text"):
                raise ValueError(f"files are given, so path must say what they are: json, parquet or text, "
                                 f"not {self.path!r}")
            if self.split != "train":
                raise ValueError("files make up one split, whatever they hold: leave split out")
        if self.local:
            if self.revision is not None:
                raise ValueError(f"revision belongs to a data set of the hub, but {self.path} is read from disk: "
                                 "leave revision out")
        elif self.path in ("json", "parquet", "text"):
            raise ValueError(f"path: {self.path} is a format; add files: the files of that format to read")
        elif self.revision is None or not re.fullmatch("[0-9a-f]{40}", self.revision):
            raise ValueError(f"revision = {self.revision!r} does not pin {self.path} (no folder here, so a "
                             "data set of the hub): give the commit, 40 hex digits, which the data set's page shows")
        return self


class EvaluationText(TextSource):
    """A text that is only ever measured: its non-blank rows, joined by two newlines."""

    documents: PositiveInt | None = None  # the first rows only, blank ones counted; null: all of the split


class EvaluationTexts(Strict):
    """The texts of sections 7 and 7.5: WikiText-103's and C4's validation splits in the paper."""

    heldout: EvaluationText
    foreign: EvaluationText


class CorpusSettings(Strict):
    """Which text, how much of it is frozen, and how far apart the seeds start.

    `source: embedded` is the text of pip packages. `source: hub` streams `train` and `evaluations` through `datasets`
    and needs `disjoint`: with `documents`, seed s reads from document `skip + s * seed_stride` on, as the paper's
    authors do (seeds overlap where a budget is longer than the stride's documents; what they share is recorded); with
    `tokens`, from the first document behind the frozen set and `s * seed_stride` tokens, and seeds cannot overlap.
    """

    source: Literal["embedded", "hub"]
    frozen: Frozen
    seed_stride: PositiveInt  # between two seeds' first tokens: tokens, or documents with `disjoint: documents`
    repeat: bool = False  # may a stream wrap around or run into later seeds' text? (embedded)
    train: TextSource | None = None
    evaluations: EvaluationTexts | None = None
    disjoint: Literal["documents", "tokens"] | None = None
    skip: PositiveInt | None = None  # documents before seed 0's first, blank ones counted; only `disjoint: documents`

    @model_validator(mode="after")
    def _one_world(self) -> Self:
        hub = {"train": self.train, "evaluations": self.evaluations, "disjoint": self.disjoint}
        for key, value in hub.items():
            if self.source == "embedded" and value is not None:
                raise ValueError(f"{key} belongs to source: hub; the embedded text has its own: leave {key} out")
            if self.source == "hub" and value is None:
                raise ValueError(f"source: hub needs {key}: add it (or use source: embedded)")
        if self.source == "hub" and self.repeat:
            raise ValueError("repeat: true is for the embedded text, which is short: leave it out with source: hub")
        if (self.skip is not None) != (self.disjoint == "documents"):
            raise ValueError("skip, the documents before seed 0's first, is needed with disjoint: documents and goes "
                             "with nothing else (disjoint: tokens starts right behind the frozen set)")
        return self


class Evaluation(Strict):
    """Strided perplexity (section 3)."""

    window: PositiveInt
    stride: PositiveInt
    quick_tokens: PositiveInt  # of `heldout`, along the way
    limits: dict[str, PositiveInt | None]  # tokens per evaluation text, `items` of a zero-shot task; null: all


class RaceSettings(Strict):
    """Budget, schedule and arms of section 7; the same for every arm."""

    tokens: PositiveInt
    batch: PositiveInt  # sequences a step
    length: PositiveInt  # tokens a sequence
    peak_lr: float = Field(gt=0)
    warmup_steps: int = Field(ge=0)
    eval_every: PositiveInt  # tokens
    checkpoint_every: int = Field(ge=0)  # steps; 0: none along the way
    precision: Literal["bf16", "no"]
    attention: Literal["eager", "sdpa"]  # eager is the faster one on CPU at short context
    micro_batch: PositiveInt | None = None  # sequences at a time in a process; these three trade time for memory
    checkpoint_activations: bool = False
    chunk: PositiveInt | None = None  # positions whose logits exist at a time
    arms: list[str] = Field(min_length=1)
    leaders: list[str] = Field(default_factory=list)  # run on every seed of the experiment
    variants: list[str] = Field(default_factory=list)  # not run by default: results are committed (scaleop.committed)


class LadderModel(Strict):
    """One rung: shape and peak rate (chosen by the recorded sweep)."""

    name: str
    layers: PositiveInt
    width: PositiveInt
    heads: PositiveInt
    mlp: PositiveInt
    peak_lr: float = Field(gt=0)


class Sweep(Strict):
    """The short learning-rate sweep."""

    tokens: PositiveInt
    rates: list[float]


class Ladder(Strict):
    """`params/ladder.yaml`: how the nano models are pretrained."""

    vocabulary: PositiveInt
    context: PositiveInt
    rotary_fraction: float
    tokens: PositiveInt
    batch: PositiveInt
    warmup_share: float
    precision: Literal["bf16", "no"]
    seed: int
    evaluations: PositiveInt
    checkpoint_every: PositiveInt
    frozen: Frozen
    evaluation: Evaluation
    sweep: Sweep
    models: list[LadderModel]

    def model(self, name: str) -> LadderModel:
        """The rung of that name; ExperimentError lists the names there are."""
        for model in self.models:
            if model.name == name:
                return model
        raise ExperimentError(f"model {name!r} is not in params/ladder.yaml; there are: "
                              + ", ".join(model.name for model in self.models))
