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
# # 8 · Hardening: other metrics, longer budgets, another pair
#
# **Asked.** The race is one metric at one budget on one pair. Does its order survive other text, a longer context, tasks, more
# training, and a pair whose damage lies in depth rather than width?
#
# **The paper's answer** ({cite}`yenugula2026wiring`, section 7.5). The order hybrid, subclone, projection, random holds on every
# metric. At 3.3 times the budget hybrid's lead persists; at 33 times the two leaders converge to the same perplexity, both ahead of
# training from scratch. On the depth pair transfer still wins by a wide margin, the stack keeps its edge, and compensation alone is
# neutral: it repairs width, not deleted blocks.
#
# The trained models of [the race](07_race.ipynb) are measured again here, so this page runs quickly after that one, and alone it first
# runs what it needs.

# %% tags=["parameters", "hide-input"]
experiment: str = "nano"  # a file of params/; its companions say which longer budgets and which depth pair
seed: int = 0  # which stretch of the text the main race trained on
tokens: int = None  # training tokens per arm of the main race; the companions keep their proportion. None: the experiment's

# %% tags=["hide-input"]
given = dict(globals())  # before any import: nothing but parameters may be here
from scaleop.experiment import from_notebook

chosen, seed = from_notebook(given)

# %% tags=["hide-input"]
import time

import pandas as pd
from IPython.display import display

from scaleop import claims, hardening, plots, published, tasks
from scaleop.claims import Experiments, Measured, Standings, evaluate, tabulate, to_records
from scaleop.committed import kept
from scaleop.experiment import companion, planned
from scaleop.race import Race
from scaleop.store import record

plots.notebook()
pd.set_option("display.max_colwidth", None)
began = time.monotonic()

# %% [markdown]
# ## What runs
#
# Races with the same code and, but for the budget and the pair, the same settings. Those at 33 times the budget, those
# of the two leaders at 3.3 times and those of the depth pair at 3.3 times are too long for a default run: they are made once, and
# their results are stored beside this book (a race that shows no runs here has not been made yet).

# %%
race = Race(chosen)
others = {role: Race(found) for role in ("long", "depth", "convergence", "depth_long")
          if (found := companion(chosen, role)) is not None}
results = {"": race.runs(planned(chosen, seed))}
results |= {role: other.runs(planned(other.experiment)) for role, other in others.items() if role in ("long", "depth")}
for role, other in others.items():
    results[role] = [*(ran := results.get(role, [])), *kept(other, besides=ran)]
anchors = {"": race.anchors(), **{role: other.anchors() for role, other in others.items()}}
display(pd.DataFrame([{"race": (others.get(role) or race).experiment.title, "tokens an arm": (others.get(role) or race).recipe.consumed,
                       "runs": len(found)} for role, found in results.items()]).style.hide(axis="index").format(thousands=","))

# %% [markdown]
# ## Four tasks
#
# LAMBADA, HellaSwag, ARC and PIQA ({cite}`paperno2016lambada,zellers2019hellaswag,clark2018arc,bisk2020piqa`) are written for
# models that have read the web, and a pair of Pythias is asked them as they are; a model of a few million weights and a vocabulary
# of 4,096 needs its own, made from the text at hand. Each of those copies the *form* of one of them. All have a known guess floor
# and are scored by lm-eval itself, zero-shot, as plain accuracy. Items of our own are drawn from the held-out addresses, except for
# the definitions: the whole dictionary is in the training split, so these come from parts of it that no run of the short race reads
# (checked below; the donor and the sibling did read them in pretraining, and the longest runs do too).

# %%
made = tasks.task_folder(race.corpus)
table, leaked = hardening.asked(race, results[""])
display(table.style.hide(axis="index").format(precision=2))

# %%
first = {name: tasks.read_items(made, name)[0] for name in tasks.FLOORS}
display(pd.DataFrame([{"task": name, "context": item["context"], "choices": " / ".join(item["choices"]),
                       "right": item["choices"][item["gold"]]} for name, item in first.items()]).style.hide(axis="index"))

# %% [markdown]
# ## Table 7: every metric
#
# At laptop size perplexity on the King James Bible stands where the paper has C4; *double context* is perplexity with windows of
# twice the training length, on the first 200,000 held-out tokens. Accuracies with their standard errors.

# %%
shown = ("random", "projection", "subclone", "hybrid", "subclone_rs", "hybrid_rs")
trained = [result["arm"] for result in results[""] if result["seed"] == seed]
extended = {arm: hardening.extended(race, race.folder(arm, seed) / "model") for arm in shown if arm in trained}
pair = chosen.pair
extended |= {role: hardening.extended(race, name)
             for role, name in (("sibling", pair.reference), ("donor", pair.donor)) if name is not None}
hardening.table7(extended).style.hide(axis="index")

# %% [markdown]
# ## A longer budget
#
# Where does hybrid's curve, at 3.3 times the budget, pass the point where subclone ends? The paper reads hybrid's *quick* perplexity
# against subclone's *full* one; the second row compares quick with quick.

# %%
several = Experiments({role: Standings(found, anchors[role]) for role, found in results.items() if found})
claims.crossings(several, "long").style.hide(axis="index")

# %%
plots.budgets(results, anchors[""], published.curves(), published.anchors())

# %% [markdown]
# ## The depth pair
#
# Depth halves and whole heads go, while width loses only a quarter. Table 9 with our seeds beside the paper's, then Figure 4: bands
# reach from the least to the most of the seeds.

# %%
claims.depth(results.get("depth", [])).style.hide(axis="index")

# %%
claims.versus(results.get("depth", []), [("subclone", "hybrid"), ("subclone_rs", "hybrid_rs")],
              claims.seeds_in_paper(claims.TABLE_9)).style.hide(axis="index")

# %%
if "depth" in others:
    display(plots.recovery(results["depth"], anchors["depth"]))
    depth = {arm: hardening.extended(others["depth"], others["depth"].folder(arm, others["depth"].experiment.seeds[0]) / "model")
             for arm in ("random", "subclone", "hybrid")}
    display(hardening.table7(depth, pair="pairB").style.hide(axis="index"))

# %% [markdown]
# ## The claims of section 7.5

# %%
measured = Measured(extended | {f"depth.{arm}": values for arm, values in (depth if "depth" in others else {}).items()}
                    | {f"convergence.{result['arm']}": result["extended"] for result in results.get("convergence", [])
                       if "extended" in result})
findings = [*evaluate([*claims.BUDGET_CLAIMS, *claims.DEPTH_CLAIMS], several), *evaluate(claims.EXTENDED_CLAIMS, measured)]
tabulate(findings).style.hide(axis="index")

# %% [markdown]
# ## Provenance

# %% tags=["hide-input"]
record("08_hardening", experiment=chosen.name, seeds=chosen.seeds, runs=results, anchors=anchors, extended=measured.values,
       leakage=leaked, findings=to_records(findings))
display(claims.runs_behind([result for found in results.values() for result in found]).style.hide(axis="index").format(precision=1))
print(f"this page took {time.monotonic() - began:.0f} s, finished runs reused")

# %% [markdown]
# ## Try it
#
# ```bash
# papermill notebooks/08_hardening.ipynb out.ipynb -p experiment toy             # a smoke test
# papermill notebooks/08_hardening.ipynb out.ipynb -p tokens 200000              # every budget in proportion
# python -m scaleop.committed --experiment nano_convergence --extended           # the longest runs, anew (hours)
# ```
