"""What an experiment is made of, as typed data: pair, text, measurements, race; and the recipe of the ladder.

`scaleop.experiment` reads files of `params/` into these.
"""

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from scaleop.strict import ExperimentError, Strict


class TargetShape(Strict):
    """The shape a donor is converted to (a config only: no arm ever sees trained target weights)."""

    layers: PositiveInt
    width: PositiveInt  # residual stream
    heads: PositiveInt
    mlp: PositiveInt  # hidden units
    vocab: PositiveInt | None = None  # rows of the embeddings; None: as many as the donor


class Pair(Strict):
    """Donor, target shape, and a trained model of that shape to compare with, if one exists.

    A model is a folder below the repository, a folder anywhere, or a hub name and revision ("owner/name@revision").
    """

    donor: str
    target: TargetShape | None = None
    like: str | None = None  # in place of `target`: a model of that shape, of which only the config is ever read
    reference: str | None = None

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


class CorpusSettings(Strict):
    """Which text, how much of it is frozen, and how far apart the seeds start."""

    source: Literal["embedded"]
    frozen: Frozen
    seed_stride: PositiveInt  # tokens between two seeds' first tokens
    repeat: bool = False  # may a stream wrap around or run into later seeds' text?


class Evaluation(Strict):
    """Strided perplexity (section 3)."""

    window: PositiveInt
    stride: PositiveInt
    quick_tokens: PositiveInt  # of `heldout`, along the way
    limits: dict[str, PositiveInt | None]  # tokens per evaluation text; null: all of it


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
