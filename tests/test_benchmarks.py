"""The benchmarks' own code at a tiny size."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scaleop import convert
from scaleop.paths import ROOT
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
    assert step["tokens_per_second"] > 16 * 4 * 32 / step["whole_s"] / 3  # the median step is not slower than all
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


def test_ratios_are_of_the_best_rounds_and_leave_the_bare_pass_out():
    one = {"bytes": 100, "seconds": 10.0, "forward_s": 4.0}
    rounds = [{"obvious": one, "ours": {"bytes": 60, "seconds": 8.0, "forward_s": 4.0}},
              {"obvious": {**one, "seconds": 12.0}, "ours": {"bytes": 50, "seconds": 6.0, "forward_s": 4.0}}]
    assert script("moments")["compared"](rounds) == {"ours": {"memory": 2.0, "time": 10 / 6, "moments_time": 3.0}}


def test_results_name_their_commit_versions_and_hardware():
    for path in Path(FOLDER / "results").glob("*.json"):
        found = json.loads(path.read_text())
        assert len(found["commit"]) >= 40 and found["versions"]["torch"] and found["hardware"]["device"], path.name
