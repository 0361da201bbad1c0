"""What the scripts of benchmarks/ have found, as tables: each figure beside the plain way's, and what was aimed at.

A ratio is of two figures that were measured side by side, in one run on one machine; figures alone belong to the
machine. Above 1, ours is the better one.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pandas as pd

from scaleop.paths import ROOT
from scaleop.store import read_json

RESULTS = ROOT / "benchmarks" / "results"


class Comparison(NamedTuple):
    """One figure, the plain way's and ours, both in `unit`; `rate`: the more, the better.

    `least` is the ratio that was aimed at, `most` the figure that ours should stay under. `plain` None: not measured.
    """

    what: str
    plain: float | None
    ours: float
    unit: str
    rate: bool = False
    least: float | None = None
    most: float | None = None

    @property
    def ratio(self) -> float | None:
        """How many times better ours is."""
        if self.plain is None:
            return None
        return self.ours / self.plain if self.rate else self.plain / self.ours

    @property
    def met(self) -> bool | None:
        """Is what was aimed at reached? None where nothing was."""
        aims = [self.ratio is not None and self.ratio >= self.least] if self.least else []
        aims += [self.ours < self.most] if self.most else []
        return all(aims) if aims else None


Found = Mapping[str, Any]
SMALL = {"1.4b -> 410m": 4.0, "6.9b -> 1.4b": 8.0}
"""GB that a streaming conversion should stay under, by pair."""
BLOCKS = {"410m -> 160m": 12, "1.4b -> 410m": 24, "6.9b -> 1.4b": 24}
"""Of the whole target."""


def conversion(found: Found) -> list[Comparison]:
    """Block by block against the whole donor in memory (`plain` None: it does not fit, or was not tried)."""
    rows = []
    for pair, facts in found.items():
        ours, plain = facts["ways"]["streaming"], facts["ways"].get("loading everything", {})
        blocks = facts["target"]["layers"]
        made = "" if blocks == BLOCKS[pair] else f", {blocks} of {BLOCKS[pair]} blocks made"
        rows += [Comparison(f"peak memory, {pair}{made}", plain.get("peak GB"), ours["peak GB"], "GB",
                            most=SMALL.get(pair)),
                 Comparison(f"time, {pair}{made}", plain.get("seconds"), ours["seconds"], "s")]
    return rows


def moments(found: Found) -> list[Comparison]:
    """Columns of the kept inputs against the full square: peak memory, and the best rounds' seconds."""
    rows = []
    for shape, facts in found["shapes"].items():
        obvious, *ours = facts["memory"]
        memory = {variant: each["bytes"] / 1e9 for variant, each in facts["memory"].items()}
        whole = {variant: min(each[variant]["seconds"] for each in facts["rounds"]) for variant in memory}
        alone = {variant: min(each[variant]["seconds"] - each[variant]["forward_s"] for each in facts["rounds"])
                 for variant in memory}
        for what, values, unit, least in (("peak memory", memory, "GB", 1.8), ("time of the moments", alone, "s", 1.5),
                                          ("time with the forward pass", whole, "s", None)):
            rows += [Comparison(f"{what}, {shape}, {variant.split(', ')[1]} sums", values[obvious], values[variant],
                                unit, least=least) for variant in ours]
    return rows


def perplexity(found: Found) -> list[Comparison]:
    """Batches of windows against one window at a time."""
    plain, ours = (min(seconds) for seconds in found["seconds"].values())
    return [Comparison(f"strided perplexity{_at(found)}", plain, ours, "s", least=1.5)]


def training(found: Found) -> list[Comparison]:
    """The race's loop (in each precision that was tried) against a plain fp32 one."""
    best = {variant: max(rates) for variant, rates in found["tokens_per_second"].items()}
    return [Comparison(f"a training step{_at(found)}{variant.removeprefix('ours')}", best["plain"], rate, "tokens/s",
                       rate=True) for variant, rate in best.items() if variant != "plain"]


def _at(found: Found) -> str:
    return f", {found.get('shape', 'nano-m')}"


def memory(found: Found) -> list[Comparison]:
    """What each way to save memory leaves of a plain step's peak."""
    variants = found["variants"]
    return [Comparison(f"peak memory of a step, {name.replace('_', ' ')}", variants["plain"]["peak"] / 1e9,
                       each["peak"] / 1e9, "GB") for name, each in variants.items() if name != "plain"]


def footprint(found: Found) -> list[Comparison]:
    """What is computed (not measured) of a step of the paper's pairs: plain, and with the settings of params/."""
    return [Comparison(f"computed peak of a step, {name}", ways["plain"]["peak"] / 1e9,
                       ways["as in params"]["peak"] / 1e9, "GB", most=24.0 if name == "primary" else None)
            for name, ways in found["experiments"].items()]


COMPARED: dict[str, Callable[[Found], list[Comparison]]] = {
    "conversion": conversion, "moments": moments, "perplexity": perplexity, "perplexity_160m": perplexity,
    "training": training, "training_160m": training, "memory": memory,
    "footprint": footprint}
"""The benchmarks that compare, by name of their results; `gpu` measures without a plain way beside it."""
COMMANDS = {name: f"python benchmarks/{name}.py" for name in COMPARED} | {
    "perplexity_160m": "python benchmarks/perplexity.py --shape 160m", "gpu": "bash benchmarks/gpu.sh",
    "training_160m": "python benchmarks/training.py --shape 160m", "footprint": "python benchmarks/memory.py --table"}


def results() -> dict[str, Found]:
    """What is there of benchmarks/results, by name."""
    return {name: read_json(path) for name in (*COMPARED, "gpu") if (path := RESULTS / f"{name}.json").exists()}


def absent(name: str) -> str:
    """The sentence for a benchmark that has not been run: how it is."""
    return f"{name}: not measured yet ({COMMANDS[name]})"


def missing(found: Mapping[str, Found]) -> list[str]:
    """A sentence for each that has not been run."""
    return [absent(name) for name in COMMANDS if name not in found]


def comparisons(found: Mapping[str, Found]) -> list[Comparison]:
    """All comparisons of what was run."""
    return [row for name, rows in COMPARED.items() if name in found for row in rows(found[name])]


def table(rows: list[Comparison]) -> pd.DataFrame:
    """Comparisons for the eye: plain, ours, how many times better, the aim and whether it is reached."""
    def aim(row: Comparison) -> str:
        return f"at least {row.least:g}x" if row.least else f"under {row.most:g} {row.unit}" if row.most else "-"

    return pd.DataFrame([{
        "": row.what, "plain": _number(row.plain, row.unit), "ours": _number(row.ours, row.unit),
        "ratio": "-" if row.ratio is None else f"{row.ratio:.2f}x", "aim": aim(row),
        "reached": {True: "yes", False: "no", None: "-"}[row.met]} for row in rows])


def gpu(found: Found) -> pd.DataFrame:
    """What `gpu.py` measured, a row a figure; shares of peak where the device's peak is known."""
    rows = []
    for part, facts in found.items():
        if part.startswith("training"):
            shares = [f"{facts[key]:.0%} of {what}" for key, what in (("share_of_peak", "peak"),
                      ("share_of_product", "a large product")) if facts.get(key) is not None]
            rows.append({"": part, "tokens/s": facts["tokens_per_second"], "share": ", ".join(shares),
                         "peak GB": facts.get("whole_bytes")})
        elif part.startswith("perplexity"):
            rows.append({"": part, "tokens/s": facts["tokens_per_second"], "peak GB": facts.get("perplexity_bytes")})
        elif part.startswith("donor"):
            rows += [{"": f"{part}, {name}", "tokens/s": facts[f"{name}_tokens_per_second"],
                      "peak GB": facts.get(f"{name}_bytes")} for name in ("statistics", "moments")]
        elif part.startswith("conversion"):
            rows.append({"": part, "seconds": facts["conversion_s"], "peak GB": facts.get("conversion_bytes")})
    shown = pd.DataFrame(rows, columns=["", "tokens/s", "share", "seconds", "peak GB"]).astype(object)
    for column, form in (("tokens/s", "{:,.0f}"), ("seconds", "{:,.1f}"), ("peak GB", "{:.2f}")):
        scale = 1e9 if column == "peak GB" else 1
        shown[column] = [form.format(value / scale) if pd.notna(value) else None for value in shown[column]]
    return shown.fillna("-")


def shown(name: str, found: Mapping[str, Found]) -> Any:
    """The table of one benchmark for a page, or the sentence that it has not been run."""
    if name not in found:
        from IPython.display import Markdown  # whoever has pages has it

        return Markdown(absent(name))
    return (gpu(found[name]) if name == "gpu" else table(COMPARED[name](found[name]))).style.hide(axis="index")


def origins(found: Mapping[str, Found]) -> pd.DataFrame:
    """Where each benchmark was run: commit, day, hardware, versions."""
    rows = []
    for name, facts in found.items():
        for part, each in ({"": facts} if "commit" in facts else facts).items():
            hardware = each["hardware"]
            rows.append({"benchmark": f"{name} {part}".strip(), "commit": each["commit"][:12],
                         "day": each["started"][:10], "device": hardware["device"], "machine": hardware["machine"],
                         "threads": hardware["threads"], "torch": each["versions"]["torch"],
                         "transformers": each["versions"]["transformers"]})
    return pd.DataFrame(rows)


def _number(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"
