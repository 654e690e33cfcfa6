"""The model card of a task: a README.md for the hub, where whatever the task says shows as text, never as markup.

Tasks on the Hugging Face hub: one repository each, or several in one; what comes from there is not trusted.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from spalier import files
from spalier.errors import TaskFileError
from spalier.tasks.container import SUFFIX, check_name, dump
from spalier.tasks.description import Density, Description
from spalier.tasks.task import Task

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MAX_CLASSES = 50
"""How many classes a card lists."""

_PLACEHOLDER = "OWNER/NAME"
_PUNCTUATION = re.compile(
    r"[!-+:-@\[-`{-~]|(?<!\w)-|-(?!\w)"
)  # all of ASCII but , . / and the - inside of words

# the hub refuses a card whose licence is not among its own (huggingface_hub issue 4218): SPDX names in lower case, a
# few of models, and families such as "gpl", which are left out here
_LICENCES = """
    afl-3.0 agpl-3.0 apache-2.0 artistic-2.0 bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc-by-2.0
    cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0
    cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0
    cdla-permissive-1.0 cdla-permissive-2.0 cdla-sharing-1.0 ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2
    gemma gpl-2.0 gpl-3.0 isc lgpl-2.1 lgpl-3.0 llama2 llama3 llama3.1 llama3.2 llama3.3 lppl-1.3c mit mpl-2.0 ms-pl
    ncsa ofl-1.1 openrail osl-3.0 postgresql unlicense wtfpl zlib
"""


def card(task: Task, size: int, repository: str = _PLACEHOLDER) -> str:
    """The README.md of a task's repository on the hub.

    Args:
        task: what the card is of.
        size: how many bytes its file has.
        repository: where it is, for the example of use.
    """
    said = task.description
    parts = [
        f"# {escaped(said.name)}",
        "A task for one frozen base network: which of its channels are kept, and what was learned on top. With the "
        "base, it builds a plain network that is smaller and faster; without it, it is of no use.",
        _section("Facts", ("", ""), _facts(said, size)),
        _section("Metrics", ("metric", "value"), ((k, f"{v:g}") for k, v in said.metrics.items())),
        _classes(said),
        _section("Preprocessing", ("setting", "value"), _items(said.preprocessing)),
        _section("Provenance", ("", ""), _items(said.provenance)),
        _usage(said.name, repository),
    ]
    return f"{_front_matter(said)}\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def escaped(text: str) -> str:
    """Text that Markdown and HTML show as it is, in a table too.

    >>> escaped("a|b <i>")
    'a&#124;b &#60;i&#62;'
    """
    return _PUNCTUATION.sub(lambda match: f"&#{ord(match[0])};", text)


def _front_matter(said: Description) -> str:
    """YAML of JSON strings, so that no value can end or add a line."""
    tags = ["spalier", "structured-pruning", said.adapter["kind"].lower()]
    lines = ["---", f"library_name: {_quoted('spalier')}", "tags:", *_listed(filter(None, tags))]
    if said.licence:
        lines += _licence(said.licence)
    if said.metrics:
        lines += ["metrics:", *_listed(said.metrics)]
    return "\n".join([*lines, "---"])


def _licence(licence: str) -> list[str]:
    """The licence as the hub knows it, or as another one with its name."""
    known = licence.lower().removesuffix("-only")
    if known in _LICENCES.split():
        return [f"license: {_quoted(known)}"]
    name = re.sub(r"[^a-z0-9.]+", "-", licence.lower()).strip("-.")
    return [f"license: {_quoted('other')}", *([f"license_name: {_quoted(name)}"] if name else [])]


def _listed(values: Iterable[str]) -> list[str]:
    return [f"- {_quoted(value)}" for value in values]


def _quoted(value: str) -> str:
    """A JSON string, which is YAML too as long as characters beyond 16 bits are not written as two escapes."""
    return json.dumps(value, ensure_ascii=False)


def _facts(said: Description, size: int) -> list[tuple[str, str]]:
    settings = ", ".join(f"{key}={_shown(value)}" for key, value in said.adapter.items() if key != "kind")
    return [
        ("adapter", f"{said.adapter['kind']}({settings})"),
        ("learned parameters", f"{said.learned:,}"),
        *((f"{f.name} kept", _share(getattr(said.density, f.name))) for f in fields(Density)),
        ("stored as", said.storage),
        ("file", f"{said.name}{SUFFIX}"),
        ("file size", f"{size:,} bytes"),
        ("base, its architecture", said.base.architecture),
        ("base, its values", said.base.values),
        ("licence", said.licence or "not stated"),
    ]


def _share(pair: tuple[int, int] | None) -> str:
    return "not known" if pair is None else f"{pair[0]:,} of {pair[1]:,} ({pair[0] / pair[1]:.1%})"


def _classes(said: Description) -> str:
    names = list(said.classes)
    found = _section(
        "Classes", ("output", "class"), ((str(i), name) for i, name in enumerate(names[:MAX_CLASSES]))
    )
    rest = len(names) - MAX_CLASSES
    return f"{found}\n\nand {rest:,} more, which are in the file." if rest > 0 else found


def _items(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(key, _shown(value)) for key, value in values.items()]


def _shown(value: object) -> str:
    return value if isinstance(value, str) else dump(value)


def _section(title: str, header: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    """A table under a heading, or nothing: in a cell, no text can begin a list, a rule or a block."""
    lines = [f"| {escaped(key)} | {escaped(value)} |" for key, value in rows]
    if not lines:
        return ""
    return "\n".join([f"## {title}", "", f"| {header[0]} | {header[1]} |", "| --- | --- |", *lines])


def _usage(name: str, repository: str) -> str:
    return "\n".join(
        [
            "## How to use",
            "",
            "`base` is the network that the task was learned on; its fingerprints are checked.",
            "",
            "```python",
            "from spalier import Store, Switcher",
            "",
            'store = Store("tasks")',
            f"store.pull({json.dumps(repository)}, {json.dumps(name)})",
            f"net = Switcher(base, store).activate({json.dumps(name)})",
            "```",
        ]
    )


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
            return _status(one.response.status_code, _one_line(one.server_message or "no reason", token))
    told = chain[1] if isinstance(error, errors.LocalEntryNotFoundError) and len(chain) > 1 else error
    answer = _one_line(str(told) or type(told).__name__, token)
    return answer, "check the connection, the endpoint and the space on disk"


def _status(code: int, said: str) -> tuple[str, str]:
    """What a status says, and what to do about it."""
    answer = f"the hub answered {code}, {said}"
    if code in (401, 403):
        return answer, "log in with `hf auth login`, or pass a token that may do this"
    if code == 429 or code >= 500:
        return answer, "try again later"
    return answer, "check the repository, the name and the endpoint"


def _one_line(text: str, token: str | None) -> str:
    """Text of a stranger in one line that is safe to print; the token goes first, as half of it is still a secret."""
    return ascii(" ".join(_without(token, text).split()))[1:-1][:_LONGEST]
