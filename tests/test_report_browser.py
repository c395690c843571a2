"""The report in a real browser: it draws, complains of nothing, fits a phone, and its filters and downloads work."""

import csv
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select
from test_compare import write_run
from test_connections import DOWN_ROWS, UP_ROWS, write
from test_report import EVENTS, TENSORS

from fedreuse.sim.report import write_report

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no chromium and chromedriver on the path (Debian: chromium, chromium-driver)",
)
QUIET = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a run with connections and one without."""
    folder = tmp_path_factory.mktemp("report")
    metered = write(folder / "metered", *UP_ROWS, *DOWN_ROWS, events=EVENTS)
    (metered / "tensors.csv").write_text(TENSORS)
    write_report([metered, write_run(folder / "plain <b>", events=EVENTS)], folder / "report.html")
    return folder


def start(folder: Path) -> webdriver.Chrome:
    """A browser that keeps its profile and its downloads in a folder."""
    options = webdriver.ChromeOptions()
    for argument in (*QUIET, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(argument)
    options.add_experimental_option("prefs", {"download.default_directory": str(folder)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(DRIVER))


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[webdriver.Chrome]:
    driver = start(folder)
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def page(browser: webdriver.Chrome, folder: Path) -> Iterator[webdriver.Chrome]:
    resize(browser, 1280, 900)
    browser.get((folder / "report.html").as_uri())
    yield browser
    assert [entry["message"] for entry in browser.get_log("browser")] == []


def resize(browser: webdriver.Chrome, width: int, height: int) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def wait_for(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen within 20 s")


def drawn(page: webdriver.Chrome, key: str) -> dict[str, Any]:
    """What plotly draws in a canvas: visible traces' names, axis titles, the font's colour."""
    canvas = page.find_element(By.CSS_SELECTOR, f'[data-plot="{key}"]')
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    wait_for(lambda: page.execute_script("return !!arguments[0].querySelector('.main-svg')", canvas))
    return dict(
        page.execute_script(
            "const p = arguments[0]; return {names: p.data.filter(t => t.visible).map(t => t.name),"
            " x: p.layout.xaxis.title?.text, y: p.layout.yaxis.title?.text, ink: p._fullLayout.font.color}",
            canvas,
        )
    )


def choose(page: webdriver.Chrome, name: str, value: str) -> None:
    page.execute_script(
        f"""document.querySelector('[name="{name}"][value="{value}"]').click()""",
    )


def canvases(page: webdriver.Chrome) -> list[str]:
    """Keys of the plots that are not hidden."""
    return [
        str(e.get_attribute("data-plot"))
        for e in page.find_elements(By.CSS_SELECTOR, "[data-plot]")
        if e.is_displayed()
    ]


def test_every_plot_is_drawn(page: webdriver.Chrome) -> None:
    keys = canvases(page)
    assert {"accuracy-bytes", "accuracy-rounds", "bytes-rounds", "waterfall-0-up", "waterfall-1-down"} <= set(
        keys
    )
    assert {"clauses-0", "map-0", "scores-1", "tensors-0-up", "tensors-0-down"} <= set(keys)
    for key in keys:
        seen = drawn(page, key)
        assert seen["x"], key
        assert seen["y"] or key.startswith(("waterfall", "tensors")), key


def test_the_direction_chooses_plots_and_curves(page: webdriver.Chrome) -> None:
    assert drawn(page, "bytes-rounds")["y"] == "uplink + downlink a round, MB"
    choose(page, "way", "down")
    assert drawn(page, "bytes-rounds")["y"] == "downlink a round, MB"
    assert "waterfall-0-down" in canvases(page)
    assert "waterfall-0-up" not in canvases(page)


def test_the_layer_chooses_curves_and_says_what_is_absent(page: webdriver.Chrome) -> None:
    assert Select(page.find_element(By.NAME, "layer")).first_selected_option.text == "gRPC messages"
    assert not page.find_element(By.ID, "absent").is_displayed()
    both = ["modelled fields", "gRPC messages"]
    names = [f"{run}, {layer}" for run in ("metered", "plain &lt;b&gt;") for layer in both]
    assert drawn(page, "bytes-rounds")["names"] == names
    Select(page.find_element(By.NAME, "layer")).select_by_visible_text("TCP payload")
    assert "metered, TCP payload" in drawn(page, "bytes-rounds")["names"]
    assert "plain &lt;b&gt;, TCP payload" not in drawn(page, "bytes-rounds")["names"]
    assert drawn(page, "accuracy-bytes")["x"].endswith("layer: TCP payload")
    notice = page.find_element(By.ID, "absent")
    assert notice.is_displayed()
    assert notice.text.startswith(
        "plain <b>: TCP payload is absent (uplink + downlink): bytes.csv has no rows"
    )


def test_a_run_can_be_left_out(page: webdriver.Chrome) -> None:
    choose(page, "run", "0")
    assert all(name.startswith("plain") for name in drawn(page, "bytes-rounds")["names"])
    assert not any("-0" in key for key in canvases(page))
    choose(page, "run", "0")
    assert "map-0" in canvases(page)
    assert drawn(page, "map-0")["x"] == "round"


def test_themes_change_page_and_plots(page: webdriver.Chrome) -> None:
    colours = set()
    for theme in ("light", "dark"):
        page.find_element(By.ID, "theme").click()
        assert page.find_element(By.ID, "theme").text == f"Theme: {theme}"
        ink = drawn(page, "accuracy-rounds")["ink"]
        colours.add((ink, page.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")))
    assert colours == {("#1b2230", "rgba(255, 255, 255, 1)"), ("#e6e9ee", "rgba(20, 23, 28, 1)")}


def test_a_phone_scrolls_one_way_only(page: webdriver.Chrome) -> None:
    resize(page, 360, 740)
    for key in canvases(page):
        drawn(page, key)
    assert page.execute_script("return document.documentElement.scrollWidth") <= 360
    widths = page.execute_script("return [...document.querySelectorAll('.main-svg')].map(s => s.clientWidth)")
    assert 0 < max(widths) <= 360


def test_numbers_can_be_saved(page: webdriver.Chrome, folder: Path) -> None:
    page.execute_script("document.querySelector('[data-csv=\"waterfall-0-up\"]').click()")
    path = folder / "waterfall-0-up.csv"
    wait_for(path.exists)
    assert list(csv.reader(path.open(newline="")))[:3] == [
        ["layer", "bytes over the whole run"],
        ["modelled", "176"],
        ["payload", "164"],
    ]


def test_it_prints_in_ink(page: webdriver.Chrome) -> None:
    page.find_element(By.ID, "theme").click()
    page.find_element(By.ID, "theme").click()
    pdf = page.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})
    assert len(pdf["data"]) > 50_000
    assert page.execute_script("return document.querySelectorAll('.main-svg').length") > 0
