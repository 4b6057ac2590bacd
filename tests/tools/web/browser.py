"""A headless Chromium that a test drives over the pipe of its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support import LIMIT

CHROMIUM = Path("/usr/bin/chromium")

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--force-device-scale-factor=1", "--remote-debugging-pipe",
)  # fmt: skip

_EXEC = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""The browser reads commands from descriptor 3 and writes to descriptor 4."""


class Browser:
    """Ends with the `with` statement."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self._commands = os.pipe()
        self._replies, replies = os.pipe()
        # Copies with high numbers, so that dup2 to 3 does not close what is to be copied to 4.
        reading, writing = os.dup(commands), os.dup(replies)
        words = [sys.executable, "-c", _EXEC, str(reading), str(writing), str(CHROMIUM), *_FLAGS]
        with open(Path(self._folder.name, "log"), "wb") as log:
            self._process = subprocess.Popen(
                [*words, f"--user-data-dir={self._folder.name}/profile", "about:blank"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(reading, writing),
                start_new_session=True,
                env={**os.environ, "HOME": self._folder.name},
            )
        for fd in (commands, replies, reading, writing):
            os.close(fd)
        self._received = b""
        self._number = 0
        self.errors: list[str] = []
        """What pages have complained of: exceptions, and what the policy for their content forbids."""

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._commands)  # it ends when its commands do
        try:
            self._process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._replies)
        self._folder.cleanup()

    def call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._number:
                assert "error" not in reply, f"{method}: {reply}"
                return reply["result"]
            self._note(reply)

    def open(self, url: str, *, width: int = 1200, height: int = 900, phone: bool = False, dark: bool = False) -> Page:
        """Load a page in a tab of its own."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        page = Page(self, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        page.call("Runtime.enable")
        page.call("Log.enable")
        page.call("Page.enable")
        scale = 2 if phone else 1
        page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        if dark:
            page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        page.call("Page.navigate", url=url)
        page.until("document.readyState === 'complete' && document.body.dataset.shown")
        return page

    def _next(self) -> Any:
        deadline = time.monotonic() + LIMIT
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._replies, 1 << 20)
            assert data, f"the browser has ended: {Path(self._folder.name, 'log').read_text(errors='replace')[-2000:]}"
            self._received += data
        line, _, self._received = self._received.partition(b"\0")
        return json.loads(line)

    def _note(self, event: Any) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(event["params"]["exceptionDetails"]))
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.errors.append(event["params"]["entry"]["text"])


class Page:
    """A tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **parameters: Any) -> Any:
        return self._browser.call(method, self._session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression is true, and return its value."""
        deadline = time.monotonic() + LIMIT
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, f"not true: {expression}; the page says {self.text('body')}"
            time.sleep(0.05)
        return value

    def text(self, selector: str) -> str:
        """The text that is shown of an element."""
        return str(self.evaluate(f"(document.querySelector({json.dumps(selector)}) || {{}}).innerText || ''"))

    def screenshot(self, path: Path, height: int | None = None) -> None:
        """Write what the page looks like, down to `height` pixels, as PNG."""
        size = self.evaluate("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": min(size[1], height or size[1]), "scale": 1}
        found = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))
