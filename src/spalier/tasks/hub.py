"""Tasks on the Hugging Face hub: one repository each, or several in one, with a model card.

What comes from the hub is not trusted. In a card, whatever a task says shows as text, never as markup.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spalier.errors import TaskFileError
from spalier.tasks.format import SUFFIX, check_name
from spalier.tasks.store import Store
from spalier.tasks.task import Task
from spalier.text import first_few

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MAX_CLASSES = 50
"""How many classes a card lists."""
MAX_ANSWER = 300
"""How many characters of the hub's answer a message shows."""

# all of ASCII but , . / and the - inside of words
_PUNCTUATION = re.compile(r"[!-+:-@\[-`{-~]|(?<!\w)-|-(?!\w)")
_SECRET = re.compile(r"\bhf_[A-Za-z0-9]{20,}|(?<=[Bb]earer )\S+")

_USAGE = """## How to use

`base` is the network that the task was learned on; its fingerprints are checked.

```python
from spalier import Store, Switcher

store = Store("tasks")
store.pull({repository}, {name})
net = Switcher(base, store).activate({name})
```"""


def card(task: Task, size: int, repository: str = "OWNER/NAME") -> str:
    """The README.md of a task's repository on the hub.

    Args:
        task: what the card is of.
        size: how many bytes its file has.
        repository: where it is, for the example of use.
    """
    from huggingface_hub import ModelCardData

    info = task.info
    data = ModelCardData(
        library_name="spalier",
        tags=[tag for tag in ("spalier", "structured-pruning", info.adapter["kind"].lower()) if tag],
        metrics=list(info.metrics) or None,
        **_licence(info.licence),
    )
    said = f"{info}\nall classes: {first_few(info.classes, MAX_CLASSES)}\nfile: {info.name}{SUFFIX}, {size:,} bytes"
    parts = [
        f"# {escaped(info.name)}",
        "A task for one frozen base network: which of its channels are kept, and what was learned on top. With the "
        "base, it builds a plain network that is smaller and faster; without it, it is of no use.",
        f"<pre>\n{escaped(said)}\n</pre>",
        _USAGE.format(repository=json.dumps(repository), name=json.dumps(info.name)),
    ]
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """Text that Markdown and HTML show as it is.

    >>> escaped("a|b <i>")
    'a&#124;b &#60;i&#62;'
    """
    return _PUNCTUATION.sub(lambda match: f"&#{ord(match[0])};", text)


def _licence(licence: str) -> dict[str, Any]:
    """The licence as the hub knows it, or as another one with its name."""
    known = licence.lower().removesuffix("-only")
    # the hub refuses a card whose licence is not among its own (huggingface_hub issue 4218): SPDX names in lower case,
    # a few of models, and families such as "gpl", which are left out here
    if not licence or known in Path(__file__).with_name("licences.txt").read_text("utf-8").split():
        return {"license": known} if licence else {}
    name = re.sub(r"[^a-z0-9.]+", "-", licence.lower()).strip("-.")
    return {"license": "other", **({"license_name": name} if name else {})}


def push(
    store: Store,
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
    data = store._read_bytes(name)
    task = Task.from_bytes(data)
    task = replace(task, info=replace(task.info, name=name))  # as the store calls it
    with _one_error(f"pushing {name!r} to {repository!a}", token):
        from huggingface_hub import CommitOperationAdd

        api = _api(endpoint, token)
        # without private, the owner's default counts: it may be private
        known = api.create_repo(repository, private=private or None, exist_ok=True).repo_id
        if private and not api.model_info(known).private:
            raise TaskFileError("hub", f"{repository!a} is public already, nothing was uploaded; make it private first")
        contents = {f"{name}{SUFFIX}": data, "README.md": card(task, len(data), known).encode()}
        commit = api.create_commit(
            known,
            [CommitOperationAdd(path, content) for path, content in contents.items()],
            commit_message=message or f"Task {name}",
            revision=revision,
        )
    return str(commit.commit_url)


def pull(
    store: Store,
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
    store.check_free(name, overwrite=overwrite)  # before anything is downloaded
    asked = f"pulling {name!r} from {repository!a}"
    # a folder of its own: in the hub's cache files are links, which `Task.load` refuses
    with _one_error(asked, token), tempfile.TemporaryDirectory(prefix="spalier-") as folder:
        path = _api(endpoint, token).hf_hub_download(repository, f"{name}{SUFFIX}", revision=revision, local_dir=folder)
        task = Task.load(path)
    return store.add(task, name, overwrite=overwrite)


def names_in(repository: str, *, token: str | None = None, endpoint: str | None = None) -> list[str]:
    """The names of all tasks in a repository."""
    _check_repository(repository)
    with _one_error(f"listing {repository!a}", token):
        found = _api(endpoint, token).list_repo_files(repository)
    return sorted(name.removesuffix(SUFFIX) for name in found if name.endswith(SUFFIX) and "/" not in name)


def _check_repository(repository: object) -> None:
    if not isinstance(repository, str):  # the rest is the library's to check, but None means others to it
        raise TaskFileError("hub", f"the repository is a {type(repository).__name__}; pass OWNER/NAME")


def _api(endpoint: str | None, token: str | None) -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(endpoint, token, library_name="spalier")


@contextlib.contextmanager
def _one_error(asked: str, token: str | None) -> Iterator[None]:
    """Whatever the hub's library raises, as one line: what was asked, what was answered, what to do."""
    try:
        yield
    except TaskFileError:
        raise
    except ImportError as error:
        raise TaskFileError("hub", f"{asked} needs the package huggingface_hub: pip install 'spalier[hub]'") from error
    except Exception as error:  # it has several families of errors, its HTTP library others, by version
        leaks = any(_without_token(str(one), token) != str(one) for one in _chain(error))
        raise TaskFileError("hub", f"{asked}: {_answer(error, token)}") from (None if leaks else error)


def _without_token(text: str, token: str | None) -> str:
    """Text without the token, which a server may send back, or which is in an error about it."""
    secret = (token or "").strip()
    return _SECRET.sub("<token>", text.replace(secret, "<token>") if secret else text)


def _chain(error: BaseException) -> list[BaseException]:
    """An error, what it was raised from, and so on."""
    found = [error]
    while (cause := found[-1].__cause__) is not None and cause not in found:
        found.append(cause)
    return found


def _answer(error: Exception, token: str | None) -> str:
    """What the hub said, and what to do about it."""
    from huggingface_hub import errors

    def one_line(text: str) -> str:  # the token goes first, as half of it is still a secret
        return ascii(" ".join(_without_token(text, token).split()))[1:-1][:MAX_ANSWER]

    chain = _chain(error)
    answers = {
        errors.HFValidationError: "that is no repository's name; pass OWNER/NAME",
        errors.OfflineModeIsEnabled: "the hub's offline mode is on; unset HF_HUB_OFFLINE",
        errors.GatedRepoError: "access is granted on request; ask for it on the repository's page",
        errors.RepositoryNotFoundError: "there is no such repository, or it is private; check its name, and log in or "
        "pass a token",
        errors.RevisionNotFoundError: "the repository has no such revision; pass a branch, tag or commit of it",
        errors.RemoteEntryNotFoundError: f"the repository has no such task; look for files *{SUFFIX} on its page",
    }
    for kind, answer in answers.items():
        if any(isinstance(one, kind) for one in chain):
            return answer
    for one in chain:
        if isinstance(one, errors.HfHubHTTPError):
            code = one.response.status_code
            advice = "check the repository, the name and the endpoint"
            if code in (401, 403):
                advice = "log in with `hf auth login`, or pass a token that may do this"
            elif code == 429 or code >= 500:
                advice = "try again later"
            return f"the hub answered {code}, {one_line(one.server_message or 'no reason')}; {advice}"
    told = chain[1] if isinstance(error, errors.LocalEntryNotFoundError) and len(chain) > 1 else error
    said = one_line(str(told) or type(told).__name__)
    return f"{said}; check the connection, the endpoint and the space on disk"
