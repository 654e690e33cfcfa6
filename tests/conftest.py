"""Set-up that every test shares, and what is skipped where a machine lacks what a test needs."""

import gc
import os
import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
import torchvision_ops
from hypothesis import settings

collect_ignore_glob = ["conftest.py", "*/conftest.py"]  # they hold no doctests, and share a name

torchvision_ops.declare()  # before anything imports torchvision
torch.set_num_threads(1)  # tests run side by side, and training repeats whatever the number of cores
os.environ["OMP_NUM_THREADS"] = "1"  # and so do processes that tests start
# The same examples everywhere, however busy the machine; --hypothesis-profile default draws others.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def _has_font() -> bool:
    import resvg_py

    frame = "<svg xmlns='http://www.w3.org/2000/svg' width='40' height='20'>{}</svg>"
    word, nothing = (
        resvg_py.svg_to_bytes(svg_string=frame.format(inside), font_family="DejaVu Sans")
        for inside in ("<text y='15' font-family='DejaVu Sans'>word</text>", "")
    )
    return word != nothing


SHARED = Path(os.environ.get("SPALIER_SHARED", Path(__file__).resolve().parents[2] / "shared"))
NEEDS = {
    "browser": (
        lambda: shutil.which("chromium") and shutil.which("chromedriver"),
        "apt-get install chromium chromium-driver",
    ),
    "compiler": (lambda: shutil.which("g++") or shutil.which("clang++"), "apt-get install g++"),
    "fonts": (_has_font, "apt-get install fonts-dejavu-core"),
    "data": (
        lambda: (SHARED / "data").is_dir(),
        "set SPALIER_SHARED to a folder that has data/ and weights/",
    ),
}
"""What a machine may lack: whether it is there, and how to get it."""


def pytest_addoption(parser):
    parser.addoption("--require", action="append", default=[], choices=NEEDS, help="fail at once where this is missing")


def pytest_configure(config):
    for kind in config.getoption("--require"):
        found, remedy = NEEDS[kind]
        if not found():
            raise pytest.UsageError(f"--require {kind}: there is none; {remedy}")


def need(kind: str) -> None:
    """Skip the test where the machine lacks what it needs; the last line of the run counts these."""
    found, _ = NEEDS[kind]
    if not found():
        pytest.skip(f"needs {kind}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter):
    """The last thing that is printed before the counts."""
    yield
    reasons = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])]
    counts = Counter(re.sub(r"^Skipped: ", "", reason) for reason in reasons)
    if counts:
        said = (
            f"{count} × {reason}" + (f" ({NEEDS[kind][1]})" if (kind := reason[6:]) in NEEDS else "")
            for reason, count in counts.most_common()
        )
        terminalreporter.write_line(f"skipped: {'; '.join(said)}", yellow=True)


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """What was imported so far is never garbage: a collector that looks at it each time takes a second, not 10 ms."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded():
    """Each test draws the same numbers, alone or in any order, and leaves global switches as they were."""
    torch.manual_seed(0)
    dtype, fast_path = torch.get_default_dtype(), torch.backends.mha.get_fastpath_enabled()
    yield
    assert torch.get_default_dtype() == dtype
    assert torch.backends.mha.get_fastpath_enabled() == fast_path


@pytest.fixture(scope="session")
def shared():
    """A folder with real data and weights, which the repository is too small for."""
    need("data")
    return SHARED


@pytest.fixture(scope="session")
def compiler():
    """A compiler of C++, which torch.compile calls."""
    need("compiler")


@pytest.fixture(scope="session")
def fonts():
    """Fonts of the system, which figures are drawn with."""
    need("fonts")


@pytest.fixture(scope="module")
def browser():
    """Chromium, without a window."""
    need("browser")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for flag in (*BROWSER_FLAGS, f"--user-data-dir={folder}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
        yield driver
        driver.quit()


BROWSER_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--window-size=1280,1000",
)
