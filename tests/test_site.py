"""The documentation site: no warning, no request to anybody else, every public name, and code that runs."""

import doctest
import json
import os
import re
import subprocess
import sys
from collections import Counter
from functools import reduce
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import doctests
import equations
import pytest
import yaml

import spalier

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


def text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built strictly."""
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "default"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    assert "warning" not in report.lower(), report
    return folder


class Resources(HTMLParser):
    """What a browser fetches to show a page, and all anchors."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids += [given["id"]] if given.get("id") else []
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed"):
            self.fetched += [given[key] for key in ("src", "srcset") if given.get(key)]
        if tag == "link" and given.get("rel") not in ("prev", "next"):
            self.fetched.append(given["href"])


@pytest.mark.slow
def test_no_page_asks_anybody_else_for_anything(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        fetched = Resources(page.read_text(encoding="utf-8")).fetched
        assert fetched, page
        assert [address for address in fetched if re.match(r"(https?:)?//", address)] == [], page
    for sheet in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")) == []


def test_every_page_is_in_the_navigation_once():
    class Loader(yaml.SafeLoader):
        """Reads what is of interest here; other tags are left alone."""

    Loader.add_multi_constructor("", lambda loader, tag, node: None)
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    listed = Counter(_leaves(config["nav"]))
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    notebooks = {f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert set(listed) == written | notebooks
    assert set(listed.values()) == {1}


def _leaves(entry):
    if isinstance(entry, str):
        return [entry]
    inner = entry if isinstance(entry, list) else entry.values()
    return [leaf for each in inner for leaf in _leaves(each)]


def directives() -> list[str]:
    """What the reference pages list, by path."""
    pages = sorted((DOCS / "reference").glob("*.md"))
    return [path for page in pages for path in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)]


def named(path: str) -> object:
    """The object of a dotted path, through modules and then attributes."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            module = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        return reduce(getattr, parts[end:], module)
    raise AssertionError(path)


def test_the_reference_lists_every_public_name_once():
    listed = Counter(id(named(path)) for path in directives())
    for name in spalier.__all__:
        assert listed[id(getattr(spalier, name))] == 1, name


@pytest.mark.slow
def test_the_reference_shows_what_it_lists(site):
    shown = [
        anchor
        for page in (site / "reference").rglob("*.html")
        for anchor in Resources(page.read_text(encoding="utf-8")).ids
    ]
    for path in directives():
        assert shown.count(path) == 1, path


@pytest.mark.slow
@pytest.mark.parametrize("module", ["criteria", "errors", "models"])
def test_the_reference_lists_what_public_modules_have(site, module):
    page = {"criteria": "criteria", "errors": "errors", "models": "networks"}[module]
    html = (site / "reference" / page / "index.html").read_text(encoding="utf-8")
    members = vars(getattr(spalier, module))
    public = getattr(getattr(spalier, module), "__all__", None) or [
        name
        for name, value in members.items()
        if not name.startswith("_") and getattr(value, "__module__", "") == f"spalier.{module}"
    ]
    assert public
    for name in public:
        assert re.search(rf'id="spalier\.(\w+\.)*{name}"', html), name


@pytest.mark.slow
def test_the_search_finds_words_of_every_kind_of_page(site):
    index = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].split("#")[0] for entry in index["docs"]}
    assert {"tutorial/", "howto/deploy/", "reference/tasks/", "notebooks/first_task/", "faq/"} <= found


@pytest.mark.slow
def test_equations_are_mathml_and_examples_are_code(site):
    ideas = (site / "explanation/ideas/index.html").read_text(encoding="utf-8")
    written = sum(len(block.splitlines()) for block in blocks("explanation/ideas.md", "math"))
    assert ideas.count('<math display="block">') == written > 4
    assert "\\mathbf" not in ideas
    for page in (site / "reference").rglob("*.html"):
        assert "<blockquote>" not in page.read_text(encoding="utf-8"), page  # what Markdown makes of >>>


@pytest.mark.parametrize("module", [equations, doctests])
def test_the_tools_of_the_site_do_as_they_say(module):
    done = doctest.testmod(module)
    assert done.attempted > 0
    assert done.failed == 0


@pytest.mark.parametrize("wrong", [r"\nosuchword", r"\mathbf{W", r"{a", r"a}"])
def test_an_equation_that_is_not_known_is_refused(wrong):
    with pytest.raises(ValueError, match=re.escape(wrong)):
        equations.mathml(wrong)


def test_the_place_for_the_commands_is_marked():
    assert re.search(r"<!-- commands -->\n(.+)\n<!-- /commands -->", text("cli.md"), re.DOTALL)
