"""What is published: the archives, their metadata, the README as an index shows it, and what a forge reads."""

import re
import tarfile
import tomllib
import zipfile
from email import message_from_bytes, policy
from html.parser import HTMLParser
from pathlib import Path

import markdown
import pytest
import yaml
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from packaging.specifiers import SpecifierSet
from trove_classifiers import classifiers

import spalier
from hatch_build import for_index

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """A source archive of the repository, and the wheel that is made of it."""
    folder = tmp_path_factory.mktemp("release")
    (source,) = SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with tarfile.open(source) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.2 has none
        archive.extractall(folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    (wheel,) = WheelBuilder(str(unpacked)).build(directory=str(folder), versions=["standard"])
    return unpacked, Path(wheel)


@pytest.fixture(scope="module")
def metadata(archives):
    with zipfile.ZipFile(archives[1]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(wheel.read(name), policy=policy.default)


def test_the_wheel_holds_the_package_alone(archives):
    with zipfile.ZipFile(archives[1]) as wheel:
        names = wheel.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"spalier", f"spalier-{spalier.__version__}.dist-info"}
    assert {"spalier/py.typed", "spalier/reporting/templates/page.js"} <= set(names)
    assert {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src").rglob("*.py")} <= set(names)
    assert archives[1].stat().st_size < 3_000_000


def test_the_source_archive_has_what_it_needs(archives):
    found = {path.name for path in archives[0].iterdir()}
    assert {"README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "hatch_build.py", "pyproject.toml", "src"} <= found
    assert not {"tests", "benchmarks", ".ci"} & found


def test_metadata(metadata):
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert metadata["Version"] == spalier.__version__ == citation["version"]
    assert metadata["Author"] == ", ".join(author["name"] for author in citation["authors"])
    assert metadata["License-Expression"] == citation["license"]
    assert set(metadata.get_all("Classifier")) <= classifiers
    minors = re.findall(r"Python :: (3\.\d+)", "\n".join(metadata.get_all("Classifier")))
    assert minors
    assert all(SpecifierSet(metadata["Requires-Python"]).contains(f"{minor}.0") for minor in minors)
    addresses = " ".join([*metadata.get_all("Project-URL", []), metadata.get("Home-page") or ""])
    assert not re.search(r"example\.|localhost|todo|your|placeholder|<|\.invalid", addresses, re.IGNORECASE)


class Addresses(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.pictures, self.links = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.pictures += [found["src"]] if tag in ("img", "source") else []
        self.links += [found["href"]] if tag == "a" else []


def test_an_index_can_show_the_readme(metadata):
    """It has no folder beside the README: pictures and links into the repository would be broken."""
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_content()
    assert text.lstrip().startswith("# Spalier")
    assert len(text) > 2000
    assert "```python" in text
    shown = Addresses(markdown.markdown(text, extensions=["fenced_code", "tables"]))
    assert [address for address in shown.pictures if not address.startswith("https://")] == []
    assert [address for address in shown.links if not re.match("https?://|#", address)] == []


def test_links_into_the_repository_become_words():
    text = (
        "# A\n\n![two\nlines](docs/a.svg)\n\nSee [the page](docs/b.md#part), [a site](https://pytorch.org/x) and\n"
        '<img src="docs/c.png" alt="c"> <img src="https://a.org/d.png">\n\n```python\na = b[0](c)\n```\n'
    )
    assert for_index(text) == (
        "# A\n\nSee the page, [a site](https://pytorch.org/x) and\n"
        ' <img src="https://a.org/d.png">\n\n```python\na = b[0](c)\n```\n'
    )


def test_the_workflow_mirrors_the_ci():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    job = workflow["jobs"]["ci"]
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    (version,) = re.findall(r"python:(3\.\d+)-", job["container"])
    assert SpecifierSet(PROJECT["requires-python"]).contains(f"{version}.0")
    assert workflow["permissions"] == {"contents": "read"}
    used = [step["uses"] for each in workflow["jobs"].values() for step in each["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", action) for action in used)


@pytest.mark.parametrize("name", ["defect", "wish"])
def test_templates_of_issues(name):
    _, head, body = (ROOT / f".github/ISSUE_TEMPLATE/{name}.md").read_text().split("---\n", 2)
    assert {"name", "about", "labels"} == set(yaml.safe_load(head))
    assert "**" in body


def test_what_checklists_name_is_there():
    texts = [(ROOT / ".github/pull_request_template.md").read_text()]
    texts.append((ROOT / "CONTRIBUTING.md").read_text().partition("## A release")[2].partition("\n## ")[0])
    texts.append((ROOT / ".github/ISSUE_TEMPLATE/defect.md").read_text())
    commands = (ROOT / "dev.py").read_text()
    for text in texts:
        for word in re.findall(r"`([^`]+)`", text):
            if word.startswith("python3 dev.py "):
                assert f'    "{word.split()[-1]}": (' in commands
            elif "/" in word and " " not in word and "dist" not in word:
                assert (ROOT / word).exists(), word
