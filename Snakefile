# `make reproduce`: every page of the book, and the race runs behind it, as jobs of Snakemake.
#
#     make reproduce JOBS=2                                 # the usual way: scaleop.reproduce calls Snakemake
#     snakemake --cores 2 --rerun-incomplete                # the same jobs with Snakemake's own reports
#     snakemake --cores 2 --config experiment=toy seed=1    # --config: the notebooks' parameters
#     snakemake -n pages/07_race.ipynb                      # what would run for one page, and why
#
# `snakemake race`: runs alone, of any experiments, arms and seeds, here or on a cluster (fanout.Asked lists the keys).
#
#     snakemake race --cores 2 --config experiments=nano,nano_depth arms=subclone_rs,hybrid_rs seeds=0,1,2
#     snakemake race --profile profiles/slurm --config experiments=primary,heldout
#
# All that Snakemake tracks lies in the store (book/ of a fresh clone holds committed pages whose times say nothing), so
# a clean store runs everything. What makes an output stale:
# - A run (runs/.../result.json): never. Its folder's name holds the digest of all that determines it (race.PROTOCOL among
#   that), so another budget, donor or protocol is another file, and a run made by a notebook counts. A run that was
#   deleted is trained again when a page that shows it is next made.
# - A page (pages/<section>.ipynb): a change of its notebook, of the parameters, of a file of params/ that it uses, of the
#   models, of the runs it shows, of the committed results among them, or of any module of scaleop but the drivers. Contents count, not times; of code, neither
#   comments nor layout. A change of code that matters to no page still reruns them: that costs minutes (what is cached in
#   the store is found again), and guessing which code matters could leave a page that nobody can reproduce.
# - Not watched: versions of packages, a page in book/ that was edited by hand (scaleop.reproduce puts it right), and what
#   page 10 shows of the results of other pages.
#   `make reproduce ARGS=--force` runs pages whether stale or not.
#
# Jobs share nothing but the store, whose locks let one job wait for another that makes the same file, and each keeps to
# one thread: two single-threaded jobs side by side do a fifth more than one after the other on two threads. Priorities put
# the longest job first, so that no core idles at the end: runs (tokens) before pages (seconds, as the book has them).

import json
import os
import shlex
import sys

from scaleop import fanout, paths, plan, reproduce
from scaleop.experiment import ExperimentError, from_notebook

if workflow.is_main_process:  # jobs start in the store, and on a cluster each reads this file again
    PARAMETERS = fanout.absolute({key: reproduce.parameter(str(value)) for key, value in config.items()})
    os.environ["SCALEOP_PARAMETERS"] = json.dumps(PARAMETERS)
else:
    PARAMETERS = json.loads(os.environ["SCALEOP_PARAMETERS"])
ASKED = fanout.Asked.of(PARAMETERS) if "experiments" in PARAMETERS else None  # runs alone, no pages
FANNED = fanout.fan_out(ASKED) if ASKED else {}
EXPERIMENT, SEED = from_notebook({} if ASKED else PARAMETERS)
NOTEBOOKS = {} if ASKED else {path.stem: path.resolve() for path in reproduce.sections()
                              if plan.lacking(path.stem, PARAMETERS) is None}  # a page that cannot be made here stays
SHOWN = {each.name: each for each, _ in FANNED.values()} or plan.shown(NOTEBOOKS, EXPERIMENT)
FILES = {name: name for name in SHOWN} | {EXPERIMENT.name: PARAMETERS.get("experiment", EXPERIMENT.name)} | {
    each.name: name for name, (each, _) in FANNED.items()}

# On a cluster, Snakemake calls itself again around each job. Those calls inherit what each run needs: they open no model,
# ask nothing of the hub, and take a second each.
if ASKED and not workflow.is_main_process:
    RACES, NEEDS = {}, {name: fanout.Needs(*found) for name, found in json.loads(os.environ["SCALEOP_NEEDS"]).items()}
else:
    RACES = plan.opened(SHOWN)
    NEEDS = {name: fanout.needs(race, *((ASKED.gpus, ASKED.processes) if ASKED else ())) for name, race in RACES.items()}
    os.environ["SCALEOP_NEEDS"] = json.dumps(NEEDS)


def result(experiment, arm, seed):
    """The output of a run."""
    return f"runs/{experiment}/{arm}/{RACES[experiment].folder(arm, seed).name}/result.json"


def fanned(wildcards):
    """The outputs of all runs that are asked for."""
    if not FANNED:
        raise ExperimentError("which runs? Say so: snakemake race --config experiments=primary,heldout")
    return [result(each.name, arm, seed) for each, runs in FANNED.values() for arm, seed in runs]


def needs(what):
    """How much of something a run asks for, by its wildcards."""
    return lambda wildcards: getattr(NEEDS[wildcards.experiment], what)


NEEDED = {section: [result(*run) for run in plan.needed(section, EXPERIMENT, SEED)] for section in NOTEBOOKS}
OPTIONS = [word for key, value in sorted(PARAMETERS.items()) for word in ("-p", key, str(value))]

# Jobs start in the store; whatever they call must find the same store and repository.
os.environ.update(SCALEOP_STORE=str(paths.STORE.resolve()), SCALEOP_HOME=str(paths.ROOT.resolve()))
os.makedirs(paths.STORE, exist_ok=True)

# told NAME LOG COMMAND...: run the command, say on stdout what runs and how long it took; its own output goes to the log,
# whose end is shown when it fails.
shell.prefix("""
told() {{
    name=$1 log=$2; shift 2; echo "$name ..."
    trap 'exit 130' INT  # who interrupts does not ask for logs
    "$@" > "$log" 2>&1 && {{ echo "$name: $SECONDS s"; grep '^note: ' "$log" || true; }} || {{
        echo "$name FAILED after $SECONDS s:"; tail -n 45 "$log"; exit 1; }}
}}
export OMP_NUM_THREADS=1 TQDM_DISABLE=1
""")


workdir: str(paths.STORE.resolve())


wildcard_constraints:
    section="|".join(NOTEBOOKS) or "none",
    seed=r"\d+",
    key="[0-9a-f]+",


rule all:
    input:
        expand("pages/{section}.ipynb", section=NOTEBOOKS),


rule race:
    input:
        fanned,


rule page:
    input:
        notebook=lambda wildcards: ancient(str(NOTEBOOKS[wildcards.section])),
        runs=lambda wildcards: NEEDED[wildcards.section],
    output:
        "pages/{section}.ipynb",
    params:
        made_of=lambda wildcards: plan.ingredients(NOTEBOOKS[wildcards.section],
                                                    plan.chosen(wildcards.section, PARAMETERS)),
        options=shlex.join(OPTIONS),
    log:
        "pages/{section}.log",
    benchmark:
        "pages/{section}.tsv"
    threads: 1
    priority: lambda wildcards: plan.seconds(NOTEBOOKS[wildcards.section])
    resources:
        mem_mb=4000,
        runtime=60,
    shell:
        "told {wildcards.section} {log} {sys.executable:q} -m scaleop.reproduce --page {wildcards.section} {params.options}"


rule run:
    output:
        # update: a finished run that Snakemake would delete before repeating its job is found, not trained again
        update("runs/{experiment}/{arm}/seed{seed}-{key}/result.json"),
    params:
        file=lambda wildcards: FILES[wildcards.experiment],
        tokens=lambda wildcards: SHOWN[wildcards.experiment].race.tokens,
        launcher=lambda wildcards: shlex.join(fanout.launcher(NEEDS[wildcards.experiment], ASKED and ASKED.launch)),
        each=lambda wildcards: NEEDS[wildcards.experiment].threads // NEEDS[wildcards.experiment].processes,
        cpu=lambda wildcards: str(NEEDS[wildcards.experiment].gloo).lower(),
    log:
        "runs/{experiment}/{arm}/seed{seed}-{key}/job.log",
    benchmark:
        "runs/{experiment}/{arm}/seed{seed}-{key}/job.tsv"
    threads: needs("threads")
    priority: lambda wildcards: SHOWN[wildcards.experiment].race.tokens
    resources:
        mem_mb=needs("mem_mb"),
        runtime=needs("runtime"),
        gpu=needs("gpu"),
    shell:
        "export OMP_NUM_THREADS={params.each} ACCELERATE_USE_CPU={params.cpu}; "
        "told '{wildcards.experiment} {wildcards.arm} seed {wildcards.seed}' {log} {sys.executable:q} {params.launcher}"
        " -m scaleop.race"
        " --experiment {params.file:q} --arm {wildcards.arm} --seed {wildcards.seed} --tokens {params.tokens}"
