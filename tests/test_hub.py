"""Models of the hub: what arrives is what the repository holds, and whatever goes wrong ends in a sentence."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import time

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from scaleop import downloads, hub, weights
from scaleop.experiment import load_experiment
from scaleop.hub import HubError
from scaleop.paths import ROOT
from scaleop.race import Race, hub_origin, main, model_key
from scaleop.weights import WeightsError, differing, extract, load, load_config
from scaleop.wiring import WiringError
from tests.conftest import neox_config, random_model
from tests.hub_server import Hub, tiny_pythia

NAME = "EleutherAI/pythia-70m"


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A stand-in hub that this process uses, with an empty cache; waiting between attempts takes no time."""
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.005)))
    with Hub() as server:
        server.here(monkeypatch, tmp_path / "hf")
        yield server


@pytest.fixture
def folder(tmp_path):
    """A tiny Pythia in two shards, with the pickle that the real repositories have beside them."""
    folder = tiny_pythia(tmp_path / "repository", shards=2)
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    return folder


def fetched(server):
    """Files whose content was asked for, in order."""
    return [path.split("/resolve/")[1].split("/", 1)[1] for method, path in server.requests
            if method == "GET" and "/resolve/" in path]


def stored(folder):
    """Every weight of a folder's shards under the state dict's names, by hand."""
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()
               if not name.endswith((".attention.bias", ".masked_bias", ".inv_freq"))}
    tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
    return tensors


def shards(folder):
    return sorted(path.name for path in folder.glob("*.safetensors"))


# What arrives

def test_a_hub_model_is_loaded_bit_by_bit_in_fp32(server, folder):
    server.model(NAME, folder)
    state, expected = load(NAME).state_dict(), stored(folder)
    assert state.keys() == expected.keys() and len(state) == 2 * 12 + 4  # two blocks of 12, embeddings, final norm
    for name, tensor in expected.items():
        assert tensor.dtype == torch.float16 and state[name].dtype == torch.float32
        assert torch.equal(state[name], tensor.float()), name


def test_pickles_are_never_fetched(server, folder):
    server.model(NAME, folder)
    place = hub.folder(NAME)
    assert sorted(set(fetched(server))) == sorted(path.name for path in place.iterdir())
    assert sorted(path.name for path in place.iterdir()) == [
        "config.json", *shards(folder), "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"]


def test_a_repository_with_one_whole_file_and_shards_gives_the_whole_file_as_transformers_would(server, tmp_path):
    folder = tiny_pythia(tmp_path / "both", shards=2)
    save_file({name: tensor for file in shards(folder) for name, tensor in load_file(folder / file).items()},
              folder / "model.safetensors", {"format": "pt"})
    server.model(NAME, folder)
    assert [path.name for path in hub.weight_files(hub.folder(NAME))] == ["model.safetensors"]
    assert not any(name.startswith("model-0") for name in fetched(server))


def test_a_revision_is_a_branch_a_tag_a_pull_request_or_a_commit(server, tmp_path):
    first, second, third = (tiny_pythia(tmp_path / str(seed), seed=seed) for seed in (1, 2, 3))
    one, two = server.model(NAME, first, "v1"), server.model(NAME, second)
    three = server.model(NAME, third, "refs/pr/1")
    assert len({one, two, three}) == 3
    for name, source, commit in ((f"{NAME}@v1", first, one), (NAME, second, two), (f"{NAME}@main", second, two),
                                 (f"{NAME}@refs/pr/1", third, three), (f"{NAME}@{one}", first, one)):
        assert hub.revision(name) == {"name": NAME, "revision": name[len(NAME) + 1:] or "main", "commit": commit}
        assert torch.equal(load(name).state_dict()["lm_head.weight"], stored(source)["lm_head.weight"].float())


def test_a_branch_that_moves_does_not_move_under_a_running_process(server, tmp_path):
    first, second = (tiny_pythia(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    commit = server.model(NAME, first)
    assert load_config(NAME).hidden_size == 32
    server.model(NAME, second)
    assert torch.equal(load(NAME).state_dict()["lm_head.weight"], stored(first)["lm_head.weight"].float())
    assert hub.revision(NAME)["commit"] == commit == hub_origin(NAME)["hub"]["commit"]


def test_a_folder_wins_over_the_hub_and_has_no_revision(folder):
    assert hub.folder(str(folder)) == hub.folder(folder) == folder
    assert hub.revision(str(folder)) is None and hub_origin(str(folder)) == {}
    assert hub.folder("models/nano-s") == ROOT / "models" / "nano-s"


def test_the_key_of_a_hub_model_is_that_of_a_folder_with_the_same_files(server, folder):
    server.model(NAME, folder)
    assert model_key(NAME) == model_key(folder)
    assert hub.short(f"{NAME}@{'0' * 40}") == "pythia-70m"


def test_opening_a_race_fetches_configs_only(server, tmp_path):
    server.model(NAME, tiny_pythia(tmp_path / "large", width=64, heads=4))
    server.model("EleutherAI/pythia-31m", tiny_pythia(tmp_path / "small", width=32, heads=4))
    nano = load_experiment("nano")
    pair = nano.pair.model_copy(update={"donor": NAME, "target": None, "like": "EleutherAI/pythia-31m",
                                        "reference": "EleutherAI/pythia-31m"})
    race = Race(nano.model_copy(update={"pair": pair}))
    assert (race.target.hidden_size, race.target.num_attention_heads) == (32, 4)
    assert fetched(server) == ["config.json", "config.json"]
    place = hub.tokenizer_folder(NAME)
    assert sorted(path.name for path in place.iterdir()) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert race.donor_key == model_key(tmp_path / "large")  # and now the weights are there
    assert "model.safetensors" in fetched(server) and race.target_shape.vocab == 304


# What goes wrong on the way

@pytest.mark.parametrize(("kind", "pattern"), [(503, "*"), (500, "*/tree/*"), (429, "*.safetensors"),
                                               ("reset", "*.safetensors"), ("close", "*.safetensors"),
                                               ("short", "*-00002-*"), ("wrong", "*-00002-*"),
                                               ("wrong", "*/config.json"), ("reset", "*/tokenizer.json")])
def test_a_failure_that_passes_is_overcome(server, folder, kind, pattern):
    server.model(NAME, folder)
    server.fail(pattern, kind, times=2)
    state, expected = load(NAME).state_dict(), stored(folder)
    assert all(torch.equal(state[name], tensor.float()) for name, tensor in expected.items())
    assert server.faults[0]["times"] == 0  # so it did fail


@pytest.mark.parametrize(("kind", "pattern", "message"), [
    (503, "*", "failed 4 times while fetching EleutherAI/pythia-70m@main"),
    (500, "*/resolve/*-00001-*", "failed 4 times.*500"),
    ("reset", "*-00002-*", "failed 4 times.*Run again later: files that are whole are kept"),
    ("close", "*-00002-*", "failed 4 times"),
    ("short", "*-00002-*", "failed 4 times.*size"),
    ("wrong", "*-00002-*", "model-00002-of-00002.safetensors of .* does not have the bytes .*run again"),
    (403, "*-00001-*", "refuses EleutherAI/pythia-70m@main with status 403"),
])
def test_a_failure_that_lasts_is_a_sentence_and_the_next_run_succeeds(server, folder, tmp_path, kind, pattern, message):
    server.model(NAME, folder)
    server.fail(pattern, kind)
    with pytest.raises(HubError, match=message):
        load(NAME)
    left = [path for path in (tmp_path / "hf").rglob("*") if path.is_file()]
    assert not [path for path in left if "incomplete" in path.name]  # nothing half-written
    for path in left:  # a shard that is there is the whole one
        if path.suffix == ".safetensors":
            assert path.read_bytes() == (folder / path.name).read_bytes()
    server.heal()
    state, expected = load(NAME).state_dict(), stored(folder)
    assert all(torch.equal(state[name], tensor.float()) for name, tensor in expected.items())


def test_files_that_were_whole_are_not_fetched_again(server, folder):
    server.model(NAME, folder)
    server.fail("*-00002-*", "reset")
    with pytest.raises(HubError):
        hub.folder(NAME)
    server.heal()
    server.requests.clear()
    hub.folder(NAME)
    assert set(fetched(server)) == {"model-00002-of-00002.safetensors"}


def test_a_file_is_hashed_once_and_again_when_it_changes(server, folder, monkeypatch):
    server.model(NAME, folder)
    place = hub.folder(NAME)
    shard = place / "model-00001-of-00002.safetensors"
    whole = shard.read_bytes()
    with monkeypatch.context() as without:
        without.setattr(hub.store, "sha256", None)
        hub.folder(NAME)  # does not hash: there is nothing to hash with
    blob = shard.resolve()
    blob.chmod(0o644)
    blob.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # a bit of the last weight, on this disk
    os.utime(blob, (1, 1))
    assert (hub.folder(NAME) / shard.name).read_bytes() == whole


def test_blobs_that_repositories_share_are_known_by_the_blobs_name(server, folder, tmp_path):
    """As the hub's client stores them where it fetches by xet: snapshot -> blob (SHA-256) -> shared (another hash)."""
    server.model(NAME, folder)
    place = hub.folder(NAME)
    shard = place / "model-00001-of-00002.safetensors"
    blob, shared = shard.parent / shard.readlink(), tmp_path / "hf" / "shared" / ("a" * 64)
    shared.parent.mkdir()
    shutil.move(blob, shared)
    blob.symlink_to(shared)
    os.utime(shared, (1, 1))  # not the file that was compared before
    server.requests.clear()
    assert hub.folder(NAME) == place and shared.exists() and not fetched(server)  # compared, and right
    whole = shared.read_bytes()
    shared.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    os.utime(shared, (2, 2))
    assert (hub.folder(NAME) / shard.name).read_bytes() == whole
    assert fetched(server) == [shard.name] and not shared.exists()


def test_an_unknown_repository_or_revision_is_named(server, folder):
    server.model(NAME, folder)
    with pytest.raises(HubError, match=r"has no model EleutherAI/pythia-7m, or it is private: check the spelling"):
        load_config("EleutherAI/pythia-7m")
    with pytest.raises(HubError, match=r"EleutherAI/pythia-70m has no revision 'step3000'"):
        load_config(f"{NAME}@step3000")
    with pytest.raises(HubError, match="has no revision"):
        load_config(f"{NAME}@{'0' * 40}")
    with pytest.raises(HubError, match="neither a folder nor a hub model"):
        load_config("pythia 70m")
    with pytest.raises(HubError, match="there is no folder"):
        load_config("models/nano-xl")


def test_without_a_network_the_message_says_what_to_fetch_and_how_to_name_a_folder(tmp_path, monkeypatch, folder):
    with Hub() as gone:
        gone.here(monkeypatch, tmp_path / "hf")
        gone.model(NAME, folder)
    with pytest.raises(HubError) as caught:
        load_config(NAME)
    for part in (f"cannot reach the hub ({gone.url})", "config.json", "*.safetensors", "HF_ENDPOINT", "HF_HOME",
                 f"hf download {NAME} --revision main", f"that folder in the experiment in place of {NAME}@main"):
        assert part in str(caught.value)


def test_what_the_cache_holds_is_used_without_a_network(tmp_path, monkeypatch, folder):
    with Hub() as server:
        server.here(monkeypatch, tmp_path / "hf")
        commit = server.model(NAME, folder)
        place = hub.folder(NAME)
    hub._commit.cache_clear()  # as a new process would start
    assert hub.folder(NAME) == hub.folder(f"{NAME}@{commit}") == place
    assert hub.revision(NAME)["commit"] == commit
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub._commit.cache_clear()
    assert hub.folder(NAME) == place


def test_offline_with_half_of_it_in_the_cache_says_what_is_missing(server, folder, monkeypatch):
    server.model(NAME, folder)
    hub.config_folder(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_config(NAME).hidden_size == 32
    with pytest.raises(HubError, match=r"cannot reach the hub.*Needed from .*tokenizer.json"):
        hub.tokenizer_folder(NAME)


@pytest.mark.filterwarnings("ignore:Not enough free disk space")
def test_a_full_disk_is_a_sentence_and_the_next_run_succeeds(server, tmp_path, monkeypatch):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("a small tmpfs cannot be mounted here (it takes root)")
    try:
        server.here(monkeypatch, small / "hf")
        folder = tiny_pythia(tmp_path / "repository", layers=4, width=128)  # 1.7 MB
        assert (folder / "model.safetensors").stat().st_size > 1.2e6
        server.model(NAME, folder)
        with pytest.raises(HubError, match=r"the disk is full while fetching .*Free space there, or set HF_HOME"):
            load(NAME)
        assert not [path for path in small.rglob("*") if path.suffix == ".safetensors" or "incomplete" in path.name]
        subprocess.run(["mount", "-o", "remount,size=16m", small], check=True)
        assert torch.equal(load(NAME).state_dict()["lm_head.weight"], stored(folder)["lm_head.weight"].float())
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize("blocked", ["hf", "hf/hub"])
def test_a_cache_that_cannot_be_written_is_said_at_once(server, folder, tmp_path, monkeypatch, blocked):
    server.model(NAME, folder)
    monkeypatch.setattr(time, "sleep", None)  # no second attempt
    (tmp_path / blocked).parent.mkdir(exist_ok=True)
    shutil.rmtree(tmp_path / blocked, ignore_errors=True)
    (tmp_path / blocked).write_text("a file where a folder should be")
    with pytest.raises(HubError, match=r"cannot be written \(.*: set HF_HOME to a folder you may write to"):
        hub.folder(NAME)


@pytest.mark.parametrize(("error", "said"), [
    (PermissionError(13, "Permission denied", "/hf/hub"), True), (OSError(30, "Read-only file system", "/hf"), True),
    (PermissionError(1, "Operation not permitted"), False), (ConnectionResetError(104, "reset by peer"), False)])
def test_what_a_file_forbids_is_not_what_a_firewall_forbids(error, said):
    assert downloads.unwritable(error) == said


# Processes

FETCH = "import sys; from scaleop import hub; print(hub.folder(sys.argv[1]))"


def fetching(server, tmp_path):
    """A process of its own that fetches the model; its output is the folder."""
    return subprocess.Popen([sys.executable, "-c", FETCH, NAME], cwd=ROOT, text=True, stdout=subprocess.PIPE, env={
        **os.environ, **server.environment(tmp_path / "hf"), "SCALEOP_STORE": str(tmp_path / "store")})


def test_a_download_that_is_killed_leaves_nothing_that_is_taken_for_a_file(server, folder, tmp_path):
    server.model(NAME, folder)
    server.fail("*-00002-*", "stall")
    process = fetching(server, tmp_path)
    assert server.stalled.wait(300)
    process.kill()
    assert process.communicate()[0] == ""
    server.heal()
    state, expected = load(NAME).state_dict(), stored(folder)
    assert all(torch.equal(state[name], tensor.float()) for name, tensor in expected.items())


def test_two_processes_that_want_the_same_model_get_it_both(server, folder, tmp_path):
    server.model(NAME, folder)
    server.fail("*-00002-*", "stall", times=1)
    both = [fetching(server, tmp_path) for _ in range(2)]
    assert server.stalled.wait(300)  # one of them is half-way
    server.heal()
    said = [process.communicate(timeout=300)[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0] and said[0] == said[1] == str(hub.folder(NAME))
    for file in shards(folder):
        assert (hub.folder(NAME) / file).read_bytes() == (folder / file).read_bytes()


# What must not be loaded

def test_a_checkpoint_of_pickles_is_refused_before_they_are_fetched(server, folder, tmp_path):
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(tmp_path))
    server.model(NAME, folder)
    with pytest.raises(HubError, match=r"pickles only \(pytorch_model.bin\).*refs/pr/1.*sandbox"):
        load(NAME)
    assert not [name for name in fetched(server) if name.endswith(".bin")]
    with pytest.raises(HubError, match="pickles only"):
        load(folder)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_a_repository_is_refused_before_its_weights_are_fetched(server, folder, file):
    values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**values, "auto_map": {"AutoConfig": "configuration.Mine"}}))
    (folder / "configuration.py").write_text("raise SystemExit('it ran')")
    server.model(NAME, folder)
    with pytest.raises(HubError, match=rf"{file} of .*auto_map.*never run"):
        load(NAME)
    with pytest.raises(HubError, match="auto_map"):
        hub.tokenizer_folder(folder)
    assert "configuration.py" not in fetched(server)
    assert file != "config.json" or not [name for name in fetched(server) if name.endswith(".safetensors")]


def test_a_truncated_shard_is_refused_by_name_on_the_hub_and_on_disk(server, folder):
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    server.model(NAME, folder)  # with the hash of what it now is
    for name in (NAME, folder):
        with pytest.raises(HubError, match=r"model-00002-of-00002.safetensors in .* is truncated or damaged"):
            load(name)


def test_a_missing_shard_is_refused_by_name(server, folder):
    (folder / "model-00002-of-00002.safetensors").unlink()
    server.model(NAME, folder)
    for name in (NAME, folder):
        with pytest.raises(HubError, match=r"lacks model-00002-of-00002.safetensors"):
            load(name)


def test_a_folder_without_weights_or_config_is_refused(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(HubError, match=r"no config.json"):
        load_config(tmp_path / "empty")
    shutil.copy(folder / "config.json", tmp_path / "empty")
    with pytest.raises(HubError, match=r"no model.safetensors and no model.safetensors.index.json"):
        load(tmp_path / "empty")


def test_a_damaged_config_or_index_is_a_sentence(folder):
    index, config = folder / "model.safetensors.index.json", folder / "config.json"
    for content in ("{}", '{"weight_map": ["a"]}', '["weight_map"]', '{"weight_m'):
        index.write_text(content)
        with pytest.raises(HubError, match=r"model.safetensors.index.json .*(no weight_map|damaged).*copy it again"):
            hub.folder(folder)
    whole = config.read_text()
    for content in (whole[:40], "[]", ""):
        config.write_text(content)
        with pytest.raises(HubError, match=r"config.json of .* is damaged .*copy it again"):
            load_config(folder)
    for changed in (whole.replace('"gpt_neox"', '"gpt_neox_of_tomorrow"'), whole.replace('"model_type"', '"kind"')):
        config.write_text(changed)
        with pytest.raises(WiringError, match=r"is of no architecture that the installed transformers reads"):
            load_config(folder)


# What was loaded is what the files hold

def test_a_tensor_that_stays_random_does_not_pass(folder, monkeypatch):
    honest = AutoModelForCausalLM.from_pretrained

    def forgetful(*arguments, **options):
        model, info = honest(*arguments, **options)
        torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.02)
        return model, info

    load(folder)
    monkeypatch.setattr(weights.AutoModelForCausalLM, "from_pretrained", forgetful)
    with pytest.raises(WeightsError, match=r"embed_out.weight of model-00002-of-00002.safetensors has other values"):
        load(folder)


def test_differing_finds_one_bit_of_a_small_tensor_and_any_row_probe_of_a_large_one(tmp_path):
    model = random_model(neox_config(layers=1, width=256, heads=4, mlp=64, vocab=4096))  # 2^20 numbers an embedding
    model.save_pretrained(tmp_path)
    files = [tmp_path / "model.safetensors"]
    assert differing(model, files) == []
    table = model.get_input_embeddings().weight.data
    kept = table.clone()
    table.copy_(torch.randn_like(table))
    assert differing(model, files) == ["gpt_neox.embed_in.weight of model.safetensors has other values"]
    table.copy_(kept)
    table[64 * 7] += 1e-3  # 4096 / 64: every 64th row is probed
    assert len(differing(model, files)) == 1
    table.copy_(kept)
    bias = model.gpt_neox.layers[0].mlp.dense_4h_to_h.bias.data
    bias[3] = torch.nextafter(bias[3], torch.tensor(torch.inf))
    assert differing(model, files) == ["gpt_neox.layers.0.mlp.dense_4h_to_h.bias of model.safetensors has other values"]


def test_differing_names_what_only_one_side_has(tmp_path):
    model = random_model(neox_config())
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["extra.weight"] = tensors.pop("gpt_neox.final_layer_norm.bias")
    tensors["embed_out.weight"] = tensors["embed_out.weight"][:-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    assert sorted(differing(model, [tmp_path / "model.safetensors"])) == [
        "embed_out.weight of model.safetensors has shape [60, 16], not [61, 16]",
        "extra.weight of model.safetensors is nowhere in the model", "gpt_neox.final_layer_norm.bias is in no file"]


def test_bf16_is_compared_after_the_cast(folder):
    model = load(folder, dtype=torch.bfloat16)
    assert extract(model)[None, "EMB_OUT"].dtype == torch.bfloat16
    assert differing(model, hub.weight_files(folder)) == []


# A command line

def test_a_command_line_ends_with_the_sentence(tmp_path, monkeypatch):
    with Hub() as gone:
        gone.here(monkeypatch, tmp_path / "hf")
    text = (ROOT / "params" / "toy.yaml").read_text()
    assert "donor: models/nano-s" in text
    (tmp_path / "gone.yaml").write_text(text.replace("donor: models/nano-s", f"donor: {NAME}"))
    arguments = ["scaleop.race", "--experiment", str(tmp_path / "gone.yaml"), "--arm", "random"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code.startswith(f"cannot reach the hub ({gone.url})")  # exit status 1, no traceback


def test_attempts_are_a_handful_with_waits_between():
    assert len(downloads.WAITS) == 3 and list(downloads.WAITS) == sorted(downloads.WAITS) and downloads.WAITS[0] >= 1
