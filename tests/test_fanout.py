"""Runs without pages: which ones a command names, what each asks for, and Snakemake's plan of them."""

import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from safetensors import safe_open
from transformers import AutoConfig, GPTNeoXConfig

from scaleop import fanout
from scaleop.experiment import ExperimentError, load_experiment
from scaleop.fanout import Asked, fan_out
from scaleop.paths import ROOT

TOTALS = {  # as Pythia's own table counts them
    70_426_624: (6, 512, 8, 50_304), 162_322_944: (12, 768, 12, 50_304), 405_334_016: (24, 1024, 16, 50_304),
    1_414_647_808: (24, 2048, 16, 50_304), 6_857_302_016: (32, 4096, 32, 50_432)}


def config_of(layers, width, heads, vocab):
    return GPTNeoXConfig(num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
                         intermediate_size=4 * width, vocab_size=vocab)


# Which runs

def runs(**asked):
    return {name: found[1] for name, found in fan_out(Asked(**asked)).items()}


def test_without_arms_and_seeds_it_is_each_experiments_plan():
    assert runs(experiments="toy_long, toy") == {
        "toy_long": [("subclone", 0), ("hybrid", 0)],
        "toy": [(arm, 0) for arm in ("random", "projection", "subclone", "subclone_iso", "hybrid", "subclone_rs",
                                     "hybrid_rs")] + [("subclone_rs", 1), ("hybrid_rs", 1)]}


def test_arms_and_seeds_are_crossed():
    both = [(arm, seed) for arm in ("random", "hybrid") for seed in (0, 2)]
    assert runs(experiments="nano,heldout", arms="random,hybrid", seeds="0,2") == {"nano": both, "heldout": both}
    assert runs(experiments="toy_long", seeds=3) == {"toy_long": [("subclone", 3), ("hybrid", 3)]}
    assert runs(experiments="toy", arms="stride") == {"toy": [("stride", 0), ("stride", 1)]}
    assert runs(experiments="toy", arms="stride,stride", seeds="1,1") == {"toy": [("stride", 1)]}


def test_training_seeds_and_files_are_named_like_everywhere(tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: toy_long\nname: mine\n")
    found = fan_out(Asked(f"mini@seed1,mini@seed2,{tmp_path / 'mine.yaml'}", tokens=4_096))
    assert [(each.name, each.race.tokens) for each, _ in found.values()] == [
        ("mini@seed1", 4_096), ("mini@seed2", 4_096), ("mine", 4_096)]


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(ExperimentError, match=r"--config seed=3: unknown key; did you mean 'seeds'\?"):
        Asked.of({"experiments": "toy", "seed": 3})
    with pytest.raises(ExperimentError, match="'tou' is not in params/"):
        fan_out(Asked("tou"))
    with pytest.raises(ExperimentError, match=r"--config launch=\S+mine.yaml: there is no such file; `accelerate"):
        Asked.of({"experiments": "toy", "launch": "mine.yaml", "gpus": 2})
    with pytest.raises(ExperimentError, match="is for runs of several processes: give gpus=4, say"):
        Asked.of({"experiments": "toy", "launch": str(ROOT / "params" / "toy.yaml")})


def test_files_are_found_from_wherever_a_job_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("extends: toy_long\nname: mine\n")
    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\n")
    asked = Asked.of({"experiments": "toy, mine.yaml", "launch": "fsdp.yaml", "gpus": 4})
    assert (asked.experiments, asked.launch) == (f"toy,{tmp_path / 'mine.yaml'}", str(tmp_path / "fsdp.yaml"))
    assert list(fan_out(asked)) == ["toy", str(tmp_path / "mine.yaml")]


# What a run asks for

@pytest.mark.parametrize(("total", "shape"), TOTALS.items())
def test_weights_are_counted_as_pythias_table_counts_them(total, shape):
    assert fanout.weights(config_of(*shape)) == total


def test_weights_are_those_in_the_file():
    with safe_open(ROOT / "models" / "nano-s" / "model.safetensors", framework="pt") as file:
        stored = sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
    assert fanout.weights(AutoConfig.from_pretrained(ROOT / "models" / "nano-s")) == stored


def opened(tmp_path, donor, target, tokens, arm="hybrid_rs"):
    """What `needs` reads of a Race: models of TOTALS' weights."""
    folder = tmp_path / str(donor)
    config_of(*TOTALS[donor]).save_pretrained(folder)
    race = SimpleNamespace(arms=["random", arm], leaders=[])
    return SimpleNamespace(experiment=SimpleNamespace(pair=SimpleNamespace(donor=str(folder)), race=race),
                           target=config_of(*TOTALS[target]), recipe=SimpleNamespace(consumed=tokens))


def test_needs_grow_with_the_models_and_the_tokens(tmp_path):
    primary = fanout.needs(opened(tmp_path, 1_414_647_808, 405_334_016, 30_015_488))
    # 18 x 405M x 30M / 2e13 = 10,950 s = 182.5 min and an hour; 3 GB + 12 x 1.41G + 16 x 405M bytes
    assert primary == (26_461, 243, 1, 1, 4)
    scale = fanout.needs(opened(tmp_path, 6_857_302_016, 1_414_647_808, 30_015_488))
    assert scale == (107_922, 697, 1, 1, 4)
    assert fanout.needs(opened(tmp_path, 1_414_647_808, 405_334_016, 30_015_488), gpus=4) == (45_917, 106, 4, 4, 16)
    taught = opened(tmp_path, 1_414_647_808, 405_334_016, 30_015_488, "hybrid_rs_distill")
    assert fanout.needs(taught) == primary  # one process has the donor already; of four the others load and copy it
    assert fanout.needs(taught, gpus=4).mem_mb == 45_917 + round(3 * 8 * 1_414_647_808 / 1e6)


def test_a_small_target_asks_for_no_gpu_unless_told(tmp_path):
    small = opened(tmp_path, 162_322_944, 70_426_624, 1_000_000)
    # 18 x 70.4M x 1M / 2e10 = 63,384 s = 1,056.4 min on a core
    assert fanout.needs(small) == (6_075, 1_117, 0, 1, 1)
    assert fanout.needs(small, processes=2) == (7_202, 589, 0, 2, 2)
    assert (fanout.needs(small, gpus=1).gpu, fanout.needs(small, gpus=1).runtime) == (1, 62)
    large = opened(tmp_path, 405_334_016, 162_322_944, 1_000_000)
    assert fanout.needs(large).gpu == 1 and fanout.needs(large, gpus=0).gpu == 0


def test_several_processes_go_through_accelerate():
    assert fanout.launcher(fanout.Needs(1, 1, 1, 1, 4)) == []
    one = fanout.launcher(fanout.Needs(1, 1, 2, 2, 8))
    assert one[:2] == ["-m", "accelerate.commands.launch"] and one[one.index("--num_processes") + 1] == "2"


def test_accelerate_takes_fsdp_from_the_file_that_is_named(tmp_path):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    (tmp_path / "fsdp.yaml").write_text(
        "{compute_environment: LOCAL_MACHINE, distributed_type: FSDP, fsdp_config: {fsdp_version: 2}, num_processes: 8,"
        " mixed_precision: 'no', num_machines: 1, machine_rank: 0, rdzv_backend: static, same_network: true,"
        " main_training_function: main, use_cpu: false}")
    read = {}
    for configuration in (None, str(tmp_path / "fsdp.yaml")):
        words = fanout.launcher(fanout.Needs(1, 1, 2, 2, 8), configuration)[2:]
        given = launch_command_parser().parse_args([*words, "-m", "scaleop.race"])
        said = _validate_launch_command(given)[0]
        read[bool(configuration)] = said.use_fsdp, said.multi_gpu, said.num_processes
    assert read == {False: (False, True, 2), True: (True, False, 2)}


# Snakemake's plan

def dry_run(store, *config):
    """What `snakemake race -n` says, and its exit status."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "snakemake", "race", "-n", "--printshellcmds", "--nolock", "--cores", "8",
         "--snakefile", str(ROOT / "Snakefile"), *(["--config", *config] if config else [])], cwd=store,
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, "SCALEOP_STORE": str(store)})
    return done.stdout + done.stderr, done.returncode


@pytest.mark.slow  # seconds alone, but half a minute where a machine is busy
def test_snakemake_plans_the_runs_and_no_page(tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: toy_long\nname: mine\n")  # named as it lies where the call is made
    said, code = dry_run(tmp_path, "experiments=toy,mine.yaml", "arms=random,hybrid_rs", "seeds=0,1", "processes=2")
    assert code == 0, said
    commands = [line.strip() for line in said.splitlines() if "-m scaleop.race" in line]
    assert len(commands) == 8 and "pages/" not in said
    for name in ("toy", str(tmp_path / "mine.yaml")):
        tokens = load_experiment(name).race.tokens
        for arm in ("random", "hybrid_rs"):
            for seed in (0, 1):
                assert sum(f"-m scaleop.race --experiment {name} --arm {arm} --seed {seed} --tokens {tokens}" in command
                           for command in commands) == 1
    assert all("-m accelerate.commands.launch" in command and "--num_processes 2" in command
               and "ACCELERATE_USE_CPU=true" in command for command in commands)
    assert "threads: 2" in said and "gpu=0" in said


@pytest.mark.slow
def test_snakemake_asks_which_runs(tmp_path):
    said, code = dry_run(tmp_path)
    assert code == 1 and "which runs? Say so: snakemake race --config experiments=" in said
