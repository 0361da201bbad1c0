"""Converting block by block gives what converting in memory gives, without ever holding a model."""

import numpy as np
import pytest
import torch

from scaleop import measured, streaming
from scaleop.arms import ARMS, BLENDS, VARIANTS, Donor, arm_named, build
from scaleop.blockwise import Blockwise
from scaleop.experiment import ExperimentError
from scaleop.measured import Statistics
from scaleop.shards import Checkpoint, ShardWriter
from scaleop.store import StoreError
from scaleop.weights import load, load_config
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
        return Statistics(self.checkpoint, SEQUENCES, PROBES, self.store / keep, keep, say=lambda _: None, **more)

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


@pytest.mark.parametrize("name", STARTS)
def test_every_arm_is_the_one_built_in_memory(pair, name, tmp_path):
    ours, facts = pair.streamed(name, tmp_path / "out")
    theirs, expected = build(arm_named(name), pair.donor, pair.target, seed=0)
    assert facts["blocks"] == expected["blocks"] and facts.get("kept") == expected.get("kept")
    assert largest_difference(ours, theirs) < 1e-5
    assert facts.get("solves", {}).keys() == expected.get("solves", {}).keys()
    for solve, found in facts.get("solves", {}).items():
        assert found["condition"] == pytest.approx(expected["solves"][solve]["condition"], rel=1e-4)
