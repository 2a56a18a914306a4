"""The page at /, in a real browser: it shows what the server does, chats, and asks nobody else."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from kilter.serve.engine import Engine
from kilter.serve.server.config import ServerConfig
from tests.serve.server.conftest import (
    NAME,
    PATIENCE,
    Running,
    StartServer,
    http_client,
    make_engine,
    wait_for,
)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
                None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="There is no Chromium on this machine; .ci/run installs one.")

PAGES = 96
# Seconds that a step takes longer, so that there is time to look at it: at first, and beside an
# answer of so many tokens, which so does not end before a slow machine has looked.
STEP, LATE_STEP, LONG = 0.004, 0.1, 500
QUESTION = "abab cabcab " * 8


def slow_engine() -> Engine:
    engine = make_engine(kv_tokens=16 * PAGES)
    engine.eos_token_ids = ()  # no answer ends of itself
    compute = engine.executor.run

    def slowly(work: Any) -> Any:
        time.sleep(STEP if all(chunk.request.length < LONG for chunk in work) else LATE_STEP)
        return compute(work)

    engine.executor.run = slowly  # type: ignore[method-assign]
    return engine


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    expect.set_options(timeout=1000 * PATIENCE)
    yield
    expect.set_options(timeout=5000)  # the usual time


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    running = Running(slow_engine(), ServerConfig(NAME, port=0))
    yield running.base_url
    running.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking",
                  "--disable-component-update", "--no-first-run"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """The page, which must ask only its own server and leave nothing on the console."""
    yield from watched(browser, url)


def watched(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    page = new_page(browser, **options)
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(url)
    yield page
    page.close()
    assert [address for address in asked if not address.startswith(f"{url}/")] == []
    assert said == []


def new_page(browser: Browser, **options: Any) -> Page:
    page = browser.new_page(**options)
    page.set_default_timeout(1000 * PATIENCE)
    return page


@contextmanager
def long_request(url: str, tokens: int = 900) -> Iterator[None]:
    """While this is open, the server writes an answer."""
    body = {"model": "tiny", "prompt": "abab", "max_tokens": tokens, "ignore_eos": True,
            "temperature": 1, "seed": 1, "stream": True}
    with http_client(base_url=url) as client, client.stream(
            "POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()
        next(lines)
        yield


def ask(page: Page, question: str, max_tokens: int = 12) -> None:
    page.fill("#max-tokens", str(max_tokens))
    page.fill("#question", question)
    page.press("#question", "Enter")


def state(url: str) -> dict[str, Any]:
    with http_client(base_url=url) as client:
        answer: dict[str, Any] = client.get("/state").json()
    return answer


def cells(page: Page) -> list[str]:
    """The colour of every cell of the page map: free, cached, held or shared."""
    colours: list[str] = page.evaluate("""() => {
        const canvas = document.getElementById("pages");
        const { cells, columns, size } = canvas.dataset;
        const copy = document.createElement("canvas");
        Object.assign(copy, { width: canvas.width, height: canvas.height });
        const context = copy.getContext("2d", { willReadFrequently: true });
        const style = getComputedStyle(document.documentElement);
        const names = {};
        for (const name of ["free", "cached", "held", "shared"]) {
            context.fillStyle = style.getPropertyValue(`--${name}`).trim();
            names[context.fillStyle] = name;
        }
        context.drawImage(canvas, 0, 0);
        const hex = n => n.toString(16).padStart(2, "0");
        return Array.from({ length: Number(cells) }, (_, i) => {
            const at = n => (n + 0.4) * size * devicePixelRatio;
            const [r, g, b] = context.getImageData(at(i % columns), at(Math.floor(i / columns)),
                                                   1, 1).data;
            return names[`#${hex(r)}${hex(g)}${hex(b)}`] ?? "nothing";
        });
    }""")
    return colours


def test_it_shows_a_live_request_and_its_pages_and_chats_meanwhile(page: Page, url: str) -> None:
    expect(page.locator("#status")).to_have_text("serving")
    expect(page.locator("#model")).to_have_text("tiny")
    with long_request(url):
        row = page.locator("#requests .row")
        expect(row).to_have_count(1)
        expect(row.locator("span").nth(1)).to_have_text("decode")
        expect(page.locator("#running")).to_have_text("1")
        expect(page.locator("#decodes")).to_contain_text("decode, 1 token")
        before = int(row.locator("span").nth(4).inner_text())
        expect(row.locator("span").nth(4)).not_to_have_text(str(before))
        assert int(row.locator("span").nth(4).inner_text()) > before  # it moves
        shown = cells(page)
        assert len(shown) == PAGES and "nothing" not in shown and "held" in shown

        ask(page, QUESTION)
        expect(page.locator(".figures")).to_contain_text("first token")
        page.click("#fresh")
        expect(page.locator(".said")).to_have_count(0)
        page.fill("#temperature", "0")
        ask(page, QUESTION)  # the same again: found in the prefix cache
        figures = page.locator(".figures")
        expect(figures).to_contain_text("cached")
        cached, prompt = (int(word) for word in figures.inner_text().split(" · ")[-1].split()
                          if word.isdigit())
        assert 0 < cached < prompt
        expect(page.locator("#hits")).to_have_text(re.compile(r"^[1-9]\d? %$"))
        expect(page.locator("#ttft")).to_have_text(re.compile(r"^\d[\d.]* m?s$"))
    expect(page.locator("#requests")).to_have_text("Nothing runs and nothing waits.")
    names = {"0": "free", "c": "cached", "1": "held"}
    marks = state(url)["pages"]
    wait_for(lambda: cells(page) == [names.get(mark, "shared") for mark in marks])
    assert "c" in marks
    expect(page.locator("#pages-total")).to_have_text(f"{PAGES} of 16 tokens")


def test_stop_ends_the_answer_in_the_engine_too(page: Page, url: str) -> None:
    expect(page.locator("#status")).to_have_text("serving")
    ask(page, "ba ab", max_tokens=100_000)
    expect(page.locator(".said.assistant")).not_to_have_text("")
    page.click("#stop")
    expect(page.locator(".figures")).to_contain_text("stopped")
    wait_for(lambda: state(url)["stats"]["running"] == 0)
    expect(page.locator("#send")).to_be_visible()
    assert page.locator(".said.problem").count() == 0


def test_what_people_and_models_write_is_text(page: Page) -> None:
    expect(page.locator("#status")).to_have_text("serving")
    text = "<img src=x onerror=alert(1)><b>bold</b>"
    ask(page, text)
    expect(page.locator(".figures")).to_be_visible()
    expect(page.locator(".said.user")).to_have_text(text)
    assert page.locator("#talk img, #talk b").count() == 0


def test_an_error_is_shown_as_the_server_says_it(browser: Browser, url: str) -> None:
    page = new_page(browser)
    page.goto(url)
    expect(page.locator("#status")).to_have_text("serving")
    page.evaluate("""() => {
        const fetch = window.fetch;
        window.fetch = (url, options) => url === "/state" ? fetch(url, options)
            : fetch(url, { ...options, body: options.body.replace('"tiny"', '"huge"') });
    }""")
    with page.expect_response("**/v1/chat/completions") as refused:
        ask(page, "ab")
    expect(page.locator(".said.problem")).to_have_text(refused.value.json()["error"]["message"])
    assert page.locator(".said.assistant").count() == 0
    page.close()


def test_a_hidden_tab_asks_nothing(browser: Browser, url: str) -> None:
    page = new_page(browser)
    page.clock.install()
    page.add_init_script("""
        window.asked = 0;
        window.realFetch = window.fetch;
        window.fetch = (...request) => { window.asked += 1; return window.realFetch(...request); };
    """)
    page.goto(url)
    expect(page.locator("#status")).to_have_text("serving")
    hide = """hidden => {
        Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(hide, True)
    before = page.evaluate("window.asked")
    assert before > 0
    page.clock.run_for(60_000)
    assert page.evaluate("window.asked") == before
    with page.expect_request("**/state"):
        page.evaluate(hide, False)
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_cut_off(browser: Browser, url: str, scheme: Any) -> None:
    for page in watched(browser, url, viewport={"width": 360, "height": 740},
                        color_scheme=scheme, device_scale_factor=2):
        expect(page.locator("#status")).to_have_text("serving")
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        assert page.evaluate("""() => [...document.querySelectorAll(".columns, .tile, .head")]
            .filter(e => e.scrollWidth > e.clientWidth).map(e => e.textContent)""") == []
        assert set(cells(page)) <= {"free", "cached", "held", "shared"}


def test_it_asks_for_the_key_and_keeps_it_in_the_tab(browser: Browser, start_server: StartServer
                                                     ) -> None:
    page = new_page(browser)
    page.goto(start_server(api_key="a key").base_url)
    expect(page.locator("#key-dialog")).to_be_visible()
    page.fill("#key", "another")
    page.press("#key", "Enter")
    expect(page.locator("#key-note")).to_have_text("The server does not know that key.")
    page.fill("#key", "a key")
    page.press("#key", "Enter")
    expect(page.locator("#status")).to_have_text("serving")
    expect(page.locator("#key-dialog")).to_be_hidden()
    ask(page, "ab")
    expect(page.locator(".figures")).to_be_visible()
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [
        0, 1, ""]
    page.close()
