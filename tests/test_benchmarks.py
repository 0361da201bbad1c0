"""The benchmarks' own code at a tiny size, and the tables of what they found."""

import json
import os
import runpy
import subprocess
import sys

import pytest
import torch
from matplotlib.colors import to_hex
from torch.utils.flop_counter import FlopCounterMode

from scaleop import benchmarks, convert, plan, plots
from scaleop.experiment import load_experiment
from scaleop.paths import NOTEBOOKS, ROOT
from scaleop.weights import empty_model

FOLDER = ROOT / "benchmarks"


def script(name):
    """What a script of benchmarks/ defines; it must find the repository as its own process would."""
    return runpy.run_path(str(FOLDER / f"{name}.py"))


@pytest.fixture(scope="module")
def gpu():
    return script("gpu")


def test_a_step_has_the_flops_that_torch_counts(gpu):
    config = gpu["pythia"](layers=2, width=32, heads=4, vocab=50)
    config._attn_implementation = "eager"
    rows = torch.zeros(3, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        empty_model(config)(input_ids=rows).logits.sum().backward()
    assert counter.get_total_flops() == rows.numel() * gpu["step_flops"](config, 16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the peaks of its memory are there too")
def test_the_gpu_benchmark_runs_at_a_tiny_size_and_says_so(gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(convert, "STORE", tmp_path / "store")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tiny", "--out", str(tmp_path / "gpu.json")])
    gpu["main"]()
    assert "at a tiny size: these say that the code works, and nothing of speed" in capsys.readouterr().out
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["tiny"] is True and found["peak"] is None and found["hardware"]["device"] == "cpu"
    step = found["training 410m"]
    assert (step["batch"], step["length"], step["micro_batch"], step["share_of_peak"]) == (4, 32, 2, None)
    config = gpu["pythia"](2, 64, 4, 4096)
    assert step["flops_per_second"] == pytest.approx(step["tokens_per_second"] * gpu["step_flops"](config, 32))
    assert step["share_of_product"] == pytest.approx(step["flops_per_second"] / found["product"])
    steps = gpu["STEPS"] + gpu["WARMUP"]  # the median step is as long as at least half of the timed ones
    assert 4 * 32 / step["tokens_per_second"] * gpu["STEPS"] / 2 < step["whole_s"] and steps == 13
    for name, rate, tokens, seconds in (("perplexity 410m", "tokens_per_second", 400, "perplexity_s"),
                                        ("donor 1.4b", "moments_tokens_per_second", 40 * 128, "moments_s")):
        assert found[name][rate] == pytest.approx(tokens / found[name][seconds])
    assert found["conversion 410m -> 160m"]["conversion_s"] >= sum(
        found["conversion 410m -> 160m"]["seconds"].values()) - 0.2


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")
def test_the_shell_script_finds_its_python_and_refuses_without_a_gpu(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "TMPDIR": str(tmp_path)}
    run = subprocess.run(["bash", FOLDER / "gpu.sh"], env=environment, text=True, capture_output=True, check=False,
                         stdin=subprocess.DEVNULL, timeout=300, cwd=tmp_path)
    assert run.returncode == 2 and "there is no GPU that torch sees here: --tiny --out FILE" in run.stderr
    assert not list(tmp_path.iterdir())  # its store is gone
    environment["PYTHON"] = "/bin/true"  # a Python that has nothing
    broken = subprocess.run(["bash", FOLDER / "gpu.sh"], env=environment, text=True, capture_output=True, check=False,
                            stdin=subprocess.DEVNULL, timeout=60)
    assert broken.returncode == 1 and "/bin/true has no torch: name one that has" in broken.stderr


def test_moments_come_out_alike_whichever_way():
    moments = script("moments")
    model, sequences, kept = moments["opened"](width=32, heads=4, blocks=4, every=2, share=3 / 4, sequences=20)
    assert sorted(kept) == [(0, "MLP_DOWN"), (0, "O"), (2, "MLP_DOWN"), (2, "O")]
    assert [len(index) for _, index in sorted(kept.items())] == [96, 24, 96, 24]
    found = {name: run() for name, run in moments["variants"](model, sequences, kept).items()}
    exact = moments["full_square"](model, sequences, torch.float64)
    assert len(exact) == 8
    for name, sums in found.items():
        for key, index in kept.items():
            columns = sums[key][:, index] if name.startswith("full") else sums[key]
            assert torch.allclose(columns.double(), exact[key][:, index], rtol=1e-4, atol=1e-4), (name, key)


# The tables

ORIGIN = {"commit": "0123456789abcdef", "started": "2026-11-30T12:00:00+00:00",
          "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
          "hardware": {"machine": "x86_64", "threads": 1, "device": "cpu"}}
STEP = {"seconds": 10.0, "forward_s": 4.0}
FOUND = {
    "conversion": {
        "1.4b -> 410m": {**ORIGIN, "target": {"layers": 24}, "ways": {
            "streaming": {"peak GB": 3.0, "seconds": 100.0},
            "loading everything": {"peak GB": 21.0, "seconds": 80.0}}},
        "6.9b -> 1.4b": {**ORIGIN, "target": {"layers": 2}, "ways": {"streaming": {"peak GB": 8.5, "seconds": 900.0}}},
        "410m -> 160m": {**ORIGIN, "target": {"layers": 12}, "ways": {
            "streaming": {"peak GB": 1.0, "seconds": 10.0}, "loading everything": {"left out": "no memory"}}}},
    "moments": {**ORIGIN, "precision": {}, "shapes": {"1.4b -> 410m": {
        "memory": {"full square, fp32": {"bytes": 4e9}, "kept columns, fp64": {"bytes": 4e9},
                   "kept columns, fp32": {"bytes": 2e9}},
        "rounds": [{"full square, fp32": STEP, "kept columns, fp64": {**STEP, "seconds": 8.5},
                    "kept columns, fp32": {**STEP, "seconds": 7.0}},
                   {"full square, fp32": {**STEP, "seconds": 11.0}, "kept columns, fp64": {**STEP, "seconds": 8.0},
                    "kept columns, fp32": {**STEP, "seconds": 9.0}}]}}},
    "perplexity": {**ORIGIN, "seconds": {"one window at a time": [1.8, 1.6], "ours": [1.0, 1.2]}},
    "perplexity_160m": {**ORIGIN, "shape": "160m", "seconds": {"one window at a time": [30.0], "ours": [20.0]}},
    "training": {**ORIGIN, "tokens_per_second": {"plain": [6000, 7000.0], "ours": [12_000, 14_000.0],
                                                  "ours in fp32": [3500.0, 3000.0]}},
    "footprint": {**ORIGIN, "experiments": {"primary": {"plain": {"peak": 58e9}, "as in params": {"peak": 16e9}}}},
    "memory": {**ORIGIN, "variants": {"plain": {"peak": 8e9}, "micro_batch": {"peak": 5e9}, "all": {"peak": 4e9}}}}


def test_every_comparison_has_its_ratio_and_whether_its_aim_is_reached():
    rows = {row.what: row for row in benchmarks.comparisons(FOUND)}
    found = {what: (row.ratio and round(row.ratio, 2), row.met) for what, row in rows.items()}
    assert found == {
        "peak memory, 1.4b -> 410m": (7.0, True), "time, 1.4b -> 410m": (0.8, None),
        "peak memory, 6.9b -> 1.4b, 2 of 24 blocks made": (None, False),
        "time, 6.9b -> 1.4b, 2 of 24 blocks made": (None, None),
        "peak memory, 410m -> 160m": (None, None), "time, 410m -> 160m": (None, None),
        "peak memory, 1.4b -> 410m, fp64 sums": (1.0, False), "peak memory, 1.4b -> 410m, fp32 sums": (2.0, True),
        "time of the moments, 1.4b -> 410m, fp64 sums": (1.5, True),
        "time of the moments, 1.4b -> 410m, fp32 sums": (2.0, True),
        "time with the forward pass, 1.4b -> 410m, fp64 sums": (1.25, None),
        "time with the forward pass, 1.4b -> 410m, fp32 sums": (1.43, None),
        "strided perplexity, nano-m": (1.6, True), "strided perplexity, 160m": (1.5, True),
        "a training step, nano-m": (2.0, None), "a training step, nano-m in fp32": (0.5, None),
        "peak memory of a step, micro batch": (1.6, None), "peak memory of a step, all": (2.0, None),
        "computed peak of a step, primary": (3.62, True)}


def test_the_table_is_for_the_eye():
    table = benchmarks.table(benchmarks.comparisons(FOUND)).set_index("")
    assert dict(table.loc["peak memory, 1.4b -> 410m"]) == {
        "plain": "21 GB", "ours": "3 GB", "ratio": "7.00x", "aim": "under 4 GB", "reached": "yes"}
    assert dict(table.loc["a training step, nano-m"]) == {
        "plain": "7,000 tokens/s", "ours": "14,000 tokens/s", "ratio": "2.00x", "aim": "-", "reached": "-"}
    assert list(table.loc["peak memory, 6.9b -> 1.4b, 2 of 24 blocks made"]) == [
        "-", "8.5 GB", "-", "under 8 GB", "no"]


def test_what_was_not_measured_is_named_with_its_command():
    assert benchmarks.missing(FOUND) == ["training_160m: not measured yet (python benchmarks/training.py --shape 160m)",
                                         "gpu: not measured yet (bash benchmarks/gpu.sh)"]
    assert benchmarks.missing({"gpu": {}, **{name: {} for name in benchmarks.COMPARED if name != "moments"}}) == [
        "moments: not measured yet (python benchmarks/moments.py)"]
    assert "not measured yet" in benchmarks.shown("gpu", FOUND).data
    for command in benchmarks.COMMANDS.values():
        assert (ROOT / command.split()[1]).exists()


def test_a_gpus_figures_have_their_shares_where_they_are_known():
    step = {"tokens_per_second": 40_000.0, "share_of_product": 0.5, "whole_bytes": 20e9}
    table = benchmarks.gpu({
        "peak": None, "product": 1e12, "training 160m": {**step, "share_of_peak": 0.4},
        "training 410m": {**step, "share_of_peak": None, "whole_bytes": 21e9},
        "perplexity 410m": {"tokens_per_second": 1234.5}, "conversion 410m -> 160m": {"conversion_s": 61.25},
        "donor 1.4b": {"statistics_tokens_per_second": 9.0, "moments_tokens_per_second": 8.0, "moments_bytes": 7e9}})
    assert [list(row) for row in table.itertuples(index=False)] == [
        ["training 160m", "40,000", "40% of peak, 50% of a large product", "-", "20.00"],
        ["training 410m", "40,000", "50% of a large product", "-", "21.00"],
        ["perplexity 410m", "1,234", "-", "-", "-"], ["conversion 410m -> 160m", "-", "-", "61.2", "-"],
        ["donor 1.4b, statistics", "9", "-", "-", "-"], ["donor 1.4b, moments", "8", "-", "-", "7.00"]]


def test_origins_are_those_of_each_run():
    table = benchmarks.origins(FOUND).set_index("benchmark")
    assert list(table.index) == ["conversion 1.4b -> 410m", "conversion 6.9b -> 1.4b", "conversion 410m -> 160m",
                                 "moments", "perplexity", "perplexity_160m", "training", "footprint", "memory"]
    assert dict(table.loc["moments"]) == {
        "commit": "0123456789ab", "day": "2026-11-30", "device": "cpu", "machine": "x86_64", "threads": 1,
        "torch": "2.13.0", "transformers": "5.24.0"}


def test_the_figure_draws_a_bar_a_ratio_and_a_tick_an_aim():
    rows = benchmarks.comparisons(FOUND)
    (axis,) = plots.ratios(rows).axes
    ratios = [row.ratio for row in rows if row.ratio is not None]
    bars = axis.patches
    assert [bar.get_x() + bar.get_width() for bar in bars] == pytest.approx(ratios)
    said = {kind: [text.get_text() for text in axis.texts if text.get_gid() == kind] for kind in ("what", "ratio")}
    assert said["ratio"] == [f"{ratio:.2f}x" for ratio in ratios] and len(said["what"]) == len(ratios)
    missed = [to_hex(bar.get_facecolor()).upper() == "#E69F00" for bar in bars]
    assert missed == [row.met is False for row in rows if row.ratio is not None] and sum(missed) == 1
    aims = [line.get_xdata()[0] for line in axis.lines if line.get_label() == "_aim"]
    assert aims == [row.least for row in rows if row.ratio is not None and row.least]
    assert plots.ratios([]).axes  # nothing measured: an empty figure


def test_what_is_committed_can_be_shown():
    found = benchmarks.results()
    assert {"perplexity", "training"} <= found.keys()
    benchmarks.table(benchmarks.comparisons(found))
    for row in benchmarks.origins(found).itertuples():
        assert len(row.commit) == 12 and row.torch and row.device


def test_a_new_result_makes_the_benchmarks_page_stale_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "MEASURED", {"12": str(tmp_path)})
    nano = load_experiment("nano")

    def made_of(section):
        return plan.ingredients(NOTEBOOKS / f"{section}.ipynb", nano)

    before = {section: made_of(section) for section in ("12_speed", "03_setup")}
    (tmp_path / "gpu.json").write_text("{}")
    assert made_of("12_speed") != before["12_speed"] and made_of("03_setup") == before["03_setup"]
