"""The page in a browser: charts are drawn, nothing is complained about, it answers to pointer, theme and width."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report.fake_runs import write_competition

from plait.report import build_report, palette

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")), reason="needs chromium and chromedriver"
    ),
]
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]


class Browser:
    """As much of WebDriver as these tests need."""

    def __init__(self, port: int):
        self.url = f"http://127.0.0.1:{port}"
        options = {"args": FLAGS, "binary": shutil.which("chromium")}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self.call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.url += f"/session/{session['sessionId']}"

    def call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def run(self, script: str) -> Any:
        return self.call("POST", "/execute/sync", {"script": script, "args": []})

    def devtools(self, command: str, **params: Any) -> None:
        self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def width(self, pixels: int) -> None:
        metrics = {"width": pixels, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.devtools("Emulation.setDeviceMetricsOverride", **metrics)

    def prefer(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.devtools("Emulation.setEmulatedMedia", features=features)

    def point_at(self, selector: str) -> None:
        x, y = self.run(
            f"const item = document.querySelector('{selector}');"
            "item.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const box = item.getBoundingClientRect();"
            "return [box.left + box.width / 2, box.top + box.height / 2];"
        )
        for step in (2, 0):
            self.devtools("Input.dispatchMouseEvent", type="mouseMoved", x=x - step, y=y)

    def until(self, script: str) -> Any:
        """What a script returns, once it is true."""
        for _ in range(100):
            if value := self.run(f"return {script};"):
                return value
            time.sleep(0.1)
        raise AssertionError(f"never true: {script}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}", "--log-level=SEVERE"])
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        browser = Browser(port)
        try:
            yield browser
        finally:
            browser.call("DELETE", "")
    finally:
        driver.terminate()
        driver.wait()


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory) -> Browser:
    root: Path = tmp_path_factory.mktemp("page")
    build_report(write_competition(root / "runs"), root / "report.html")
    browser.width(1280)
    browser.prefer("light")
    browser.call("POST", "/url", {"url": (root / "report.html").as_uri()})
    browser.until("document.querySelectorAll('.chart svg').length === 13")
    return browser


def test_nothing_is_complained_about(page):
    assert page.call("POST", "/se/log", {"type": "browser"}) == []
    assert not page.run("return document.body.innerText.includes('could not be drawn');")
    assert page.run("return [...document.querySelectorAll('.chart')].every(box => box.role === 'img');")
    assert page.run("return performance.getEntriesByType('resource').length;") == 0


@pytest.mark.parametrize("width", [360, 768, 1280, 1920])
def test_no_width_scrolls_sideways(page, width):
    page.width(width)
    assert page.run("return document.documentElement.scrollWidth;") <= width
    page.until(
        "[...document.querySelectorAll('.chart')].every("
        "box => box.querySelector('svg').getBoundingClientRect().right <= box.getBoundingClientRect().right + 1)"
    )
    page.width(1280)


def test_colours_follow_the_system_and_the_button(page):
    def colours() -> tuple[str, str]:
        script = (
            "return [getComputedStyle(document.body).backgroundColor, getComputedStyle([...document.querySelectorAll"
        )
        return tuple(page.run(script + "('.chart svg text')].at(-1)).fill];"))

    def rgb(colour: str) -> str:
        return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"

    light, dark = ((rgb(p.surface), rgb(p.muted)) for p in (palette.LIGHT, palette.DARK))
    assert colours() == light
    page.prefer("dark")
    assert colours() == dark
    page.run("document.getElementById('theme').click();")
    assert colours() == light
    page.run("document.getElementById('theme').click();")
    page.prefer("light")
    assert colours() == dark


def test_pointing_at_a_chart_tells_its_numbers(page):
    page.point_at("#retrieval .chart")
    page.until("document.querySelector('#vg-tooltip-element.visible')")
    text = page.run("return document.getElementById('vg-tooltip-element').innerText;")
    assert "gdn mean" in text and "3 nope" in text and "undefined" not in text


def test_pointing_at_a_block_tells_its_layer_and_brings_its_line_forward(page):
    page.point_at(".strip li")
    page.until("!document.getElementById('tip').hidden")
    assert page.run("return document.getElementById('tip').innerText;").startswith("Layer 0: gdn")
    faint = "[...document.querySelectorAll('#retrieval .chart svg path')]"
    page.until(f"{faint}.some(path => path.getAttribute('opacity') === '0.12')")
    page.point_at("h1")
    page.until("document.getElementById('tip').hidden")
    page.until(f"!{faint}.some(path => path.getAttribute('opacity') === '0.12')")
