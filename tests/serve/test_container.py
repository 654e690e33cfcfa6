"""The Dockerfile, read as a linter reads it: it cannot be built where there is no Docker."""

import json
import re
import shlex
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def instructions():
    """Pairs of an instruction and its words, lines that go on joined."""
    text = (ROOT / "Dockerfile").read_text()
    lines = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.startswith("#"))).splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line.strip()]


def words_of(kind):
    return [words for name, words in instructions() if name == kind]


def test_every_instruction_is_one():
    known = {"FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in instructions()} == known
    assert instructions()[0][0] == "FROM"
    for name in ("ENTRYPOINT", "CMD"):
        assert all(isinstance(word, str) for word in json.loads(words_of(name)[0]))  # no shell that eats signals
    assert json.loads(re.search(r"CMD (\[.*\])", words_of("HEALTHCHECK")[0])[1])[0] == "python"


def test_it_is_pinned_small_and_of_no_root():
    (image,) = words_of("FROM")
    assert re.fullmatch(r"python:\d+\.\d+-slim-\w+", image)
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert tuple(map(int, re.search(r":(\d+)\.(\d+)", image).groups())) >= (3, 10)
    assert "--constraint constraints.txt" in words_of("RUN")[0]
    assert "PIP_NO_CACHE_DIR=1" in words_of("ENV")[0]
    assert words_of("USER") == ["10001"]
    order = [name for name, _ in instructions()]
    assert order.index("USER") > max(place for place, name in enumerate(order) if name == "RUN")
    assert {"cli", "serve"} <= set(wanted["optional-dependencies"])
    assert "'.[cli,serve]'" in words_of("RUN")[0]


def test_what_it_copies_is_there_and_let_through():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    for words in words_of("COPY"):
        for source in shlex.split(words)[:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source.removeprefix('./')}" in ignored


def test_its_command_is_one_of_ours(capsys):
    from calling import call

    command = json.loads(words_of("CMD")[0])
    assert call(capsys, *command[:1], "--help").code == 0
    assert "--host" in command
    assert words_of("EXPOSE") == ["8000"]
