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
# # 12 · Speed and memory
#
# **Asked.** What do conversion, training and evaluation cost at the sizes of the paper, and what does doing them with care save
# against doing them the plain way?
#
# **The paper's answer** ({cite}`yenugula2026wiring`). It names the machine of its runs, and gives no cost of any part of them.
#
# **Here.** Each script of `benchmarks/` measures ours and the plain way side by side, in one run on one machine, with random weights
# where the shape is a Pythia's. This page shows what is kept of those runs, and runs none of them. A ratio above 1 means that ours is
# the better one; seconds and tokens a second alone belong to the machine.

# %% tags=["parameters", "hide-input"]
experiment: str = "nano"  # a file of params/; the benchmarks name their own shapes, so it changes nothing here

# %% tags=["hide-input"]
given = dict(globals())  # before any import: nothing but parameters may be here
from scaleop.experiment import from_notebook

chosen, _ = from_notebook(given)

# %% tags=["hide-input"]
import pandas as pd
from IPython.display import display

from scaleop import benchmarks, plots
from scaleop.store import record

plots.notebook()
pd.set_option("display.max_colwidth", None)
found = benchmarks.results()

# %% [markdown]
# ## At a glance

# %%
print("\n".join(benchmarks.missing(found)) or "every benchmark has been run")
plots.ratios(benchmarks.comparisons(found))

# %% [markdown]
# ## Converting a checkpoint
#
# `python -m scaleop convert` reads the donor from its files a block at a time and pushes the calibration text through one block after
# the other. The plain way loads the donor, takes its weights apart and holds the moments of all blocks at once.

# %%
display(benchmarks.shown("conversion", found))

# %% [markdown]
# ## Second moments
#
# Compensation needs the columns $\Sigma_{:,K}$ of the kept inputs. The plain way has hooks on the read-outs of every block add the
# whole square $x x^\top$ to an fp32 sum. Ours forms the kept columns of the kept blocks only. With sums in fp64, which all runs of this
# book use, half of the columns take as much memory as the whole square in fp32: what is saved is time. Sums in fp32, as in
# the paper, halve the memory (`second_moments(..., dtype=torch.float32)`). Seconds are the processor's.

# %%
display(benchmarks.shown("moments", found))
for way, error in found.get("moments", {}).get("precision", {}).items():
    print(f"{way}: relative error {error:.1e} against fp64 throughout")

# %% [markdown]
# ## Perplexity
#
# Windows of equal length go through the model in batches, and the output head sees only positions that are scored. The plain way takes
# one window at a time with all its logits.

# %%
display(benchmarks.shown("perplexity", found), benchmarks.shown("perplexity_160m", found))

# %% [markdown]
# ## A training step, faster
#
# The race's loop (bf16 around forward and loss, fused AdamW, large buffers kept) against the same step in fp32 as anybody would write
# it first. A processor without bf16 instructions imitates them, at several times the cost: there `precision: "no"`, which `mini`
# has, is the faster one.

# %%
display(benchmarks.shown("training", found), benchmarks.shown("training_160m", found))

# %% [markdown]
# ## A training step, smaller
#
# Micro-batches, checkpointed activations and a loss that never holds all the logits, each alone and all together: what they leave of
# the plain step's peak. They change no result by more than rounding. Below, what a step of the paper's pairs needs: computed, without
# running anything, for all of a step's 32 (or 16) sequences at once and with the settings of `params/`.

# %%
display(benchmarks.shown("memory", found), benchmarks.shown("footprint", found))

# %% [markdown]
# ## On a GPU
#
# Training tokens a second of the race's own loop at two of the paper's shapes, perplexity, both passes through a donor, a conversion.
# The share of peak counts the model's FLOPs alone; what is computed twice to save memory does not count.

# %%
display(benchmarks.shown("gpu", found))

# %% [markdown]
# ## Provenance

# %% tags=["hide-input"]
record("12_speed", experiment=chosen.name, comparisons=[row._asdict() for row in benchmarks.comparisons(found)])
display(benchmarks.origins(found).style.hide(axis="index"))

# %% [markdown]
# ## Try it
#
# ```bash
# python benchmarks/moments.py                   # any of them: minutes, on a machine that does nothing else
# bash benchmarks/gpu.sh                         # with a GPU; made for ten minutes
# python -m scaleop.reproduce --only 12          # this page, with what they found
# ```
