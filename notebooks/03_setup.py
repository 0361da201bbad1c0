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
# GPT-NeoX models trained on the same text in the same order, with Pythia's shapes at an eighth of the width. The page below is of
# one experiment; `-p experiment mini` (or `primary`) makes it of a pair of Pythias and the Pile.

# %% tags=["parameters", "hide-input"]
experiment: str = "nano"  # a file of params/

# %% tags=["hide-input"]
given = dict(globals())  # before any import: nothing but parameters may be here
from scaleop.experiment import from_notebook

chosen, _ = from_notebook(given)

# %% tags=["hide-input"]
import pandas as pd
import torch

from scaleop import lineup, plots
from scaleop.race import Race
from scaleop.wiring import check_pair, match_frequencies, shape_of, wiring_of

plots.notebook()
race = Race(chosen)
corpus = race.corpus

# %% [markdown]
# ## The text
#
# At laptop size nothing is downloaded at run time: the text travels in pip packages. Training uses the State of the Union addresses
# and the prose of a dictionary; every twelfth address is held out and plays WikiText-103's part, the King James Bible plays C4's. A
# pair of Pythias reads the Pile itself, as far as it needs it, and is measured on WikiText-103 and C4.

# %%
pd.DataFrame(corpus.sources()).style.hide(axis="index").format(thousands=",")

# %% [markdown]
# Documents are tokenised whole, joined by one end-of-text token each and cut into blocks. The head of the stream is the *frozen
# probe set*; training starts behind it, and each seed at its own place.

# %%
frozen, places = corpus.frozen(), corpus.places(chosen.seeds, race.recipe.consumed)
print(corpus.extent())
print(f"frozen probe set: {frozen.shape[0]:,} x {frozen.shape[1]} tokens, the stream's first {corpus.guard:,}")
pd.DataFrame(places).style.hide(axis="index").format(thousands=",")

# %% [markdown]
# ## The models
#
# At laptop size these are the rungs of the ladder. Held-out perplexity is measured here, on the checkpoints as they are shipped, and
# set beside what each model's card says.

# %%
models = lineup.lineup(chosen)
cards = lineup.cards(models)
pd.DataFrame([{"model": short, **lineup.row(race, name, cards.get(short))} for short, name in models.items()]
             ).style.hide(axis="index").format({"peak rate": "{:g}"}, precision=2, thousands=",")

# %%
(plots.pretraining({name: card["curve"] for name, card in cards.items()}) if cards
 else print("These models were trained elsewhere, and their model cards say how."))

# %% [markdown]
# The learning rate of each rung of the ladder comes from a short sweep (quick held-out perplexity, same data):

# %%
sweeps = {name: {row["peak_lr"]: row["ppl"] for row in card.get("sweep", [])} for name, card in cards.items()}
(pd.DataFrame(sweeps).rename_axis("peak rate").style.format(precision=1).format_index("{:g}") if sweeps
 else print("No rung of the ladder is among these models."))

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
pd.DataFrame([{"model": short, "dtype": str(dtype).removeprefix("torch."),
               "max |difference|": lineup.rebuilt_difference(name, frozen[:4], dtype)}
              for short, name in models.items() for dtype in (torch.float32, torch.bfloat16)]
             ).style.hide(axis="index").format({"max |difference|": "{:g}"})
