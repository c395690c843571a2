"""A study's page: what it embeds and, in a real browser, that it draws, filters and complains of nothing."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from shown import by_hand, write_study
from test_report_browser import CHROMIUM, DRIVER, canvases, choose, drawn, resize, start
from test_study_show import curve

from fedreuse.server.store import RunError
from fedreuse.sim.study.folder import Study
from fedreuse.sim.study.page import render, write_page
from fedreuse.sim.study.show import show

needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no chromium and chromedriver on the path (Debian: chromium, chromium-driver)",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    plan = by_hand(description="Two methods <b>by hand</b>", overrides=None)
    write_study(folder / "s", plan, curve, without=["b-age-only-s4"])
    write_page(show(folder / "s"), folder / "page.html")
    return folder


def data(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def test_the_page_holds_every_plot_and_every_table(folder: Path) -> None:
    text = (folder / "page.html").read_text()
    plots = data(text)["plots"]
    assert set(plots) == {"pareto-0", "pareto-1", "curves-0", "curves-1", "forest", "fairness"}
    assert "Two methods &lt;b&gt;by hand" in text
    assert "<strong>b, age-only:</strong> seed 4 not begun" in text
    assert "equivalent" in text
    assert not re.search(r'(src|href)="(?!data:)', text.split("<script>")[0])


def test_points_are_those_of_the_seeds(folder: Path) -> None:
    plots = data((folder / "page.html").read_text())["plots"]
    traces = plots["pareto-0"]["figure"]["data"]
    modelled = [t for t in traces if t["meta"] == {"run": 0, "way": "up"}]
    seeds, mean = modelled
    assert seeds["x"] == [pytest.approx(0.0036)] * 5  # 12 updates of 300 bytes, in MB
    assert seeds["y"] == pytest.approx([80, 82, 78, 81, 79])
    assert (mean["x"], mean["y"]) == ([pytest.approx(0.0036)], [pytest.approx(80)])
    measured = [t for t in traces if t["meta"] == {"run": 0, "way": "up", "layer": "grpc"}]
    assert measured[1]["x"] == [pytest.approx((12 * 215 + 60) / 1e6)]
    forest = plots["forest"]
    assert [row[3] for row in forest["rows"]] == pytest.approx([-0.4, 0.1, -0.3, 0.2, -0.1])
    (band, _) = forest["figure"]["layout"]["shapes"]
    assert (band["x0"], band["x1"]) == (-1, 1)


def test_a_study_without_a_complete_row_has_no_page(tmp_path: Path) -> None:
    Study.freeze(by_hand(), tmp_path / "s")
    with pytest.raises(RunError, match=r"no row of .* is complete yet; there is nothing to report"):
        render(show(tmp_path / "s"))
    methods = [{"label": f"m{n}", "method": "topk-fedavg"} for n in range(9)]
    plan = by_hand(methods=methods, seeds=[1], tasks=["support:Line"], compare=None, target=None)
    write_study(tmp_path / "many", plan, curve)
    with pytest.raises(RunError, match="9 methods; a page shows up to 8, --csv has them all"):
        render(show(tmp_path / "many"))


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
    browser.get((folder / "page.html").as_uri())
    yield browser
    assert [entry["message"] for entry in browser.get_log("browser")] == []


@needs_browser
def test_every_plot_is_drawn_and_filters_choose(page: webdriver.Chrome) -> None:
    assert set(canvases(page)) == {"pareto-0", "pareto-1", "curves-0", "curves-1", "forest", "fairness"}
    for key in canvases(page):
        assert drawn(page, key)["x"], key
    assert drawn(page, "pareto-0")["x"].startswith("uplink + downlink, MB")
    choose(page, "way", "up")
    assert drawn(page, "pareto-0")["x"].startswith("uplink, MB")
    assert set(drawn(page, "curves-0")["names"]) == {"topk-fedavg", "age-only"}
    choose(page, "run", "1")
    assert set(drawn(page, "curves-0")["names"]) == {"topk-fedavg"}


@needs_browser
def test_it_fits_a_phone(page: webdriver.Chrome) -> None:
    resize(page, 360, 740)
    for key in canvases(page):
        drawn(page, key)
    assert page.execute_script("return document.documentElement.scrollWidth") <= 360


@needs_browser
def test_on_paper_plots_have_the_papers_width(page: webdriver.Chrome) -> None:
    drawn(page, "forest")
    width = "return document.querySelector('[data-plot=forest] .main-svg').getBoundingClientRect().width"
    assert page.execute_script(width) > 700
    page.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert page.execute_script(width) == 640
    page.execute_script("dispatchEvent(new Event('afterprint'))")
    assert page.execute_script(width) > 700
    assert page.find_elements(By.TAG_NAME, "h1")[0].text == "byhand"
