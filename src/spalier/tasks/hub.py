"""Tasks on the Hugging Face hub: one repository each, or several in one; what comes from there is not trusted."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from spalier.errors import TaskFileError
from spalier.tasks import files
from spalier.tasks.card import card
from spalier.tasks.task import Task
from spalier.tasks.text import SUFFIX, check_name

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_LONGEST = 300
"""How many characters of an answer a message shows."""
_SECRET = re.compile(r"\bhf_[A-Za-z0-9]{20,}|(?<=[Bb]earer )\S+")


class Shelf(Protocol):
    """What the hub needs of a `Store`."""

    def __iter__(self) -> Iterator[str]: ...

    def path(self, name: str) -> Path:
        """Where a task's file is."""
        ...

    def load(self, name: str) -> Task:
        """Read a task."""
        ...

    def add(self, task: Task, name: str | None = None, *, overwrite: bool = False) -> Path:
        """Write a task."""
        ...


def push(
    store: Shelf,
    name: str,
    repository: str,
    *,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
    message: str | None = None,
) -> str:
    """Upload a task's file, byte for byte, and a model card, in one commit; its address.

    Args:
        store: where the task is.
        name: of the task.
        repository: OWNER/NAME; it is made if there is none.
        private: for a new repository, and refused for one that is public already.
        revision: the branch, which has to be there; the main one by default.
        token: the one that you are logged in with by default.
        endpoint: another hub than huggingface.co.
        message: of the commit.
    """
    _check_repository(repository)
    task, data = _read(store, name)
    task = replace(task, description=replace(task.description, name=name))  # as the store calls it
    with _translated(f"pushing {name!r} to {repository!a}", token):
        from huggingface_hub import CommitOperationAdd

        api = _api(endpoint, token)
        # without private, the owner's default counts: it may be private
        known = api.create_repo(repository, private=private or None, exist_ok=True).repo_id
        if private and not api.model_info(known).private:
            raise TaskFileError(
                "hub", f"{repository!a} is public already, nothing was uploaded; make it private first"
            )
        contents = {f"{name}{SUFFIX}": data, "README.md": card(task, len(data), known).encode()}
        commit = api.create_commit(
            known,
            [CommitOperationAdd(path, content) for path, content in contents.items()],
            commit_message=message or f"Task {name}",
            revision=revision,
        )
    return str(commit.commit_url)


def pull(
    store: Shelf,
    repository: str,
    name: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Download a task, check it as any file of a stranger, and add it to the store, or leave the store as it is.

    Args:
        store: where the task goes.
        repository: OWNER/NAME.
        name: of the task.
        revision: a branch, tag or commit; pass a commit to be sure of what comes.
        token: the one that you are logged in with by default.
        endpoint: another hub than huggingface.co.
        overwrite: whether a task of that name may be replaced.
    """
    check_name(name)
    _check_repository(repository)
    _check_free(store, name, overwrite)
    # a folder of its own: in the hub's cache files are links, which `Task.load` refuses
    asked = f"pulling {name!r} from {repository!a}"
    with _translated(asked, token), tempfile.TemporaryDirectory(prefix="spalier-") as folder:
        path = _api(endpoint, token).hf_hub_download(
            repository, f"{name}{SUFFIX}", revision=revision, local_dir=folder
        )
        task = Task.load(path)
    return store.add(task, name, overwrite=overwrite)


def _check_repository(repository: object) -> None:
    if not isinstance(repository, str):  # the rest is the library's to check, but None means others to it
        raise TaskFileError("hub", f"the repository is a {type(repository).__name__}; pass OWNER/NAME")


def _read(store: Shelf, name: str) -> tuple[Task, bytes]:
    """A task, and the very bytes that it was read from."""
    path = store.path(name)
    before = _stamp(path)
    task = store.load(name)
    with files.opened(path) as (file, size):
        data = bytes(files.read_exactly(file, size))
    if _stamp(path) != before:
        raise TaskFileError("changed", f"{name!r} was changed while it was read; try again")
    return task, data


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes with every new file of a name."""
    try:
        found = path.lstat()
    except OSError:
        return None  # reading it says what is wrong
    return found.st_ino, found.st_size, found.st_mtime_ns


def _check_free(store: Shelf, name: str, overwrite: bool) -> None:
    """Refuse what `Store.add` will refuse, before anything is downloaded."""
    for other in store:
        if other.lower() == name.lower() and not (overwrite and other == name):
            advice = "pass overwrite=True to replace it" if other == name else "file systems mix them up"
            raise TaskFileError("exists", f"the store has a task {other!r} already; {advice}")


def _api(endpoint: str | None, token: str | None) -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(endpoint, token, library_name="spalier")


@contextlib.contextmanager
def _translated(asked: str, token: str | None) -> Iterator[None]:
    """Whatever the hub's library raises, as one line: what was asked, what was answered, what to do."""
    try:
        yield
    except TaskFileError:
        raise
    except ImportError as error:
        raise TaskFileError(
            "hub", f"{asked} needs the package huggingface_hub: pip install 'spalier[hub]'"
        ) from error
    except Exception as error:  # it has several families of errors, its HTTP library others, by version
        answer, advice = _answer(error, token)
        leaks = any(_without(token, str(one)) != str(one) for one in _chain(error))
        raise TaskFileError("hub", f"{asked}: {answer}; {advice}") from (None if leaks else error)


def _without(token: str | None, text: str) -> str:
    """Text without the token, which a server may send back, or which is in an error about it."""
    secret = (token or "").strip()
    return _SECRET.sub("<token>", text.replace(secret, "<token>") if secret else text)


def _chain(error: BaseException) -> list[BaseException]:
    """An error, what it was raised from, and so on."""
    found = [error]
    while (cause := found[-1].__cause__) is not None and cause not in found:
        found.append(cause)
    return found


def _answer(error: Exception, token: str | None) -> tuple[str, str]:
    """What the hub said, and what to do about it."""
    from huggingface_hub import errors

    chain = _chain(error)
    for kind, answer, advice in (
        (errors.HFValidationError, "that is no repository's name", "pass OWNER/NAME"),
        (errors.OfflineModeIsEnabled, "the hub's offline mode is on", "unset HF_HUB_OFFLINE"),
        (errors.GatedRepoError, "access is granted on request", "ask for it on the repository's page"),
        (
            errors.RepositoryNotFoundError,
            "there is no such repository, or it is private",
            "check its name, and log in or pass a token",
        ),
        (
            errors.RevisionNotFoundError,
            "the repository has no such revision",
            "pass a branch, tag or commit of it",
        ),
        (
            errors.RemoteEntryNotFoundError,
            "the repository has no such task",
            f"look for the files *{SUFFIX} on its page",
        ),
    ):
        if any(isinstance(one, kind) for one in chain):
            return answer, advice
    for one in chain:
        if isinstance(one, errors.HfHubHTTPError):
            return _status(one.response.status_code, _shown(one.server_message or "no reason", token))
    told = chain[1] if isinstance(error, errors.LocalEntryNotFoundError) and len(chain) > 1 else error
    answer = _shown(str(told) or type(told).__name__, token)
    return answer, "check the connection, the endpoint and the space on disk"


def _status(code: int, said: str) -> tuple[str, str]:
    """What a status says, and what to do about it."""
    answer = f"the hub answered {code}, {said}"
    if code in (401, 403):
        return answer, "log in with `hf auth login`, or pass a token that may do this"
    if code == 429 or code >= 500:
        return answer, "try again later"
    return answer, "check the repository, the name and the endpoint"


def _shown(text: str, token: str | None) -> str:
    """Text of a stranger in one line that is safe to print; the token goes first, as half of it is still a secret."""
    return ascii(" ".join(_without(token, text).split()))[1:-1][:_LONGEST]
