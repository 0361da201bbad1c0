"""What of a cascade is done (`scaleop.cascade`), as data: a switch for each ingredient."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from scaleop.ridge import RULES

StreamMap = Literal["selected", "pca", "pca_raw", "rotation"]  # what each is: `scaleop.cascade_streams`
STREAMS: tuple[StreamMap, ...] = ("selected", "pca", "pca_raw", "rotation")
CASCADE_RULES = tuple(rule for rule in RULES if rule != "clamp")  # rows to clamp to are the donor's own inputs'


@dataclass(frozen=True)
class Cascade:
    """What of the cascade is done; all that is switched off stays as the maps alone make it."""

    stream: StreamMap = "pca"
    read_ins: bool = True
    read_outs: bool = True
    correct: bool = True  # read-outs aim at P h' - s; else at what the donor's own stage writes, P (h' - h)
    head: bool = True
    ridge: str | float = "mean_diagonal"

    def __post_init__(self) -> None:
        if self.stream not in STREAMS:
            raise ValueError(f"stream = {self.stream!r} is no residual map; there are: {', '.join(STREAMS)}")
        if isinstance(self.ridge, str) and self.ridge not in CASCADE_RULES:
            raise ValueError(f"ridge = {self.ridge!r}: a cascade takes {', '.join(CASCADE_RULES)} or a number")
        if self.correct and not self.read_outs:
            raise ValueError("correct says what read-outs are fitted to: set read_outs=True too, or correct=False")

    def facts(self) -> dict[str, Any]:
        """What is not at its default: a switch added later leaves older runs their keys."""
        defaults = asdict(Cascade())
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}
