"""A driver for headless Chromium over a DevTools pipe, for tests of pages; standard library only."""

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

COMMAND = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-pipe"

FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"  # a phone widens innerWidth
IMAGES_ARE_SHOWN = "[...document.images].every(i => i.complete && i.naturalWidth > 0)"

needed = pytest.mark.skipif(COMMAND is None, reason="no Chromium here: apt-get install chromium")


def at_3_and_4(hears: int, says: int) -> None:
    """Move the pipes to file descriptors 3 and 4, where Chromium expects them."""
    hears, says = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (hears, says))
    os.dup2(hears, 3)
    os.dup2(says, 4)


class Browser:
    """A browser: `with Browser() as b: b.open(path); b.evaluate("document.title")`. `said` collects all events and logs."""

    def __enter__(self) -> "Browser":
        assert COMMAND, "no Chromium here"
        self.home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (hears, self.to), (self.back, says) = os.pipe(), os.pipe()
        command = [COMMAND, *FLAGS.split(), f"--user-data-dir={self.home.name}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, preexec_fn=lambda: at_3_and_4(hears, says), close_fds=False, **quiet)
        os.close(hears)
        os.close(says)
        self.said: list[dict[str, Any]] = []
        self.buffer, self.numbers, self.session = b"", itertools.count(1), None
        pages = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self.session = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.to)  # Chromium ends with its pipe
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.back)
        self.home.cleanup()

    def call(self, method: str, **params: Any) -> Any:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while (answer := self.receive()).get("id") != number:
            self.said.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def receive(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            piece = os.read(self.back, 1 << 20)
            assert piece, "Chromium is gone"
            self.buffer += piece
        message, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(message)

    def open(self, page: Path | str) -> float:
        """Open a file or an address, and return the seconds until it is loaded and laid out."""
        self.said.clear()
        start = time.monotonic()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while not any(m.get("method") == "Page.loadEventFired" for m in self.said):
            self.said.append(self.receive())
        self.evaluate("document.body.offsetHeight")
        return time.monotonic() - start

    def evaluate(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = 60) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.evaluate(script):
            assert time.monotonic() < end, script
            time.sleep(0.1)

    def complaints(self) -> list[dict[str, Any]]:
        """Return the errors of the console, the security policy and the loader."""
        names = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.loadingFailed")
        return [m for m in self.said if m.get("method") in names]

    def requests(self) -> list[str]:
        """Return the addresses that the page requested."""
        sent = [m for m in self.said if m.get("method") == "Network.requestWillBeSent"]
        return [m["params"]["request"]["url"] for m in sent]

    def spoken(self) -> list[tuple[str, str, int | None]]:
        """Return role, name and heading level of all elements in the accessibility tree."""
        nodes = [n for n in self.call("Accessibility.getFullAXTree")["nodes"] if not n["ignored"]]
        known = [{p["name"]: p["value"].get("value") for p in n.get("properties", [])} for n in nodes]
        names = [n.get("name", {}).get("value", "") for n in nodes]
        return [(n["role"]["value"], name, of.get("level")) for n, name, of in zip(nodes, names, known, strict=True)]

    def screen(self, width: int, dark: bool = False, media: str = "") -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[feature])

    def photograph(self, path: Path) -> None:
        """Take a screenshot of the full page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 16000), "scale": 1}
        data = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def print(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"]))
