"""The page in a browser: nothing runs that should not, nothing overlaps, hands and keyboards reach everything."""

import contextlib

import pytest
from reported import HOSTILE, task, write_run
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import spalier as sp
from spalier.reporting import report

OVERLAPS = """
const found = [];
for (const svg of document.querySelectorAll("figure > svg")) {
  if (!svg.getClientRects().length) continue;
  const texts = [...svg.querySelectorAll("text")].map((t) => [t.textContent, t.getBoundingClientRect()]);
  for (let i = 0; i < texts.length; i++) for (let j = 0; j < i; j++) {
    const [a, b] = [texts[i][1], texts[j][1]];
    const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (x > 1 && y > 1.5) found.push([svg.parentNode.id, texts[i][0], texts[j][0], x, y]);
  }
}
return found;
"""
OUTSIDE = """
const wide = document.documentElement.clientWidth;
return [...document.querySelectorAll("figure > svg text")]
  .filter((t) => t.getClientRects().length)
  .map((t) => [t.textContent, t.getBoundingClientRect().left, t.getBoundingClientRect().right])
  .filter(([text, left, right]) => left < -1 || right > wide + 1);
"""
WIDER = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A run with hostile names, a sweep, folders of runs on several data, and a store."""
    folder = tmp_path_factory.mktemp("browser")
    write_run(folder / "run", classes=HOSTILE, data="folder:/x/<img src=x onerror=alert(9)>")
    many = [round(1 - 0.05 * i, 2) for i in range(19)]
    write_run(folder / "long", classes=[f"kind of bird number {i}" for i in range(20)], densities=many, extras=False)
    for method in ("splora", "fine-pruning"):
        for seed in range(3):
            write_run(folder / "sweep" / f"method={method},seed={seed}", method=method, seed=seed, extras=False)
    for data in ("digits", "cifar10", "cifar100"):
        for rank in (2, 8):
            write_run(folder / "data" / f"{data}{rank}", data=data, rank=rank, extras=False, densities=(1.0, 0.5))
    store = sp.Store(folder / "store")
    for place, density in enumerate((100, 50, 25)):
        store.add(task(place, f"birds-{density}", metrics={"accuracy": 0.9 - 0.1 * place}))
    (folder / "store" / "bad.task.safetensors").write_bytes(b"<script>alert(1)</script>")
    names = ("run", "long", "sweep", "data", "store")
    return {name: report(folder / name).as_uri() for name in names}


def look(browser, url, width=1280, *, dark=False, media="", script=True):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    features = [
        {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": not script})
    browser.get("about:blank")
    browser.get(url)


def complaints(browser):
    return [entry["message"] for entry in browser.get_log("browser")]


@pytest.mark.parametrize("name", ["run", "long", "sweep", "data", "store"])
@pytest.mark.parametrize("width", [360, 800, 1280])
def test_nothing_overlaps_overflows_or_complains(browser, pages, name, width):
    look(browser, pages[name], width)
    assert browser.execute_script(WIDER) <= 0
    assert browser.execute_script(OVERLAPS) == []
    assert browser.execute_script(OUTSIDE) == []
    assert complaints(browser) == []
    with pytest.raises(Exception, match="no such alert"):
        browser.switch_to.alert  # noqa: B018


def test_dark_is_dark_and_paper_is_light(browser, pages):
    shade = "return getComputedStyle(document.documentElement).backgroundColor.match(/\\d+/g).map(Number)"
    look(browser, pages["run"])
    light = browser.execute_script(shade)
    look(browser, pages["run"], dark=True)
    dark = browser.execute_script(shade)
    look(browser, pages["run"], dark=True, media="print")
    assert min(light) > 200 > 60 > max(dark)
    assert browser.execute_script(shade) == light
    assert not browser.find_element(By.CLASS_NAME, "controls").is_displayed()
    assert browser.execute_script(WIDER) <= 0
    assert complaints(browser) == []


def test_words_stand_out_from_their_paper(browser, pages):
    """The contrast of every colour that words have, as WCAG 2 counts it."""
    names = ["--ink", "--quiet", "--accent", *(f"--s{i}" for i in range(8))]
    read = "return arguments[0].map((n) => getComputedStyle(document.documentElement).getPropertyValue(n).trim())"
    for dark in (False, True):
        look(browser, pages["store"], dark=dark)
        paper, *words = browser.execute_script(read, ["--paper", *names])
        for name, colour in zip(names, words, strict=True):
            assert contrast(paper, colour) >= 4.5, (name, colour, dark)


def contrast(a, b):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def shown(browser):
    return [h.text for h in browser.find_elements(By.CSS_SELECTOR, ".facts h3") if h.is_displayed()]


def point(browser, key, figure="accuracy-learned"):
    css = f'#{figure} .point[data-task="{key}"]'
    return next(p for p in browser.find_elements(By.CSS_SELECTOR, css) if p.is_displayed())


def hover(browser, mark):
    """The driver scrolls before it moves; the page hides its tip on a scroll, of which it hears a frame later."""
    ActionChains(browser).move_to_element(mark).perform()
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    ActionChains(browser).move_by_offset(1, 0).perform()


def test_hovering_shows_the_numbers(browser, pages):
    look(browser, pages["run"])
    tip = browser.find_element(By.ID, "tip")
    assert not tip.is_displayed()
    mark = point(browser, "run/birds-50")
    hover(browser, mark)
    assert tip.is_displayed()
    assert tip.text.splitlines()[0] == "SPLoRA-8, density 50%"
    assert "learned" in tip.text
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, "h1")).perform()
    assert not tip.is_displayed()


def test_choosing_a_point_shows_its_task(browser, pages):
    look(browser, pages["run"])
    for name in ("birds-25", "birds-100"):
        ActionChains(browser).move_to_element(point(browser, f"run/{name}")).click().perform()
        assert shown(browser) == [name]
        assert browser.current_url.endswith(f"#task=run%2F{name}")
        chosen = browser.find_elements(By.CSS_SELECTOR, "#accuracy-learned .chosen")
        assert {c.get_attribute("data-task") for c in chosen} == {f"run/{name}"}
        browser.execute_script("scrollTo(0, 0)")


def test_the_summary_leads_to_each_task(browser, pages):
    look(browser, pages["run"])
    assert shown(browser) == ["birds-25"]  # the last density
    for name in ("birds-100", "birds-50"):
        button = browser.find_element(By.CSS_SELECTOR, f'#summary button[data-task="run/{name}"]')
        assert button.text == name
        button.send_keys(Keys.ENTER)
        assert shown(browser) == [name]
    assert complaints(browser) == []


def test_points_that_lie_on_each_other_are_all_reached(browser, tmp_path):
    for method in ("splora", "fine-pruning"):
        write_run(tmp_path / method, method=method, extras=False, accuracies=[0.9, 0.8, 0.7])
    url = report(tmp_path, tmp_path / "page.html").as_uri()
    look(browser, url)
    upper = point(browser, "splora/birds-50")
    hover(browser, upper)
    tip = browser.find_element(By.ID, "tip").text
    seen = []
    for _ in range(3):
        browser.execute_script("scrollTo(0, 0)")
        ActionChains(browser).move_to_element(upper).click().perform()
        seen.append(browser.current_url.partition("#task=")[2])
    assert "SPLoRA, density 50%" in tip
    assert "fine-pruning, density 50%" in tip
    assert len(set(seen[:2])) == 2
    assert seen[2] == seen[0]


def test_paper_has_panels_side_by_side(browser, pages):
    """At the width of A4: panels of a wide figure, and figures that are not."""
    boxes = """return [...document.querySelectorAll(arguments[0])].filter((n) => n.getClientRects().length)
      .map((n) => [n.getBoundingClientRect().left, n.getBoundingClientRect().top])"""
    for name, css, count in (("data", "#accuracy-learned > svg > g", 3), ("sweep", "#accuracy figure", 5)):
        look(browser, pages[name], 718, media="print")
        found = browser.execute_script(boxes, css)
        lefts = {round(left / 100) for left, _ in found}
        assert len(found) == count
        assert len(lefts) > 1, (name, found)
        assert browser.execute_script(WIDER) <= 0
        assert browser.execute_script(OVERLAPS) == []


def test_the_network_is_pruned_step_by_step(browser, pages):
    look(browser, f"{pages['run']}#task=run%2Fbirds-100")
    assert shown(browser) == ["birds-100"]
    left = []
    for name in ("birds-100", "birds-50", "birds-25"):
        assert shown(browser) == [name]
        (network,) = (s for s in browser.find_elements(By.CSS_SELECTOR, "#network > svg") if s.is_displayed())
        counts = [t.text.split(" / ") for t in network.find_elements(By.CSS_SELECTOR, "text.count")]
        left.append(sum(int(kept) for kept, _ in counts))
        gone = len(network.find_elements(By.CSS_SELECTOR, ".gone"))
        assert (gone == 0) == (name == "birds-100")
        if name != "birds-25":
            browser.find_element(By.ID, "after").click()
    from reported import tasks

    assert left == [t.info.density.channels[0] for t in tasks()]
    assert not browser.find_element(By.ID, "after").is_enabled()
    browser.find_element(By.ID, "before").click()
    assert shown(browser) == ["birds-50"]
    slider = browser.find_element(By.ID, "step")
    slider.send_keys(Keys.HOME)
    assert shown(browser) == ["birds-100"]


def test_keys_reach_every_point(browser, pages):
    look(browser, pages["run"])
    first = next(p for p in browser.find_elements(By.CSS_SELECTOR, "#accuracy-learned .point") if p.is_displayed())
    assert first.get_attribute("tabindex") == "0"
    browser.find_element(By.CSS_SELECTOR, "summary").send_keys(Keys.TAB)
    browser.execute_script("arguments[0].focus({focusVisible: true})", first)
    active = lambda: browser.switch_to.active_element  # noqa: E731
    seen = set()
    for _ in range(3):
        seen.add(active().get_attribute("data-task"))
        active().send_keys(Keys.ARROW_RIGHT)
    assert seen == {"run/birds-100", "run/birds-50", "run/birds-25"}
    tip = browser.find_element(By.ID, "tip")
    assert tip.is_displayed()
    active().send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()
    key = active().get_attribute("data-task")
    active().send_keys(Keys.ENTER)
    assert shown(browser) == [key.removeprefix("run/")]


def test_another_run_of_a_sweep_can_be_chosen(browser, pages):
    look(browser, f"{pages['sweep']}#task=method%3Dsplora%2Cseed%3D1%2Fbirds-50")
    heads = [h.text for h in browser.find_elements(By.CSS_SELECTOR, ".run > h3") if h.is_displayed()]
    assert heads == ["method=splora,seed=1"]
    select = browser.find_element(By.CSS_SELECTOR, "#choose select")
    select.send_keys(Keys.ARROW_DOWN)
    heads = [h.text for h in browser.find_elements(By.CSS_SELECTOR, ".run > h3") if h.is_displayed()]
    assert heads == ["method=splora,seed=2"]
    assert shown(browser) == ["birds-50"]
    assert complaints(browser) == []


@pytest.mark.parametrize("address", ["#task=none", "#task=%ff", "#task=<img src=x>", "#network"])
def test_other_addresses_do_no_harm(browser, pages, address):
    look(browser, pages["run"] + address)
    assert len(shown(browser)) == 1
    assert complaints(browser) == []


def test_without_scripts_everything_is_there(browser, pages):
    look(browser, pages["run"], script=False)
    try:
        assert shown(browser) == ["birds-100", "birds-50", "birds-25"]
        assert not browser.find_element(By.CLASS_NAME, "controls").is_displayed()
        figures = browser.find_elements(By.CSS_SELECTOR, "figure")
        assert all(f.is_displayed() for f in figures)
        assert len(figures) > 15
        summary = browser.find_element(By.CSS_SELECTOR, "#accuracy-learned summary")
        summary.click()
        assert browser.find_element(By.CSS_SELECTOR, "#accuracy-learned table").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_the_policy_stops_what_is_not_the_pages_own(browser, pages):
    look(browser, pages["run"])
    browser.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.ran = true'; document.body.append(s);"
        "const i = document.createElement('img'); i.src = 'https://example.invalid/x.png'; document.body.append(i);"
    )
    assert browser.execute_script("return window.ran") is None
    with contextlib.suppress(IndexError):
        assert "Content Security Policy" in complaints(browser)[0]
