"""Takes the pictures of the page that the documentation shows, of a real server and 1,000 connections that are ranks.

Seven of them are missing from a barrier. Needs Chromium: `make test-page` installs it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "tools"), str(ROOT / "tests"), str(ROOT)]

from PIL import Image  # noqa: E402
from web.browser import Browser, Page  # noqa: E402
from web.scenes import FIRST_PID, SIZE, incident, introduction  # noqa: E402

from support import RawPeer, tcpstore_server  # noqa: E402

SECONDS = 90
"""For which the job goes on: the picture shows the operations of so many seconds."""


def main() -> None:
    with tcpstore_server("--http", "127.0.0.1:0") as server, Browser() as browser:
        url = json.loads(server.ready)["http"]
        began = time.monotonic()
        with incident(server.port), RawPeer(server.port) as other:
            other.send(introduction(0, SIZE))  # another connection of the same rank
            while (passed := time.monotonic() - began) < SECONDS:
                for _ in range(int(400 + 300 * abs((passed / 20) % 2 - 1))):
                    other.ping(FIRST_PID)
                time.sleep(0.5)
            ranks = "document.querySelectorAll('#pending .item').length"
            desk = browser.open(url, width=1100, height=800)
            desk.until(ranks)
            take(desk, "page.png")
            phone = browser.open(url, width=360, height=780, phone=True, dark=True)
            phone.until(ranks)
            take(phone, "page-phone.png", height=1560)


def take(page: Page, name: str, height: int | None = None) -> None:
    """Write a picture of few colours, which is small."""
    path = ROOT / "docs" / name
    page.screenshot(path, height)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(48, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
