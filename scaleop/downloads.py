"""Asking the hub: once more where that may help, and a sentence that says what to do where it does not."""

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    RevisionResolutionError,
    XetDownloadError,
)

from scaleop.progress import Bar
from scaleop.store import StoreError

WAITS = (2.0, 10.0, 30.0)  # seconds before a failed request or a damaged download is tried once more
FAILURES = (HTTPError, OSError, RuntimeError, HFValidationError, RevisionResolutionError, XetDownloadError)


class HubError(RuntimeError):
    """A model that cannot be had, or must not be loaded; the message says what is needed and what to do."""


class Repository(NamedTuple):
    """A model repository of the hub at a revision, as the experiment names it."""

    name: str
    revision: str

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}"


class Damaged(OSError):
    """A download that is not what the hub has."""


class Dark(Bar):
    """A bar that is not drawn."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "disable": True})


class Arriving(Bar):
    """Of the bars that `snapshot_download` keeps, only the one of bytes that are on disk is drawn."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        dark = not str(options.get("desc")).startswith("Reconstructing")
        super().__init__(*arguments, **{**options, "desc": "download"}, **({"disable": True} if dark else {}))


def insisted(repo: Repository, files: Sequence[str], ask: Callable[[], Any]) -> Any:
    """`ask()`, repeated after WAITS where trying again may help; any failure becomes a HubError."""
    for wait in (*WAITS, None):
        try:
            return ask()
        except FAILURES as error:
            if isinstance(error, HubError | StoreError):
                raise
            lasting = _lasting(repo, files, error)
            if lasting or wait is None:
                raise HubError(lasting or _dropped(repo, error)) from error
            time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def _lasting(repo: Repository, files: Sequence[str], error: BaseException) -> str | None:
    """The sentence for what another attempt will not mend; None for what it may."""
    chain = list(causes(error))
    status = next((each.response.status_code for each in chain if isinstance(each, HfHubHTTPError)), None)
    if any(getattr(each, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for each in chain):
        return (f"the disk is full while fetching {repo} into {constants.HF_HUB_CACHE}. Free space there, or set "
                "HF_HOME to a folder on another disk, then run again: whole files are kept")
    if any(unwritable(each) for each in chain):
        return (f"{constants.HF_HUB_CACHE}, where {repo} would be kept, cannot be written ({error}): set HF_HOME to a "
                "folder you may write to")
    if any(isinstance(each, GatedRepoError) for each in chain):
        return f"{repo} asks its readers to accept conditions: do so on its page of the hub, then `hf auth login`"
    if any(isinstance(each, RevisionNotFoundError) for each in chain):
        return f"{repo.name} has no revision {repo.revision!r}: name a branch, a tag or a whole commit hash of it"
    if any(isinstance(each, RepositoryNotFoundError | HFValidationError) for each in chain):
        return (f"the hub ({constants.ENDPOINT}) has no model {repo.name}, or it is private: check the spelling; for "
                "a private one, `hf auth login`")
    if status is not None and status < 500 and status not in (408, 429):
        return f"the hub ({constants.ENDPOINT}) refuses {repo} with status {status}: {error}"
    offline = (OfflineModeIsEnabled, ConnectionRefusedError, LocalEntryNotFoundError, RevisionResolutionError)
    if status is None and any(isinstance(each, offline) or type(each).__name__ in ("ConnectError", "ConnectTimeout")
                              for each in chain):
        why = "HF_HUB_OFFLINE is set" if any(isinstance(each, OfflineModeIsEnabled) for each in chain) else chain[-1]
        return (f"cannot reach the hub ({constants.ENDPOINT}): {why}. Needed from {repo}: {', '.join(files)}"
                f"{'' if len(files) > 1 else ', then tokenizer (*.json) and weights (*.safetensors)'}. With a "
                "connection, run again (HF_ENDPOINT names a mirror; HF_HOME a cache that already holds them). Without "
                f"one, fetch them elsewhere, `hf download {repo.name} --revision {repo.revision} --include '*.json' "
                f"'*.safetensors' --local-dir FOLDER`, and write that folder in the experiment in place of {repo}")
    return None


def _dropped(repo: Repository, error: BaseException) -> str:
    if isinstance(error, Damaged):
        return str(error)
    why = next((each for each in causes(error) if isinstance(each, HTTPError)), error)  # rather than what wraps it
    return (f"the hub ({constants.ENDPOINT}) failed {len(WAITS) + 1} times while fetching {repo}: {why}. Run again "
            "later: files that are whole are kept, the rest is fetched then")


def unwritable(error: BaseException) -> bool:
    """Is it about a file of this machine that cannot be made? (A forbidden connection is an OSError without a file.)"""
    return (isinstance(error, PermissionError | NotADirectoryError | FileExistsError) or
            getattr(error, "errno", None) == errno.EROFS) and error.filename is not None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
