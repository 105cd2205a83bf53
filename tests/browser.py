"""`Browser`: a headless Chromium, driven by its own protocol over two pipes.

See https://chromedevtools.github.io/devtools-protocol/ and, for the pipes, --remote-debugging-pipe of
Chromium: messages are JSON, each ended by a zero byte.
"""

import base64
import collections
import json
import os
import select
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

DEADLINE_SECONDS = 30.0
_OPTIONS = (
    "--headless", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions",
    "--no-proxy-server", "--remote-debugging-pipe",
)  # fmt: skip
_PIPES = 'in=$1 out=$2; shift 2; exec "$@" 3<&"$in" 4>&"$out"'


class Browser:
    """One Chromium with a profile of its own; use it as a context manager."""

    def __init__(self, profile: Path) -> None:
        theirs, self._write = os.pipe()
        self._read, answers = os.pipe()
        root = ("--no-sandbox",) if os.geteuid() == 0 else ()  # its own sandbox refuses root
        command = ("chromium", *_OPTIONS, *root, f"--user-data-dir={profile}", "about:blank")
        self._process = subprocess.Popen(
            ("bash", "-c", _PIPES, "bash", str(theirs), str(answers), *command),
            pass_fds=(theirs, answers), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        os.close(answers)
        self._left = b""
        self._number = 0
        self.events: collections.deque[dict[str, Any]] = collections.deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        try:
            os.killpg(self._process.pid, 9)
        finally:
            self._process.wait(DEADLINE_SECONDS)
            os.close(self._read)
            os.close(self._write)

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        end = time.monotonic() + DEADLINE_SECONDS
        while True:
            answer = self._next(end)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            assert ready, "Chromium did not answer"
            found = os.read(self._read, 1 << 20)
            assert found, "Chromium ended"
            self._left += found
        message, _, self._left = self._left.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def page(
        self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False
    ) -> "Page":
        """Open a page in a new tab, and return it once it is loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        page = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=address)
        page.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")
        return page


class Page:
    """One page of a browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, which the browser evaluates in the page; a promise is
        awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until a condition of the page holds, looking at each of its frames."""
        end = time.monotonic() + DEADLINE_SECONDS
        while not self.evaluate(f"!!({condition})"):
            assert time.monotonic() < end, f"never: {condition}"
            self.evaluate("new Promise((then) => setTimeout(then, 20))")

    def show(self, view: str) -> str:
        """Go to a view of the dashboard, and return its visible text."""
        self.evaluate(
            f"location.hash = {json.dumps(view)}; new Promise((then) => setTimeout(then, 0))"
        )
        return str(self.evaluate("document.body.innerText"))

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key, as a person does."""
        about = {"key": key, "windowsVirtualKeyCode": code, "text": text}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def click(self, selector: str) -> None:
        """Click in the middle of an element, as a person does."""
        found = self.evaluate(
            f"(() => {{ const at = document.querySelector({json.dumps(selector)}); at.scrollIntoView("
            "{block: 'center'}); const box = at.getBoundingClientRect(); return [box.x + box.width / 2, "
            "box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=found[0], y=found[1], button="left",
                      clickCount=1)  # fmt: skip

    def screenshot(self, path: Path) -> None:
        """Write a picture of what is visible."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def complaints(self) -> list[str]:
        """Return what the browser complained about so far: errors of scripts, refusals of policies."""
        self.evaluate("0")
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Log.entryAdded":
                found.append(event["params"]["entry"]["text"])
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(event["params"]["exceptionDetails"]))
        return found

    def requests(self) -> list[str]:
        """Return the addresses that the page asked for so far."""
        self.evaluate("0")
        return [
            event["params"]["request"]["url"] for event in self._browser.events
            if event.get("sessionId") == self._session
            and event["method"] == "Network.requestWillBeSent"
        ]  # fmt: skip
