"""The page in a real browser. `make test-page` installs Chromium; without it, this is skipped."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from web.browser import CHROMIUM, Browser, Page
from web.scenes import ABSENT, ASTRAY, HOSTILE, SIZE, incident, large_reply
from web.stub import AdminStub, named_store, watched

from support import Server, tcpstore_server
from tcpstore_async.tools.web.summary import LATE, MISSING, WAITING

pytestmark = [pytest.mark.unmeasured, pytest.mark.skipif(not CHROMIUM.exists(), reason="there is no /usr/bin/chromium")]

NARROWEST_MARK = 5
"""Pixels of the edge of a missing rank's cell, at least, as in app.js."""

ITEMS = "document.querySelectorAll('#pending .item').length"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(module_sockets: Path) -> Iterator[Server]:
    with tcpstore_server("--http", "127.0.0.1:0") as server, incident(server.port, hostile=True):
        yield server


def url(server: Server) -> str:
    return str(json.loads(server.ready)["http"])


@pytest.fixture(scope="module")
def page(browser: Browser, server: Server) -> Page:
    page = browser.open(url(server))
    page.until(ITEMS)
    return page


def counts(page: Page) -> dict[str, str]:
    found = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#legend b')].map(b => [b.dataset.state, b.textContent]))"
    )
    return dict(found)


def colour_of(page: Page, rank: int) -> list[int]:
    """The colour in the upper left of a rank's cell, as it has been drawn."""
    found = page.evaluate(
        f"""(() => {{
            const ratio = devicePixelRatio, at = {rank};
            const x = (at % grid.columns) * grid.cell + 1, y = Math.floor(at / grid.columns) * grid.cell + 1;
            const data = document.getElementById("grid").getContext("2d").getImageData(x * ratio, y * ratio, 1, 1).data;
            return [...data];
        }})()"""
    )
    return list(found)


def test_seven_of_1000_are_missing(page: Page) -> None:
    others = SIZE - len(ABSENT) - len(ASTRAY)
    assert counts(page) == {"j": "0", WAITING: str(others), LATE: str(len(ASTRAY)), MISSING: str(len(ABSENT))}
    waiting, late, missing = (colour_of(page, rank) for rank in (0, ASTRAY[0], ABSENT[0]))
    assert len({tuple(waiting), tuple(late), tuple(missing)}) == 3
    drawn = [colour_of(page, rank) for rank in range(SIZE)]
    assert [rank for rank in range(SIZE) if drawn[rank] == missing] == list(ABSENT)
    assert [rank for rank in range(SIZE) if drawn[rank] == late] == list(ASTRAY)
    text = page.text("#pending")
    assert "993 of 1,000 have arrived" in text
    assert "missing: ranks 8, 17–19, 502, 641, 830" in text
    assert "is waiting for epoch_8/ready" in text


def test_the_near_miss_is_shown(page: Page) -> None:
    text = page.text("#waits")
    assert "epoch_8/ready" in text
    assert "epoch_5/ready exists, written " in text
    assert " by rank 0 (node-000, pid 20000)" in text


def test_one_rank(page: Page) -> None:
    page.evaluate("(n => { n.value = '641'; n.dispatchEvent(new Event('input')); })(document.getElementById('number'))")
    page.until("document.getElementById('detail').textContent.includes('node-080')")
    assert page.text("#detail").startswith(
        "rank 641: missing, connected; node-080, pid 20641; is waiting for epoch_8/ready (last request "
    )
    box = page.evaluate("(b => [b.left, b.top])(document.getElementById('grid').getBoundingClientRect())")
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + 3, y=box[1] + 3)
    page.until("document.getElementById('detail').textContent.startsWith('rank 0: waiting; node-000')")


def test_the_header_and_times_of_day(page: Page) -> None:
    """For a ticket, and other logs."""
    assert page.text("#where").endswith(f" on {socket.gethostname()}")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+", page.text("#now"))
    assert re.search(r"waiting, the longest for [\d.]+ s \(since \d\d:\d\d:\d\d\)", page.text("#pending"))
    assert re.search(r"\(last request [\d.]+ s ago, at \d\d:\d\d:\d\d\)", page.text("#pending"))


def test_what_the_ranks_do_and_the_state_as_text(page: Page) -> None:
    page.evaluate("byId('look').click()")
    page.until("byId('looked').textContent.startsWith('as of ')")
    assert "995 ranks not seen, as they have ended, or no relay there can be asked: on node-000 (8), " in page.text(
        "#stacks"
    )
    page.evaluate("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }")
    page.evaluate("byId('copy').click()")
    page.until("byId('copy').textContent === 'Copied'")
    text = page.evaluate("window.copied")
    assert text.startswith("tcpstore ")
    for part in ("joined 995 / 1,000", "Who is missing\n", "is waiting for epoch_8/ready", "What the ranks do\n"):
        assert part in text
    page.evaluate("navigator.clipboard.writeText = () => Promise.reject(new Error('not here'))")
    page.evaluate(
        "window.copied = ''; document.execCommand = () => { window.copied = document.querySelector('textarea').value; }"
    )
    page.evaluate("byId('copy').click()")
    page.until("window.copied.startsWith('tcpstore ') && !document.querySelector('textarea')")


def test_texts_of_peers_stay_texts(browser: Browser, page: Page) -> None:
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert HOSTILE[1:].decode() in page.evaluate("document.getElementById('waits').textContent")
    assert page.evaluate("document.title").startswith("tcpstore ")
    assert browser.errors == []
    ran = page.evaluate(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1';"
        " document.head.append(s); return window.ran === 1; })()"
    )
    assert ran is False  # the policy does not let anything in the document run
    assert "Content Security Policy" in " ".join(browser.errors)
    browser.errors.clear()


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone(browser: Browser, server: Server, dark: bool) -> None:
    phone = browser.open(url(server), width=360, height=780, phone=True, dark=dark)
    phone.until(ITEMS)
    assert phone.evaluate("document.documentElement.scrollWidth") == 360
    assert phone.evaluate("document.getElementById('grid').getBoundingClientRect().right") <= 360
    assert phone.evaluate("grid.cell") >= 5
    background = phone.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 23, 26)" if dark else "rgb(255, 255, 255)")
    contrast = phone.evaluate("getComputedStyle(document.querySelector('.item p')).color")
    assert contrast == ("rgb(232, 234, 237)" if dark else "rgb(26, 29, 33)")
    assert browser.errors == []


@pytest.mark.parametrize("phone", [False, True])
def test_98304_ranks(browser: Browser, tmp_path: Path, phone: bool) -> None:
    """Each missing one can be seen, though a cell has two pixels."""
    absent = (5, 77, 4000, 50_000, 60_001, 98_303)
    with AdminStub(tmp_path / "s", large_reply(98_304, frozenset(absent))) as admin, watched(admin.path) as process:
        width, height = (360, 780) if phone else (1200, 900)
        page = browser.open(f"http://127.0.0.1:{process.port}/", width=width, height=height, phone=phone)
        page.until(ITEMS)
        assert counts(page) == {"j": "0", WAITING: "98,298", MISSING: str(len(absent))}
        assert page.evaluate("grid.cell") == 2
        assert page.evaluate("document.documentElement.scrollWidth") == width
        waiting, missing = colour_of(page, 0), colour_of(page, absent[0])
        assert {tuple(colour_of(page, rank)) for rank in absent} == {tuple(missing)} != {tuple(waiting)}
        pixels = page.evaluate(
            """(() => {
                const canvas = document.getElementById("grid");
                const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
                const counted = {};
                for (let at = 0; at < data.length; at += 4) {
                    const colour = data.slice(at, at + 4).join();
                    counted[colour] = (counted[colour] || 0) + 1;
                }
                return counted;
            })()"""
        )
        scale = 4 if phone else 1
        assert pixels[",".join(map(str, missing))] == len(absent) * NARROWEST_MARK**2 * scale
        assert "missing: ranks 5, 77, 4000, 50000, 60001, 98303" in page.text("#pending")
        took = page.evaluate(
            "(() => { const at = performance.now(); grid.drawn = ''; show(last); return performance.now() - at; })()"
        )
        print(f"drawn in {took:.0f} ms")  # pytest -s shows it
    browser.errors.clear()  # of requests that were refused at the end


def test_it_follows_live_and_says_when_nobody_answers(browser: Browser, sockets: Path) -> None:
    with tcpstore_server("--http", "127.0.0.1:0") as server:
        page = browser.open(url(server))
        page.until("document.getElementById('status').textContent === 'live'")
        assert page.text("#waits") == "No rank is waiting for a key."
        with incident(server.port):
            page.until(ITEMS)
            page.until("Math.max(0, ...last.ops) > 0")
            os.kill(server.process.pid, signal.SIGSTOP)
            try:
                status = "document.getElementById('status').textContent"
                page.until(f"{status}.startsWith('the server has not answered since ')")
            finally:
                os.kill(server.process.pid, signal.SIGCONT)
            page.until(f"{status} === 'live'")
        page.until("document.getElementById('waits').textContent === 'No rank is waiting for a key.'")
        server.stop()
        page.until(f'{status}.startsWith("the process that serves this page has not answered since ")')
    browser.errors.clear()  # of requests that were refused


def test_a_store_is_chosen_by_name(browser: Browser, tmp_path: Path) -> None:
    """On a phone, also if its name is long, or looks like markup."""
    hostile = f"{HOSTILE.decode()} & {'x' * 200}"
    reply = large_reply(10, frozenset())
    sessions = json.loads(reply[1])
    for session in sessions["sessions"][:3]:
        session["store"] = hostile
    reply[1] = json.dumps(sessions).encode()
    with AdminStub(tmp_path / "s", reply) as admin, watched(admin.path) as process:
        admin.oldest = [named_store("node7:4711"), named_store(hostile)]
        admin.others = 3
        page = browser.open(f"http://127.0.0.1:{process.port}/", width=360, height=780, phone=True)
        page.until("document.querySelectorAll('#store-list button').length === 3")
        assert "node7:4711 2 of 8 joined, 3 connected, 5 keys, 700 B, owner node7, pid 4711" in page.text("#store-list")
        assert page.text("#more-stores") == "and 3 more: type a name"
        page.until("last.look && last.look.sessions === 7")
        page.evaluate("document.querySelectorAll('#store-list button')[2].click()")
        page.until("last.look && last.look.sessions === 3")
        assert page.evaluate("new URLSearchParams(location.search).get('store')") == hostile
        assert page.evaluate("document.querySelector('[aria-pressed=true] code').textContent") == hostile
        assert page.evaluate("document.querySelectorAll('img').length") == 0
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        page.evaluate("byId('store').value = 'typed'; byId('choose').requestSubmit()")
        page.until("document.querySelector('[aria-pressed=true]').textContent === 'typed '")
        page.until("last.look && last.look.sessions === 0")
        assert hostile in admin.stores
        assert "typed" in admin.stores
    assert [error for error in browser.errors if "Failed to load" not in error] == []
    browser.errors.clear()  # of requests that were refused at the end
