# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3 · Setup: corpus, ladder, exactness
#
# **Asked.** What do the experiments stand on: which text, which models, and how do we know that taking a model
# apart and putting it together changes nothing?
#
# The paper works with Pythia {cite}`biderman2023pythia` and the Pile. At laptop size this project brings its own family: three
# GPT-NeoX models trained on the same text in the same order, with Pythia's shapes at an eighth of the width.

# %% tags=["parameters", "hide-input"]
experiment: str = "nano"  # a file of params/

# %% tags=["hide-input"]
given = dict(globals())  # before any import: nothing but parameters may be here
from scaleop.experiment import from_notebook

chosen, _ = from_notebook(given)

# %% tags=["hide-input"]
import pandas as pd
import torch

from scaleop import plots, texts
from scaleop.paths import ROOT
from scaleop.race import Race
from scaleop.store import read_json
from scaleop.weights import assemble, extract, load
from scaleop.wiring import check_pair, match_frequencies, shape_of, wiring_of

plots.notebook()
race = Race(chosen)
corpus = race.corpus

# %% [markdown]
# ## The text
#
# Nothing is downloaded at run time: the text travels in pip packages. Training uses the State of the Union addresses and the prose
# of a dictionary; every twelfth address is held out and plays WikiText-103's part, the King James Bible plays C4's.

# %%
training, held_out = texts.addresses()
pd.DataFrame([
    {"text": "addresses, training", "documents": len(training), "characters": sum(map(len, training))},
    {"text": "dictionary, training", "documents": len(texts.dictionary()), "characters": sum(map(len, texts.dictionary()))},
    {"text": "addresses, held out", "documents": len(held_out), "characters": sum(map(len, held_out))},
    {"text": "King James Bible, never trained on", "documents": 1, "characters": len(texts.evaluation_text("foreign"))},
]).style.hide(axis="index").format(thousands=",")

# %% [markdown]
# Documents are tokenised whole, joined by one end-of-text token each and cut into blocks. The head of the stream is the *frozen
# probe set*; training starts behind it, and each seed at its own place.

# %%
frozen = corpus.frozen()
print(f"training stream: {len(corpus.train.tokens):,} tokens in {corpus.train.manifest['documents']:,} documents")
print(f"frozen probe set: {frozen.shape[0]:,} x {frozen.shape[1]} tokens, the stream's first {corpus.guard:,}")
pd.DataFrame([{"seed": seed, "first token": corpus.start(seed), "last token": corpus.start(seed) + race.recipe.consumed - 1}
              for seed in range(3)]).style.hide(axis="index").format(thousands=",")

# %% [markdown]
# ## The ladder
#
# Held-out perplexity is measured here, on the checkpoints as they are shipped, and set beside what each model's card says.

# %%
rungs = [folder for folder in sorted((ROOT / "models").iterdir()) if (folder / "training.json").exists()]
records = {folder.name: read_json(folder / "training.json") for folder in rungs}
rows = []
for folder in rungs:
    config, card, score = load(folder).config, records[folder.name], race.score(f"models/{folder.name}")
    rows.append({"model": folder.name, "blocks": config.num_hidden_layers, "width": config.hidden_size,
                 "heads": config.num_attention_heads, "MLP": config.intermediate_size, "parameters": card["parameters"],
                 "tokens": card["stream"]["tokens"], "peak rate": card["settings"]["peak_lr"],
                 "held-out, measured here": score["ppl"], "held-out, card": card["perplexity"]["heldout"]["value"],
                 "King James, card": card["perplexity"]["foreign"]["value"], "minutes": card["seconds"] / 60})
pd.DataFrame(rows).style.hide(axis="index").format(precision=2, thousands=",").format("{:g}", subset=["peak rate"])

# %%
plots.pretraining({name: record["curve"] for name, record in records.items()})

# %% [markdown]
# The learning rate of each rung comes from a short sweep (quick held-out perplexity, same data):

# %%
pd.DataFrame({name: {row["peak_lr"]: row["ppl"] for row in record.get("sweep", [])} for name, record in records.items()}
             ).rename_axis("peak rate").style.format(precision=1).format_index("{:g}")

# %% [markdown]
# ## The wiring
#
# Every weight has named axes; an axis is made smaller by a map. This table is generated from the one the code uses. A *read-in* is
# fronted by a norm and takes the rescale lever; a *read-out* writes to the stream with no norm in between and takes compensation.

# %%
pd.DataFrame([{"role": role.name, "axes (out, in)": " x ".join(role.axes), "lever": role.lever or "-",
               "stored in": role.path + ("" if role.slot is None else f" [{'qkv'[role.slot]} of each head]")}
              for role in wiring_of(race.target).roles if len(role.axes) == 2]).style.hide(axis="index")

# %% [markdown]
# What the pair asks of it: all sizes shrink or stay, and each rotary pair of the target must turn exactly as fast
# as a pair of the donor.

# %%
donor, target = shape_of(race.donor.config), shape_of(race.target)
check_pair(donor, target)
pairs = match_frequencies(donor, target)
print(f"donor {donor}\ntarget {target}\nthe target's rotary pairs are the donor's {pairs}")

# %% [markdown]
# ## Exactness
#
# A model rebuilt from its own extracted weights must give the same logits to the last bit; then whatever a conversion loses is
# the fault of its mathematics, not of the assembly.

# %%
rows = []
for folder in rungs:
    for dtype in (torch.float32, torch.bfloat16):
        model = load(folder, dtype)
        rebuilt = assemble(extract(model), model.config)
        ids = torch.as_tensor(frozen[:4])
        with torch.no_grad():
            difference = (model(input_ids=ids).logits - rebuilt(input_ids=ids).logits).abs().max().item()
        rows.append({"model": folder.name, "dtype": str(dtype).removeprefix("torch."), "max |difference|": difference})
pd.DataFrame(rows).style.hide(axis="index").format({"max |difference|": "{:g}"})
