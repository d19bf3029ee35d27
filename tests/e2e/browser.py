"""A headless browser for shipper's pages."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from base64 import b64decode
from pathlib import Path
from typing import Any, Self

import pytest

_LIMIT_SECONDS = 60


class Browser:
    """A headless browser controlled over a pipe; it can reach only loopback."""

    def __init__(self, folder: Path) -> None:
        program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        if program is None:
            pytest.skip("no browser: install chromium")
        (orders, self._orders), (self._answers, answers) = os.pipe(), os.pipe()
        self._process = subprocess.Popen(
            [
                *("bash", "-c", f'exec "$0" "$@" 3<&{orders} 4>&{answers}'),
                *(program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"),
                *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--kiosk"),
                "--disable-features=BackForwardCache",  # keep no process for a closed page
                *("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={folder}"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(orders, answers),
        )
        os.close(orders)
        os.close(answers)
        self._read = b""
        self._number = 0
        self._session: str | None = None
        self._shape: tuple[int, str] | None = None
        self._read_at: tuple[object, ...] = ()
        self.troubles: list[str] = []

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the debugging protocol; return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._orders, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            assert select.select([self._answers], [], [], _LIMIT_SECONDS)[0], "the browser does not answer"
            piece = os.read(self._answers, 1 << 20)
            assert piece, "the browser exited"
            self._read += piece
        line, _, self._read = self._read.partition(b"\0")
        message = json.loads(line)
        if message.get("method") in {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}:
            self.troubles.append(json.dumps(message["params"]))
        return message

    def open(self, url: str, *, width: int = 1280, scheme: str = "light") -> Page:
        """Open a page in the same tab: a new tab would need its own process."""
        if self._session is None:
            self._begin()
        page = Page(self)
        page.run("isLeft = true")
        self._read_at = ()
        if self._shape != (width, scheme):
            self._shape = (width, scheme)
            self.send(
                "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
            )
            self.send(
                "Emulation.setEmulatedMedia", media="", features=[{"name": "prefers-color-scheme", "value": scheme}]
            )
        self.troubles.clear()
        self.send("Page.navigate", url=url)
        page.until("typeof isLeft === 'undefined' && document.documentElement?.dataset.shown > 0")
        return page

    def show(self, url: str, *, width: int = 1280, scheme: str = "light") -> Page:
        """Open a page; if it is open, poll again and draw the answer as if it were the first."""
        if self._read_at == (url, width, scheme):
            self.troubles.clear()
            page = Page(self)
            page.ask_again("samples = [], latest.at = null")
        else:
            page = self.open(url, width=width, scheme=scheme)
            self._read_at = (url, width, scheme)
        return page

    def dom_of(self, url: str) -> str:
        """Open any page; return its DOM."""
        if self._session is None:
            self._begin()
        self._read_at = ()
        page = Page(self)
        page.run("isLeft = true")
        self.send("Page.navigate", url=url)
        page.until("typeof isLeft === 'undefined' && document.readyState === 'complete'")
        return page.run("document.documentElement.outerHTML")

    def forget_shape(self) -> None:
        """Set width and colours again for the next page."""
        self._shape, self._read_at = None, ()

    def _begin(self) -> None:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setTimezoneOverride", timezoneId="Europe/Berlin")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        self.send("Browser.close")
        self._process.wait(30)
        os.close(self._orders)
        os.close(self._answers)


class Page:
    """A tab with the status page."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self.send = browser.send

    def run(self, script: str) -> Any:
        """Evaluate an expression in the page."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + _LIMIT_SECONDS
        while not self.run(condition):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.02)

    def ask_again(self, before: str = "") -> None:
        """Poll now instead of two seconds after the last answer."""
        is_idle = "new Promise((done) => { const look = () => (isPolling ? setTimeout(look, 5) : done()); look() })"
        self.run(f"{is_idle}.then(() => {{ {before}; return poll() }})")

    def text(self, selector: str = "body") -> str:
        """Return the visible text with runs of spaces collapsed."""
        return " ".join(self.run(f"document.querySelector({json.dumps(selector)}).innerText").split())

    def texts(self, selector: str) -> list[str]:
        found = self.run(
            f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.innerText ?? one.textContent)"
        )
        return [" ".join(one.split()) for one in found]

    @property
    def state(self) -> str:
        return self.run("document.documentElement.dataset.state")

    @property
    def troubles(self) -> list[str]:
        """Errors, policy violations and console messages of the browser."""
        self.run("1")
        return self._browser.troubles

    def lay_out(self, *, width: int, media: str = "screen", scheme: str = "light") -> None:
        """Change the layout until another page is opened."""
        shape = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **shape)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", media=media, features=features)
        self._browser.forget_shape()

    def move_mouse(self, x: float, y: float) -> None:
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.send("Input.dispatchKeyEvent", type="keyDown", key=key)

    def photograph(self, path: Path) -> None:
        whole = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": whole["width"], "height": whole["height"], "scale": 1}
        shot = self.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(b64decode(shot["data"]))
