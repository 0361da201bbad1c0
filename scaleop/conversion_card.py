"""The model card of a converted checkpoint: what it is, how it was made, and that it wants training."""

from typing import Any

from scaleop.published import PAPER_ARMS, published
from scaleop.wiring import READ_IN, READ_OUT

TEMPLATE = """---
library_name: transformers
pipeline_tag: text-generation
{base}tags: [scaleop, {arm}]
---
# {donor}, converted to {width} x {layers}

{model}, made from **{donor}**{package} by scaleop's arm `{arm}`, without any training. Its
shape: {shape}; the donor's: {donor_shape}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
```

## It wants training

A conversion is a starting point, not a finished model. {paper}
Train it before use, at about the learning rate that a model of this size is pretrained with.

## How it was made

{levers}

{text}
`conversion.json` holds the donor's revision and digest, the kept coordinates, diagnostics of every solve, versions and
commit. The method is that of "Wiring Beats Blending" (arXiv 2608.02829). The donor's licence applies.
"""


def _shape(sizes: dict[str, int]) -> str:
    """The sizes of a model, a line of prose."""
    groups = f" over {sizes['kv_heads']} of keys and values" if "kv_heads" in sizes else ""
    return (f"{sizes['layers']} blocks, width {sizes['width']}, {sizes['heads']} heads{groups}, MLP {sizes['mlp']}, "
            f"vocabulary {sizes['vocab']:,}")


def _levers(arm: dict[str, Any]) -> list[str]:
    """What the arm does, a line a lever, from its facts."""
    maps = arm["maps"]
    how = {"scored": "Coordinates were *selected* by activation variance (residual stream) and weight norms.",
           "activation": "Coordinates were *selected* by activation statistics and weight norms.",
           "uniform": "Coordinates were *selected* at even spacing, rotary pairs by frequency.",
           "dense": "Coordinates were *blended* by dense bases."}
    lines = [how[maps] if isinstance(maps, str) else f"Each axis by its own rule: {maps}."]
    if arm.get("compensate"):
        rule = arm.get("ridge", "mean_diagonal")
        lines.append(f"Read-outs were re-fitted to the donor's output by ridge regression (rule `{rule}`).")
    if arm.get("bias"):
        lines.append("The mean of what was dropped went into the read-outs' biases.")
    names = {READ_IN: "read-ins", READ_OUT: "read-outs"}
    if arm.get("rescale"):
        lines.append(f"The {' and '.join(names[lever] for lever in arm['rescale'])} were multiplied by the square root "
                     "of how much their inputs shrank.")
    if arm.get("neutral_norms"):
        lines.append("All norms are neutral (gain 1, bias 0).")
    return lines


def _paper(arm: str) -> str:
    """What the paper says of such a start, zero-shot and trained, if it has run it."""
    if arm not in PAPER_ARMS:
        return f"The paper has no figures\nfor `{arm}` on its ladder from Pythia-1.4B to 410M, so none are given here."
    start, end = (published(f"ladder.{arm}.{what}")["printed"] for what in ("zero_shot", "final"))
    return (f"The paper's Pythia-1.4B to 410M says what to\nexpect: its arm `{arm}` has a perplexity of {start} before "
            f"training, and {end} after 30M tokens.")


def conversion_card(facts: dict[str, Any], folder: str) -> str:
    """The card (Markdown) from what `conversion.json` holds; `folder` is where the checkpoint will lie."""
    donor, target, text = facts["donor"], facts["target"], facts["calibration"]
    repository, package = (donor.get("hub") or {}).get("name"), donor.get("package")
    read = "No text was read." if text is None else (
        f"Measured on {text['sequences']:,} sequences of {text['length']} tokens of *{text['text']}*; second moments "
        f"on the first\n{text['moments']:,} of them.")
    return TEMPLATE.format(
        base=f"base_model: {repository}\n" if repository else "", arm=facts["arm"]["name"], donor=donor["name"],
        model=facts["model"], folder=folder, paper=_paper(facts["arm"]["name"]), text=read,
        levers="\n".join(f"- {line}" for line in _levers(facts["arm"])), width=target["width"], layers=target["layers"],
        package=f" (package {package['name']} {package['version']})" if package else "",
        shape=_shape(target), donor_shape=_shape(donor["shape"]))
