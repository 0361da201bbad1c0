"""Converting block by block gives what converting in memory gives, without ever holding a model."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from scaleop import measured, store, streaming
from scaleop.arms import ARMS, BLENDS, VARIANTS, arm_named, build
from scaleop.blockwise import Blockwise
from scaleop.donor import Donor
from scaleop.downloads import HubError
from scaleop.experiment import ExperimentError
from scaleop.measured import Statistics
from scaleop.paths import ROOT
from scaleop.shards import Checkpoint, ShardWriter
from scaleop.store import StoreError
from scaleop.weights import WeightsError, extract, load
from scaleop.wiring import GPT_NEOX, WiringError, config_like
from tests.conftest import neox_config, random_model

PAIRS = {  # donor, target
    "width": ({"layers": 3, "width": 64, "heads": 4, "mlp": 60, "rotary": 0.5},
              {"layers": 3, "width": 32, "heads": 4, "mlp": 31}),
    "depth and heads": ({"layers": 4, "width": 64, "heads": 4, "mlp": 90, "rotary": 0.25},
                        {"layers": 2, "width": 32, "heads": 2, "mlp": 45}),
    "all axes": ({"layers": 5, "width": 64, "heads": 4, "mlp": 70, "vocab": 80, "rotary": 0.25},
                 {"layers": 3, "width": 48, "heads": 3, "mlp": 33, "vocab": 61}),
}
STARTS = [name for name, arm in (ARMS | VARIANTS | BLENDS).items() if arm.maps is not None and not arm.own_inputs]
SEQUENCES = np.random.default_rng(0).integers(0, 61, (70, 12))  # more than two batches of each size
PROBES = 37
NANO = ROOT / "models" / "nano-l"


def saved(folder, sizes, dtype=torch.float32, shard="50GB", **more):
    """A random donor on disk."""
    random_model(neox_config(**sizes, **more)).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


class Pair:
    """One donor, in memory and on disk, and the shape it is converted to."""

    def __init__(self, folder, sizes, target, dtype=torch.float32, shard="50GB"):
        self.folder = saved(folder / "donor", sizes, dtype, shard)
        self.donor = Donor(load(self.folder), SEQUENCES, PROBES, "donor", folder / "memory")
        self.target = config_like(self.donor.config, **target)
        self.checkpoint = Checkpoint(self.folder)
        self.store = folder / "store"

    def statistics(self, keep="full", **more):
        return Statistics(self.checkpoint, SEQUENCES, PROBES, self.store / keep, keep,
                          **{"say": lambda _: None} | more)

    def streamed(self, name, out, keep="full", **more):
        """The arm's model and facts, block by block."""
        conversion = Blockwise(arm_named(name), self.statistics(keep, **more), self.target)
        conversion.prepare()
        out.mkdir(parents=True)
        writer = ShardWriter(out, GPT_NEOX)
        facts = conversion.write(writer)
        writer.finish()
        self.target.save_pretrained(out)
        return load(out), facts


@pytest.fixture(scope="module", params=list(PAIRS))
def pair(request, tmp_path_factory):
    return Pair(tmp_path_factory.mktemp("pair"), *PAIRS[request.param])


def largest_difference(first, second):
    """Relative to each tensor's norm."""
    other = second.state_dict()
    return max(((tensor - other[name]).norm() / other[name].norm().clamp(min=1e-12)).item()
               for name, tensor in first.state_dict().items())


@pytest.mark.parametrize(("pair", "name"), [(pair, name) for pair in PAIRS for name in STARTS
                                            if pair == "width" or name not in BLENDS], indirect=["pair"])
def test_every_arm_is_the_one_built_in_memory(pair, name, tmp_path):
    ours, facts = pair.streamed(name, tmp_path / "out")
    theirs, expected = build(arm_named(name), pair.donor, pair.target, seed=0)
    assert facts["blocks"] == expected["blocks"] and facts.get("kept") == expected.get("kept")
    assert largest_difference(ours, theirs) < 1e-5
    assert facts.get("solves", {}).keys() == expected.get("solves", {}).keys()
    for solve, found in facts.get("solves", {}).items():
        assert found["condition"] == pytest.approx(expected["solves"][solve]["condition"], rel=1e-4)


class Counted:
    """Forward passes of a block, counted."""

    def __init__(self, monkeypatch):
        self.calls, forward = 0, streaming.OneBlock.__call__

        def counting(model, stream):
            self.calls += 1
            return forward(model, stream)
        monkeypatch.setattr(streaming.OneBlock, "__call__", counting)


@pytest.fixture
def counted(monkeypatch):
    return Counted(monkeypatch)


BATCHES = 3, 3  # of all 70 sequences by 32, of the 37 probes by 16


@pytest.mark.parametrize("name", ["subclone_rs", "hybrid_rs", "hybrid_rs_holdout", "projection"])
@pytest.mark.parametrize("keep", ["full", "kept"])
def test_a_half_precision_donor_in_shards_gives_the_very_same_bits(tmp_path, name, keep):
    pair = Pair(tmp_path, *PAIRS["all axes"], dtype=torch.float16, shard="60KB")
    assert len(list(pair.folder.glob("*.safetensors"))) > 5
    ours, facts = pair.streamed(name, tmp_path / "out", keep)
    theirs, expected = build(arm_named(name), pair.donor, pair.target, seed=0)
    assert facts == expected
    assert all(torch.equal(tensor, theirs.state_dict()[path]) for path, tensor in ours.state_dict().items())


def test_a_real_donor_gives_the_very_same_bits(tmp_path):
    if not (NANO / "model.safetensors").exists():
        pytest.skip("models/nano-l is not trained yet (make models)")
    sequences = np.random.default_rng(1).integers(0, 4096, (34, 16))
    donor, checkpoint = Donor(load(NANO), sequences, 20, "nano", tmp_path / "memory"), Checkpoint(NANO)
    target = config_like(donor.config, layers=4, width=128, heads=4, mlp=512)  # depth and whole heads
    conversion = Blockwise(ARMS["hybrid_rs"], Statistics(checkpoint, sequences, 20, tmp_path / "blocks"), target)
    conversion.prepare()
    writer = ShardWriter(tmp_path, GPT_NEOX)
    facts = conversion.write(writer)
    writer.finish()
    theirs, expected = build(ARMS["hybrid_rs"], donor, target, seed=0)
    assert facts["kept"] == expected["kept"]
    target.save_pretrained(tmp_path)
    assert largest_difference(load(tmp_path), theirs) < 1e-5


def test_another_shape_and_another_arm_need_no_forward_pass(tmp_path, counted):
    pair = Pair(tmp_path, *PAIRS["width"])
    pair.streamed("hybrid_rs", tmp_path / "first")
    assert counted.calls == 3 * sum(BATCHES)  # three blocks, each batch once
    pair.target = config_like(pair.donor.config, layers=2, width=16, heads=4, mlp=7)
    for name in ("hybrid_rs", "hybrid_rs_act", "projection", "subclone_rs", "hybrid_bias"):
        pair.streamed(name, tmp_path / name)
    assert counted.calls == 3 * sum(BATCHES)
    pair.streamed("hybrid_rs_holdout", tmp_path / "holdout")  # two more stretches of moments: of 30 and of 7 sequences
    assert counted.calls == 3 * sum(BATCHES) + 3 * (2 + 1 + BATCHES[1])


def test_kept_columns_serve_a_smaller_shape_and_a_larger_one_needs_a_pass_that_is_said(tmp_path, counted):
    pair, said = Pair(tmp_path, *PAIRS["width"]), []
    statistics = Statistics(pair.checkpoint, SEQUENCES, PROBES, pair.store, "kept", say=said.append)
    middle, small, large = ({b: {"MLP_DOWN": torch.arange(0, size, step)} for b in (0, 2)}
                            for size, step in ((60, 2), (60, 4), (60, 1)))
    statistics.gather(middle, [(0, PROBES)])
    assert counted.calls == 2 * BATCHES[1] + 3 and len(said) == 1  # through block 1 too, which keeps nothing
    statistics.gather(small, [(0, PROBES)])
    assert counted.calls == 9 and len(said) == 1
    statistics.gather(large, [(0, PROBES)])
    assert counted.calls == 18 and "a pass of 37 sequences through blocks 0 to 2" in said[1]
    whole = statistics.columns(2, "MLP_DOWN", large[2]["MLP_DOWN"], (0, PROBES))
    cut = Statistics(pair.checkpoint, SEQUENCES, PROBES, tmp_path / "fresh", "kept", say=said.append)
    cut.gather(small, [(0, PROBES)])
    assert torch.allclose(cut.columns(2, "MLP_DOWN", small[2]["MLP_DOWN"], (0, PROBES)), whole[:, ::4], rtol=1e-6)
    assert torch.equal(whole, whole.T) or torch.allclose(whole, whole.T, rtol=1e-5, atol=1e-3)  # a full square


def test_rows_come_from_disk_some_at_a_time(tmp_path, monkeypatch):
    pair = Pair(tmp_path, *PAIRS["width"])
    statistics, index = pair.statistics(), torch.tensor([3, 17, 59])
    statistics.gather({1: {"MLP_DOWN": index}}, [(0, PROBES)])
    at_once = statistics.columns(1, "MLP_DOWN", index, (0, PROBES))
    monkeypatch.setattr(measured, "ROWS", 7)
    assert torch.equal(statistics.columns(1, "MLP_DOWN", index, (0, PROBES)), at_once) and at_once.shape == (60, 3)


def test_hidden_states_on_disk_change_nothing_and_leave_nothing(tmp_path):
    pair = Pair(tmp_path, *PAIRS["depth and heads"])
    in_memory, _ = pair.streamed("hybrid_rs", tmp_path / "one")
    pair.store = tmp_path / "other store"
    on_disk, _ = pair.streamed("hybrid_rs", tmp_path / "two", spill=0)
    assert largest_difference(in_memory, on_disk) == 0
    assert not list(pair.store.rglob("*.bin")) and not list(pair.store.rglob("next"))


@pytest.mark.parametrize("spill", [0, 2**30])
def test_a_killed_conversion_finds_finished_blocks_again(tmp_path, monkeypatch, spill):
    pair = Pair(tmp_path, *PAIRS["all axes"])
    uninterrupted, _ = pair.streamed("hybrid_rs", tmp_path / "one")
    pair.store = tmp_path / "other store"
    save = measured._save

    def dying(path, tensors):
        if path.name == "pooled-003.safetensors":
            raise KeyboardInterrupt
        save(path, tensors)
    monkeypatch.setattr(measured, "_save", dying)
    with pytest.raises(KeyboardInterrupt):
        pair.streamed("hybrid_rs", tmp_path / "two", spill=spill)
    monkeypatch.setattr(measured, "_save", save)
    before = {path: path.stat().st_mtime_ns for path in pair.store.rglob("pooled-*")}
    assert len(before) == 3
    counted = Counted(monkeypatch)
    said = []
    again, _ = pair.streamed("hybrid_rs", tmp_path / "three", spill=spill, say=said.append)
    assert largest_difference(uninterrupted, again) == 0
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    walked = 2 if spill == 0 else 5  # with the stream on disk only blocks 3 and 4 are left; else it is made anew
    assert counted.calls == walked * BATCHES[0] + 5 * BATCHES[1]
    assert f"through blocks {5 - walked} to 4" in said[0] and "through blocks 0 to 4" in said[1]


def test_only_one_block_of_the_donor_is_ever_in_a_model(pair):
    model = streaming.OneBlock(pair.checkpoint).model
    config = pair.donor.config
    block = sum(p.numel() for p in pair.donor.model.get_submodule("gpt_neox.layers.0").parameters())
    assert sum(p.numel() for p in model.parameters()) == block + 2 * config.hidden_size  # a vocabulary of one


def full(monkeypatch, free):
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: type("Usage", (), {"free": free}))


def test_a_full_disk_is_seen_before_the_pass(tmp_path, monkeypatch, counted):
    pair = Pair(tmp_path, *PAIRS["width"])
    full(monkeypatch, 4 * 3 * 70 * 64)  # room for the pooled stream of three blocks, and not for moments
    with pytest.raises(StoreError, match=r"second moments.* need 0\.0 GB .*--moments kept.*SCALEOP_STORE"):
        pair.streamed("hybrid_rs", tmp_path / "out")
    assert counted.calls == 3 * BATCHES[0]
    full(monkeypatch, 4 * 3 * 70 * 64 - 1)
    pair.store = tmp_path / "other store"
    with pytest.raises(StoreError, match=r"pooled activations.* need 0\.0 GB [^()]*SCALEOP_STORE"):
        pair.streamed("hybrid_rs", tmp_path / "out 2")
    assert counted.calls == 3 * BATCHES[0]


def test_hidden_states_that_wait_on_disk_need_room_too(tmp_path, monkeypatch):
    pair, stream, pooled = Pair(tmp_path, *PAIRS["width"]), 4 * 70 * 12 * 64, 4 * 3 * 70 * 64
    assert streaming.on_disk((70, 12, 64), stream) == 0 and streaming.on_disk((70, 12, 64), stream - 1) == 2 * stream
    full(monkeypatch, 2 * stream + pooled - 1)
    with pytest.raises(StoreError, match="hidden states that wait on disk"):
        pair.streamed("subclone", tmp_path / "out", "kept", spill=0)
    full(monkeypatch, 2 * stream + pooled)
    pair.streamed("subclone", tmp_path / "out 2", "kept", spill=0)


def test_means_and_moments_of_one_arm_take_one_pass(tmp_path, counted):
    pair = Pair(tmp_path, *PAIRS["width"])
    pair.streamed("hybrid_bias", tmp_path / "out", "kept")
    assert counted.calls == 3 * sum(BATCHES)


def test_a_donor_that_changes_under_way_is_named_and_not_what_is_written(tmp_path):
    pair = Pair(tmp_path, *PAIRS["width"])
    conversion = Blockwise(ARMS["hybrid_rs"], pair.statistics(), pair.target)
    conversion.prepare()
    whole = (pair.folder / "model.safetensors").read_bytes()
    for spoil in (lambda file: file.write_bytes(whole[:1000]), lambda file: file.unlink()):
        spoil(pair.folder / "model.safetensors")
        with pytest.raises(HubError, match=r"cannot read model\.safetensors of donor any more .*work is kept"), \
                store.atomic_folder(tmp_path / "out") as part:
            conversion.write(ShardWriter(part, GPT_NEOX))


def test_a_damaged_statistic_is_named(tmp_path):
    pair = Pair(tmp_path, *PAIRS["width"])
    pair.streamed("hybrid", tmp_path / "out")
    for name in ("moments-MLP_DOWN-0-37", "pooled"):
        next(pair.store.rglob(f"{name}*-001*")).write_bytes(b"no tensors")
        with pytest.raises(StoreError, match=rf"{name}.*-001\.safetensors is damaged .*Delete it"):
            pair.streamed("hybrid", tmp_path / f"again {name}")


@pytest.mark.parametrize(("name", "said"), [("random", "takes nothing from a donor"),
                                            ("random_distill", "takes nothing from a donor"),
                                            ("hybrid_rs_own", "both models would .* in memory: take 'hybrid_rs'")])
def test_arms_that_cannot_be_made_block_by_block_are_refused_by_name(pair, name, said):
    with pytest.raises(ExperimentError, match=f"arm = '{name}' .*{said}"):
        Blockwise(arm_named(name), pair.statistics(), pair.target)


def test_a_shape_out_of_reach_is_refused(pair):
    larger = config_like(pair.donor.config, layers=pair.donor.shape.layers, width=128, heads=8, mlp=30)
    with pytest.raises(WiringError, match="larger than the donor's"):
        Blockwise(ARMS["hybrid_rs"], pair.statistics(), larger)


# Checkpoints on disk

def edited(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("change", "said"), [
    (lambda t: t.pop("gpt_neox.layers.1.mlp.dense_4h_to_h.bias"), r"layers\.1\.mlp\.dense_4h_to_h\.bias is missing"),
    (lambda t: t.update({"gpt_neox.extra": torch.zeros(2)}), r"gpt_neox\.extra is not known"),
    (lambda t: t.update({"embed_out.weight": torch.zeros(61, 8)}), r"lm_head\.weight is \(61, 8\) .* wants \(61, 64\)"),
])
def test_a_checkpoint_that_is_not_its_configs_is_refused_before_any_work(tmp_path, change, said):
    folder = edited(saved(tmp_path, PAIRS["width"][0]), change)
    with pytest.raises(WeightsError, match=said):
        Checkpoint(folder)


def test_old_buffers_are_passed_over_and_roles_are_those_of_the_model(tmp_path):
    folder = edited(saved(tmp_path, PAIRS["width"][0]), lambda tensors: tensors.update(
        {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 8, 8),
         "gpt_neox.layers.0.attention.rotary_emb.inv_freq": torch.ones(4)}))
    checkpoint, weights = Checkpoint(folder), extract(load(folder))
    for block in (None, 0, 2):
        found = checkpoint.weights(block)
        assert found.keys() == {key for key in weights if key[0] == block}
        assert all(torch.equal(tensor, weights[key]) for key, tensor in found.items())
    assert checkpoint.weights(1, ["V"]).keys() == {(1, "V")}
    assert torch.equal(checkpoint.rows("EMB_IN", torch.tensor([[5, 0]])), weights[None, "EMB_IN"][[5, 0]][None])


@pytest.mark.parametrize("limit", [1, 9_000, 2**30])
def test_written_shards_are_what_from_pretrained_expects(tmp_path, limit):
    model = random_model(neox_config())
    writer = ShardWriter(tmp_path, GPT_NEOX, limit=limit)
    for path, tensor in model.state_dict().items():
        writer.add({path: tensor})
    files = writer.finish()
    model.config.save_pretrained(tmp_path)
    assert (len(files) == 1) == (limit == 2**30) == (not (tmp_path / "model.safetensors.index.json").exists())
    assert all(torch.equal(tensor, model.state_dict()[path]) for path, tensor in load(tmp_path).state_dict().items())
    assert "embed_out.weight" in set().union(*(load_file(file) for file in files))
    assert all(file.stat().st_mode & 0o777 == 0o644 for file in files)
