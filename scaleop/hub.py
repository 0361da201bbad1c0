"""A model named in an experiment -> a local folder with its files: a folder as it is, a repository of the hub, or the
model that a pip package carries (`scaleop.smollm2`).

A hub model is written `owner/name@revision`, where the revision is a commit, a branch, a tag or `refs/pr/N` (none:
`main`). It is resolved to a commit once in a process, so that config, tokenizer and weights are of the same one.
Fetched are config, tokenizer and safetensors, never a pickle and never code; each file is compared with the hash that
the hub lists for it, once, and found again in the hub's cache (HF_HOME) without a connection.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_cached_repo_tree, snapshot_download
from huggingface_hub.errors import CachedRepoTreeNotFoundError
from huggingface_hub.utils.sha import git_hash
from safetensors import SafetensorError, safe_open

from scaleop import store
from scaleop.downloads import Arriving, Damaged, Dark, HubError, Repository, insisted
from scaleop.paths import STORE, relative, resolve
from scaleop.smollm2 import packaged

CONFIG = ("config.json",)
TEXT = re.compile(r"[^/]+\.json|merges\.txt|vocab\.txt|[^/]+\.model")  # config and tokenizer, at the top
PICKLES = re.compile(r"[^/]+\.(bin|pt|pth|ckpt|pkl)")
AGAIN = "copy it again, or name another revision"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def named(name: str | Path) -> Path | Repository:
    """What a model's name stands for: an existing folder (a packaged model's is written first), or a repository.

    HubError for anything else.
    """
    if isinstance(name, str) and name.startswith("package:"):
        return packaged(name)
    found = resolve(name) if isinstance(name, str) else name
    if isinstance(found, str):
        if match := re.fullmatch(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[^@\s]+))?", found):
            return Repository(match["name"], match["revision"] or "main")
        raise HubError(f"{found!r} is neither a folder nor a hub model: write a folder's path, or owner/name@revision")
    if not found.is_dir():
        raise HubError(f"there is no folder {relative(found)}: `make models` trains the nano ladder; name another "
                       "folder, or a hub model as owner/name@revision")
    return found


def folder(name: str | Path) -> Path:
    """The folder with everything: config, tokenizer and safetensors, fetched first if need be. HubError otherwise."""
    place = _place(name, _everything)
    weight_files(place, str(name))
    return place


def tokenizer_folder(name: str | Path) -> Path:
    """The folder with config and tokenizer at least; no weights are fetched."""
    return _place(name, _texts)


def config_folder(name: str | Path) -> Path:
    """The folder with `config.json` at least; nothing else is fetched."""
    return _place(name)


def _place(name: str | Path, wanted: Callable[[Repository, str, Path], list[str]] | None = None) -> Path:
    """The folder a name stands for, of a hub model with config.json and the `wanted` files; it asks for no code."""
    place = named(name)
    if isinstance(place, Repository):
        place = _fetched(place, wanted and partial(wanted, place))
    _refuse_code(place, name)
    return place


def revision(name: str | Path) -> dict[str, str] | None:
    """For provenance: a hub model's name, the revision asked for and the commit that is; None for a folder."""
    place = named(name)
    return {**place._asdict(), "commit": _commit(*place, constants.ENDPOINT, constants.HF_HUB_CACHE)} \
        if isinstance(place, Repository) else None


def short(name: str | Path) -> str:
    """A model's name as tables show it: `nano-m`, `pythia-410m`."""
    return Path(re.sub(r"@refs/.+", "", str(name))).name.partition("@")[0]


def weight_files(place: Path, name: str | None = None) -> list[Path]:
    """The safetensors files of a folder that `from_pretrained` reads: one, or the shards that its index lists.

    HubError (about `name`) when there are none, when one is missing, and when one is not a whole file.
    """
    what = name or relative(place)
    names = [WHOLE] if (place / WHOLE).exists() else _shards(place)
    if not names:
        if pickles := sorted(path.name for path in place.glob("*") if PICKLES.fullmatch(path.name)):
            raise HubError(_pickles(what, pickles))
        raise HubError(f"{what} holds no {WHOLE} and no {INDEX}: it is not a whole checkpoint")
    for file in names:
        if not (place / file).exists():
            raise HubError(f"{what} lacks {file}, which its {INDEX} lists: copy that file there as well")
        try:
            with safe_open(place / file, "pt"):
                pass  # opening compares the header with the file's length
        except (SafetensorError, OSError) as error:
            raise HubError(f"{file} in {what} is truncated or damaged ({error}). A copy of your own: copy "
                           "it again. A download whose hash is right: the repository itself holds the damage; name "
                           "another revision of it") from error
    return [place / file for file in names]


def _shards(place: Path) -> list[str]:
    if not (place / INDEX).exists():
        return []
    listed = _object(place / INDEX, place).get("weight_map")
    if not isinstance(listed, dict):
        raise HubError(f"{INDEX} in {relative(place)} has no weight_map, the list of shards: {AGAIN}")
    return sorted(set(listed.values()))


def _object(file: Path, name: str | Path) -> dict[str, Any]:
    """What a JSON file of a checkpoint says; HubError (about `name`) where it is truncated or no object."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # JSON's and Unicode's errors are such
        raise HubError(f"{file.name} of {name} is damaged ({error}): {AGAIN}") from error
    if not isinstance(found, dict):
        raise HubError(f"{file.name} of {name} is damaged (not a JSON object): {AGAIN}")
    return found


def refuse_code(values: Any, what: str) -> None:
    """HubError where a config's or tokenizer's parsed JSON asks for code of its own: a repository's is never run."""
    if "auto_map" in values:
        raise HubError(f"{what} asks for code of its own (auto_map), and code from a repository is never run "
                       "(trust_remote_code): use a checkpoint of an architecture transformers has")


def _refuse_code(place: Path, name: str | Path) -> None:
    """HubError where config or tokenizer ask for code of the repository; trust_remote_code is never set."""
    for file in filter(Path.exists, (place / "config.json", place / "tokenizer_config.json")):
        refuse_code(_object(file, name), f"{file.name} of {name}")
    if not (place / "config.json").exists():
        raise HubError(f"{name} has no config.json: it is not a checkpoint of transformers; name another revision")


def _fetched(repo: Repository, wanted: Callable[[str, Path], list[str]] | None = None) -> Path:
    """The cached snapshot with the `wanted` files (of the commit, given what is there) and config.json, checked."""
    commit = _commit(*repo, constants.ENDPOINT, constants.HF_HUB_CACHE)
    place = _download(repo, commit, list(CONFIG))
    if wanted is not None:
        _refuse_code(place, repo)  # before anything large is fetched
        place = _download(repo, commit, wanted(commit, place))
    return place


@cache
def _commit(name: str, asked: str, endpoint: str, cached_in: str) -> str:
    """The commit that a revision is, for all of this process (a branch may move while it runs)."""
    repo = Repository(name, asked)
    found = insisted(repo, CONFIG, lambda: HfApi(endpoint).resolve_revision(name, revision=asked).resolved)
    store.COMMITS[str(repo)] = found  # for the provenance of whatever is measured from here on
    return found


def _download(repo: Repository, commit: str, files: list[str]) -> Path:
    """The snapshot with these files; each is compared with its hash, and one that differs is fetched again."""
    def ask() -> Path:
        bars = Arriving if any(name.endswith(".safetensors") for name in files) else Dark
        place = Path(snapshot_download(repo.name, revision=commit, allow_patterns=files, tqdm_class=bars))
        if damaged := list(_damaged(repo, commit, place, files)):
            raise Damaged(f"{', '.join(damaged)} of {repo} does not have the bytes that the hub's hash is of. The "
                           "damaged copy was deleted: run again. If it happens again, a proxy or mirror on the way "
                           "changes the file: set HF_ENDPOINT to another, or fetch it elsewhere and name the folder")
        return place
    return insisted(repo, files, ask)


def _damaged(repo: Repository, commit: str, place: Path, files: list[str]) -> Iterator[str]:
    """Names of files that differ from their hash; they are deleted. What was compared before is not read again.

    A snapshot's files are links to blobs that are named by their hash: SHA-256 of large files, git's of small ones. (A
    blob may be a link itself, to content that several repositories share.) A cache on a disk without links names no
    hashes; there the download has compared sizes, and nothing is compared here.
    """
    stamps = STORE / "hub" / f"{repo.name.replace('/', '--')}-{commit}.json"
    seen = store.read_json(stamps) if stamps.exists() else {}
    before = dict(seen)
    for name in files:
        path = place / name
        if not path.is_symlink() or not path.exists():
            continue
        blob, content = path.parent / path.readlink(), path.resolve()
        state = [content.stat().st_size, content.stat().st_mtime_ns]
        if seen.get(name) == state or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", blob.name):
            continue
        if blob.name == (store.sha256(content) if len(blob.name) == 64 else git_hash(content.read_bytes())):
            seen[name] = state
        else:
            for each in (content, blob, path):
                each.unlink(missing_ok=True)
            yield name
    if seen != before:
        store.write_json(stamps, seen)


def _listed(repo: Repository, commit: str, have: Path) -> list[str]:
    """Top-level files of the repository; without a listing in the cache, those that lie there."""
    try:
        return [file.path for file in get_cached_repo_tree(repo.name, revision=commit) if "/" not in file.path]
    except CachedRepoTreeNotFoundError:
        return [path.name for path in have.glob("*")]


def _texts(repo: Repository, commit: str, have: Path) -> list[str]:
    return [name for name in _listed(repo, commit, have) if TEXT.fullmatch(name)]


def _everything(repo: Repository, commit: str, have: Path) -> list[str]:
    return [*_texts(repo, commit, have), *_weights(repo, commit, have)]


def _weights(repo: Repository, commit: str, have: Path) -> list[str]:
    """The safetensors to fetch, never a pickle; HubError where there are pickles only."""
    names = _listed(repo, commit, have)
    if WHOLE in names:
        return [WHOLE]
    if INDEX in names:
        return _shards(_download(repo, commit, [INDEX]))
    if pickles := sorted(name for name in names if PICKLES.fullmatch(name)):
        raise HubError(_pickles(str(repo), pickles))
    raise HubError(f"{repo} holds no {WHOLE} and no {INDEX}: name another revision or repository")


def _pickles(what: str, pickles: list[str]) -> str:
    return (f"{what} has its weights as pickles only ({', '.join(pickles[:3])}). Loading a pickle can run any code, so "
            "they are refused. Look for a safetensors copy: a pull request of the hub's converter among the "
            "repository's discussions can be named as a revision (owner/name@refs/pr/1); or convert the file in a "
            "sandbox (torch.load with weights_only=True, safetensors.torch.save_file) and name the folder it is in")
