"""The page in a browser: it asks every task, runs nothing that it should not, and works by keyboard, small and dark."""

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from served import CLASSES, PNG, base, picture, running, store_of, task_of

from spalier.serve import app

HOSTILE = "<img src=x onerror=alert(1)>"
WIDER = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    net, folder = base(), tmp_path_factory.mktemp("page")
    store = store_of(net, folder / "store", ("birds-30", "boats-30"))
    store.add(task_of(net, 5, classes=(HOSTILE, "b", "c"), metrics={}), "hostile")
    (store.folder / "broken.task.safetensors").write_bytes(b"x")
    (folder / "image.png").write_bytes(picture())
    (folder / "none.png").write_bytes(b"no image")
    with running(app(net, store)) as client, running(app(net, store, token="secret")) as locked:
        yield client, locked, folder


def look(browser, client, width=1200, dark=False, path=""):
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(f"{client.base_url}/{path}")


def says(browser, words):
    WebDriverWait(browser, 30).until(lambda _: words in browser.find_element(By.ID, "status").text)


def rows(browser):
    found = browser.find_elements(By.CSS_SELECTOR, "tbody tr")
    return {row.find_element(By.TAG_NAME, "th").text: row.find_element(By.CLASS_NAME, "answer").text for row in found}


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (360, True)])
def test_every_task_says_what_it_thinks_of_an_image(browser, served, width, dark):
    client, _, folder = served
    look(browser, client, width, dark)
    says(browser, "Ready")
    browser.find_element(By.ID, "image").send_keys(str(folder / "image.png"))
    says(browser, "3 tasks answered in")
    found = rows(browser)
    for name in ("birds-30", "boats-30"):
        answer = client.post(f"/v1/tasks/{name}/predict", content=picture(), headers=PNG).json()["predictions"][0]
        best = next(iter(answer))
        assert best in CLASSES
        assert found[name] == f"{best} {100 * answer[best]:.1f}%"
    assert found["broken"] == "cannot be used: truncated"
    assert browser.execute_script(WIDER) <= 0
    assert browser.get_log("browser") == []
    back = browser.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
    assert (sum(int(part) for part in back[back.index("(") + 1 : -1].split(",")[:3]) < 200) == dark


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (360, True)])
def test_the_interface_is_described_without_another_host(browser, served, width, dark):
    """At the edge there is no internet."""
    _, locked, _ = served
    look(browser, locked, width, dark, "docs")
    says(browser, "One base, many tasks")
    titles = [title.text for title in browser.find_elements(By.TAG_NAME, "h2")]
    described = locked.get("/openapi.json").json()["paths"]
    assert titles == [f"{method.upper()} {path}" for path, methods in described.items() for method in methods]
    text = browser.find_element(By.ID, "requests").text
    for words in (
        "top, in the query: integer, from 1",
        "image/*",
        "texts (array of string)",
        "images (array of base64)",
    ):
        assert words in text
    assert f"curl {locked.base_url}/v1/tasks" in text
    asked = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert [name for name in asked if not name.startswith(str(locked.base_url))] == []
    assert browser.execute_script(WIDER) <= 0
    assert browser.get_log("browser") == []


def test_what_tasks_say_is_shown_and_never_run(browser, served):
    client, _, folder = served
    look(browser, client)
    says(browser, "Ready")
    browser.find_element(By.ID, "image").send_keys(str(folder / "image.png"))
    says(browser, "3 tasks answered in")
    assert browser.find_elements(By.CSS_SELECTOR, "tbody img") == []
    script = "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s);"
    browser.execute_script(script)
    assert browser.execute_script("return window.ran") is None
    assert any("Content Security Policy" in entry["message"] for entry in browser.get_log("browser"))
    policy = client.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_a_file_that_is_no_image_is_said_to_be_none(browser, served):
    client, _, folder = served
    look(browser, client)
    says(browser, "Ready")
    browser.find_element(By.ID, "image").send_keys(str(folder / "none.png"))
    says(browser, "3 tasks answered in")
    assert "not an image" in rows(browser)["birds-30"]


def test_by_keyboard_with_a_token_and_a_filter(browser, served):
    _, locked, _ = served
    look(browser, locked)
    says(browser, "cannot be listed")
    field = browser.find_element(By.ID, "token")
    field.send_keys("secret", Keys.ENTER)
    says(browser, "Ready")
    assert not field.is_displayed()
    reached = []
    browser.execute_script("document.activeElement.blur()")
    for _ in range(4):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(browser.switch_to.active_element.get_attribute("id"))
    assert {"image", "filter"} <= set(reached)
    browser.find_element(By.ID, "filter").send_keys("boat")
    assert list(rows(browser)) == ["boats-30"]
