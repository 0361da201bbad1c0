"""A stand-in for the Hugging Face hub on loopback: the few endpoints that huggingface_hub, datasets and lm-eval use.

Repositories are folders. What a test sees of them is what the hub would send: commits, a file tree with LFS hashes,
files by HEAD and GET with ETag, X-Repo-Commit and Range; large files by a redirect, as from the hub's storage.

    with Hub() as hub:
        hub.model("EleutherAI/pythia-70m", tiny_pythia(tmp_path / "donor"))              # returns the commit
        hub.dataset("monology/pile-uncopyrighted", folder)                               # of parquet files, say
        subprocess.run([...], env={**os.environ, **hub.environment(tmp_path / "hf")})    # a child process, or
        hub.here(monkeypatch, tmp_path / "hf")                                           # this very process
        hub.fail("*.safetensors", "reset", times=1)                                      # see `fail`
        hub.requests                                                                     # [("GET", "/api/..."), ...]

The `hub` fixture of a test file is two lines: `with Hub() as hub: yield hub`. Nothing leaves this machine.
"""

import contextlib
import hashlib
import json
import re
import socket
import struct
import threading
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

LFS = (".safetensors", ".bin", ".pt", ".parquet", ".zst", ".gz")
ROUTE = re.compile(r"^(?P<api>/api)?/(?:(?P<kind>models|datasets)/)?(?P<repo>[^/]+/[^/]+)"
                   r"(?:/(?P<what>revision|tree|paths-info|resolve|refs)(?:/(?P<rest>.*))?)?$")


class Repository:
    """One repository: commits, each a folder's files as they were when it was registered."""

    def __init__(self, name: str) -> None:
        self.name, self.commits, self.refs = name, {}, {}

    def add(self, folder: Path, revision: str, commit: str | None = None) -> str:
        """A commit of every file below `folder`; `revision` (a branch, a tag or `refs/pr/1`) now names it."""
        files = {path.relative_to(folder).as_posix(): self._entry(path)
                 for path in sorted(Path(folder).rglob("*")) if path.is_file()}
        commit = commit or hashlib.sha1(json.dumps([self.name, sorted((name, f["oid"]) for name, f in files.items())])
                                        .encode()).hexdigest()
        self.commits[commit], self.refs[revision] = files, commit
        return commit

    @staticmethod
    def _entry(path: Path) -> dict[str, Any]:
        content = path.read_bytes()
        entry = {"place": path, "size": len(content), "lfs": None,
                 "oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()}  # as git names a blob
        if path.name.endswith(LFS):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return entry

    def commit(self, revision: str) -> str | None:
        """The commit that a branch, a tag or a (whole) commit hash names."""
        return revision if revision in self.commits else self.refs.get(revision)


class Hub:
    """The server; a context manager that starts it on a free port of 127.0.0.1 and stops it."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.faults: list[dict[str, Any]] = []
        self.stalled, self.healed = threading.Event(), threading.Event()
        self.requests: list[tuple[str, str]] = []  # (method, path) of everything asked, in order
        handler = type("BoundHandler", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.storage = f"http://localhost:{self.server.server_address[1]}/storage"  # to clients: another host

    def __enter__(self) -> "Hub":
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.healed.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def model(self, name: str, folder: Path, revision: str = "main", commit: str | None = None) -> str:
        """Serve a folder as a model repository; returns the commit. Once more: another commit, or another branch.

        `commit` (40 hex digits) is what the commit shall be called, where an experiment pins one.
        """
        return self.repositories.setdefault(("models", name), Repository(name)).add(folder, revision, commit)

    def dataset(self, name: str, folder: Path, revision: str = "main", commit: str | None = None) -> str:
        """Serve a folder as a data set repository; as `model`."""
        return self.repositories.setdefault(("datasets", name), Repository(name)).add(folder, revision, commit)

    def fail(self, pattern: str, kind: int | str, times: int | None = None) -> None:
        """Spoil what is asked of paths that match `pattern` (fnmatch on the URL's path), `times` times (None: always).

        `kind` is an HTTP status (404, 429, 500, 503, for HEAD and GET alike) or, for the content of a file alone:
        "reset" (half of it, then the connection is reset), "close" (half of it, then closed in an orderly way),
        "short" (half of it with a Content-Length that agrees), "wrong" (one byte flipped, same length and hash),
        "stall" (half of it, the rest not before `heal`).
        """
        if kind == "stall":
            self.stalled.clear(), self.healed.clear()
        self.faults.append({"pattern": pattern, "kind": kind, "times": times})

    def heal(self) -> None:
        """No more faults."""
        self.faults.clear()
        self.healed.set()

    def environment(self, home: Path) -> dict[str, str]:
        """Variables for a child process: this hub, caches below `home`, no telemetry, nothing else of the network."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"),
                "HF_DATASETS_CACHE": str(home / "datasets"), "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0",
                "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
                "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
                "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}

    def here(self, monkeypatch: Any, home: Path) -> None:
        """The same for this process, whose libraries have read their variables already; undone by `monkeypatch`."""
        import datasets.config
        import huggingface_hub.constants as constants
        from huggingface_hub import HfFileSystem

        for name, value in self.environment(home).items():
            monkeypatch.setenv(name, value)
        template = "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {"ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"),
                            "HUGGINGFACE_HUB_CACHE": str(home / "hub"), "HF_HUB_OFFLINE": False,
                            "HF_HUB_DISABLE_XET": True, "HF_HUB_DISABLE_IMPLICIT_TOKEN": True,
                            "HUGGINGFACE_CO_URL_TEMPLATE": self.url + template}.items():
            monkeypatch.setattr(constants, name, value, raising=False)
        for name, value in {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": False, "HF_CACHE_HOME": home,
                            "HF_DATASETS_CACHE": home / "datasets", "HF_MODULES_CACHE": str(home / "modules"),
                            "HUB_DATASETS_URL": self.url + "/datasets/{repo_id}/resolve/{revision}/{path}",
                            "HUB_DATASETS_HFFS_URL": "hf://datasets/{repo_id}@{revision}/{path}"}.items():
            monkeypatch.setattr(datasets.config, name, value, raising=False)
        HfFileSystem.clear_instance_cache()

    def fault(self, path: str, content: bool) -> int | str | None:
        """The fault that applies to this request, which uses it up once."""
        for fault in self.faults:
            if fault["times"] == 0 or not fnmatch(path, fault["pattern"]):
                continue
            if isinstance(fault["kind"], int) or content:
                fault["times"] = None if fault["times"] is None else fault["times"] - 1
                return fault["kind"]
        return None


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def answer(self, body: bytes = b"") -> None:
        """Route one request."""
        url = urlsplit(self.path)
        path, query = unquote(url.path), parse_qs(url.query)
        self.hub.requests.append((self.command, path))
        stored = path.startswith("/storage/")
        route = ROUTE.match(path.removeprefix("/storage"))
        redirected = bool(route and route["what"] == "resolve" and path.endswith(LFS) and not stored)
        is_content = bool(route and route["what"] == "resolve" and self.command == "GET" and not redirected)
        fault = self.hub.fault(path.removeprefix("/storage"), is_content)
        if isinstance(fault, int):
            return self.reply(fault, {"error": f"a stand-in failure: {fault}"})
        if route is None:
            return self.reply(404, {"error": "no such page"})
        kind = route["kind"] or "models"
        repository = self.hub.repositories.get((kind, route["repo"]))
        if repository is None:
            return self.reply(401, {"error": "Repository not found"}, {
                "X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        what, rest = route["what"], route["rest"] or ""
        if what == "refs":
            return self.reply(200, {"branches": [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit}
                                                 for name, commit in repository.refs.items()],
                                    "tags": [], "converts": []})
        revision, name = self.split(repository, rest, whole=what in (None, "revision"))
        commit = repository.commit(revision)
        if commit is None:
            return self.reply(404, {"error": f"Invalid rev id: {revision}"}, {
                "X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"})
        files = repository.commits[commit]
        if what in (None, "revision"):
            return self.reply(200, {"id": repository.name, "sha": commit, "private": False, "gated": False, "tags": [],
                                    "disabled": False, "downloads": 0, "likes": 0,
                                    "lastModified": "2026-01-01T00:00:00.000Z",
                                    "siblings": [{"rfilename": each} for each in files]})
        if what == "paths-info":
            given = json.loads(body) if body[:1] == b"{" else parse_qs(body.decode())
            return self.reply(200, [entry for each in given["paths"] for entry in self.infos(files, each.strip("/"))])
        if what == "tree":
            return self.tree(files, name, query.get("recursive", ["false"])[0].lower() in ("true", "1"), commit)
        if name not in files:
            return self.reply(404, {"error": "Entry not found"}, {
                "X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found", "X-Repo-Commit": commit})
        if redirected:
            entry = files[name]
            return self.reply(302, {}, {"Location": f"{self.hub.storage}{self.path}", "X-Repo-Commit": commit,
                                    "X-Linked-Size": str(entry["lfs"]["size"]), "ETag": f'"{entry["oid"]}"',
                                    "X-Linked-Etag": f'"{entry["lfs"]["oid"]}"'})
        self.send_file(files[name], commit, fault)

    @staticmethod
    def split(repository: Repository, rest: str, whole: bool) -> tuple[str, str]:
        """"refs/pr/1/folder/file" -> revision and path; revisions may hold slashes."""
        if whole or not rest:
            return rest or "main", ""
        known = [*repository.refs, *repository.commits]
        revision = next((each for each in sorted(known, key=len, reverse=True)
                         if rest == each or rest.startswith(each + "/")), rest.split("/")[0])
        return revision, rest[len(revision) + 1:]

    @staticmethod
    def info(name: str, entry: dict[str, Any]) -> dict[str, Any]:
        """A file as the tree lists it."""
        return {"type": "file", "path": name, "size": entry["size"], "oid": entry["oid"],
                **({"lfs": entry["lfs"]} if entry["lfs"] else {})}

    def infos(self, files: dict[str, Any], name: str) -> list[dict[str, Any]]:
        """The file or folder of that name, or nothing."""
        if name in files:
            return [self.info(name, files[name])]
        if name == "" or any(each.startswith(name + "/") for each in files):
            return [{"type": "directory", "path": name, "size": 0, "oid": hashlib.sha1(name.encode()).hexdigest()}]
        return []

    def tree(self, files: dict[str, Any], below: str, recursive: bool, commit: str) -> None:
        """The files (and folders) below a folder."""
        prefix = f"{below}/" if below else ""
        inside = {name: entry for name, entry in files.items() if name.startswith(prefix)}
        if below and not inside:
            return self.reply(404, {"error": "no such folder"}, {
                "X-Error-Code": "EntryNotFound", "X-Error-Message": "no such folder"})
        folders = {prefix + "/".join(parts[:n]) for name in inside
                   for parts in [name[len(prefix):].split("/")] for n in range(1, len(parts))}
        listed = [*self.folder_infos(files, folders), *(self.info(name, entry) for name, entry in inside.items())]
        if not recursive:
            listed = [each for each in listed if "/" not in each["path"][len(prefix):]]
        return self.reply(200, listed, {"X-Repo-Commit": commit})

    def folder_infos(self, files: dict[str, Any], folders: set[str]) -> list[dict[str, Any]]:
        """Folders as the tree lists them."""
        return [entry for folder in sorted(folders) for entry in self.infos(files, folder)]

    def send_file(self, entry: dict[str, Any], commit: str, fault: str | None) -> None:
        """A file's bytes, or a range of them, as they are or spoilt."""
        content = entry["place"].read_bytes()
        if fault == "wrong":
            middle = len(content) // 2
            content = content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1:]
        if fault == "short":
            content = content[: len(content) // 2]
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream",
                   "ETag": f'"{(entry["lfs"] or entry)["oid"]}"', "Access-Control-Expose-Headers": "*"}
        status, total = 200, len(content)
        if (found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))) and self.command == "GET":
            first, last = int(found[1]), min(int(found[2] or total - 1), total - 1)
            if first >= total:
                return self.reply(416, {}, {"Content-Range": f"bytes */{total}"})
            content, status = content[first : last + 1], 206
            headers["Content-Range"] = f"bytes {first}-{last}/{total}"
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault in ("reset", "close"):
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            if fault == "reset":  # an RST in place of the orderly end
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close() if fault == "reset" else None
            return
        half = len(content) // 2 if fault == "stall" else 0
        self.wfile.write(content[:half])
        if fault == "stall":
            self.wfile.flush()
            self.hub.stalled.set()
            self.hub.healed.wait(60)
        with contextlib.suppress(OSError):  # who stalled may be gone
            self.wfile.write(content[half:])

    def reply(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        """A JSON answer."""
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, each in {"Content-Type": "application/json", **(headers or {}),
                           "Content-Length": str(len(body))}.items():
            self.send_header(name, each)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def tiny_tokenizer(vocab: int = 300) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab` ids (257 and up: every text can be written) with <|endoftext|> as id 0."""
    text = ["the old man and the sea", "a race of many arms over the same text", "wiring beats blending", "1234567890"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.train_from_iterator(text * 4, trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>",
                                   unk_token="<|endoftext|>")


def tiny_pythia(folder: Path, layers: int = 2, width: int = 32, heads: int = 4, mlp: int | None = None,
                vocab: int = 304, context: int = 128, seed: int = 0, shards: int = 1, buffers: bool = True,
                std: float = 0.1) -> Path:
    """Write a random GPT-NeoX as Pythia's repositories hold theirs, and return the folder.

    Files: `config.json` in the names of old releases (`rotary_pct`, `rotary_emb_base`), fp16 `model.safetensors` (or
    `shards` of them with an index), with `embed_out.weight` and the `buffers` old releases carry, and a tokenizer of
    fewer ids than `vocab`. Every weight is drawn, norms and biases too, so that none can be lost unnoticed.
    """
    generator, mlp = torch.Generator().manual_seed(seed), mlp or 4 * width
    folder.mkdir(parents=True, exist_ok=True)

    def draw(*size: int, around: float = 0.0) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * std + around).to(torch.float16)

    tensors = {"gpt_neox.embed_in.weight": draw(vocab, width)}
    for block in range(layers):
        at = f"gpt_neox.layers.{block}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors |= {f"{at}{norm}.weight": draw(width, around=1.0), f"{at}{norm}.bias": draw(width)}
        for name, out, into in (("attention.query_key_value", 3 * width, width), ("attention.dense", width, width),
                                ("mlp.dense_h_to_4h", mlp, width), ("mlp.dense_4h_to_h", width, mlp)):
            tensors |= {f"{at}{name}.weight": draw(out, into), f"{at}{name}.bias": draw(out)}
        if buffers:
            rotary = width // heads // 4
            tensors |= {f"{at}attention.bias": torch.ones(1, 1, context, context, dtype=torch.bool).tril(),
                        f"{at}attention.masked_bias": torch.tensor(-1e9),
                        f"{at}attention.rotary_emb.inv_freq": 10000.0 ** (-torch.arange(0, rotary, 2) / max(rotary, 1))}
    tensors |= {"gpt_neox.final_layer_norm.weight": draw(width, around=1.0),
                "gpt_neox.final_layer_norm.bias": draw(width), "embed_out.weight": draw(vocab, width)}
    write_shards(folder, tensors, shards)
    config = {"architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
              "hidden_size": width, "initializer_range": 0.02, "intermediate_size": mlp, "layer_norm_eps": 1e-5,
              "max_position_embeddings": context, "model_type": "gpt_neox", "num_attention_heads": heads,
              "num_hidden_layers": layers, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
              "torch_dtype": "float16", "transformers_version": "4.24.0", "use_cache": True,
              "use_parallel_residual": True, "vocab_size": vocab}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tokenizer = tiny_tokenizer(min(vocab, 300))
    assert len(tokenizer) <= vocab, "the tokenizer's alphabet alone is 257 ids: give vocab >= 257"
    tokenizer.save_pretrained(folder)
    return folder


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    """One `model.safetensors`, or `shards` of them by size with their index."""
    if shards == 1:
        return save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    ends = np.cumsum([tensor.nbytes for tensor in tensors.values()])
    where = {name: min(int(end * shards / (total + 1)), shards - 1) for name, end in zip(tensors, ends, strict=True)}
    files = {shard: f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" for shard in range(shards)}
    for shard, file in files.items():
        save_file({name: tensor for name, tensor in tensors.items() if where[name] == shard}, folder / file,
                  {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(
        {"metadata": {"total_size": total}, "weight_map": {name: files[where[name]] for name in tensors}}, indent=2))


def parquet(path: Path, columns: dict[str, list[Any]]) -> Path:
    """Write columns as a parquet file (a data set's `data/train-00000-of-00001.parquet`, say); returns the path."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path
