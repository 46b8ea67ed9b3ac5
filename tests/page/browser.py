"""A headless Chromium, driven by its DevTools protocol over a pipe, without any other package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

LIMIT_S = 30.0
# Runs in the page before its own script, and records what its content security policy refuses.
WATCH = """
window.violations = [];
addEventListener("securitypolicyviolation", (each) => violations.push(`${each.violatedDirective} ${each.blockedURI}`));
"""


def find() -> str | None:
    """Return the path of the browser, if there is one."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page, in a browser of its own."""

    def __init__(self, program: str) -> None:
        self._folder = tempfile.mkdtemp()
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        # The sandbox needs permissions that containers lack, and the pages shown are our own.
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
        ]
        options += [
            "--remote-debugging-pipe",
            "--no-first-run",
            f"--user-data-dir={self._folder}",
            "about:blank",
        ]
        exec_ = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'  # the descriptors that Chromium expects
        self._process = subprocess.Popen(
            ["bash", "-c", exec_, program, *options],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._unread = 0, b""
        self.complaints: list[str] = []  # errors on the console, and exceptions
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")
        self.do("Page.addScriptToEvaluateOnNewDocument", source=WATCH)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._call("Browser.close", is_answered=False)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- what a test does with it ------------------------------------------------------------------------------

    def look(self, width: int, height: int, *, is_dark: bool = False, scale: float = 1) -> None:
        """Emulate a device."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self.do("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.do("Emulation.setEmulatedMedia", features=[scheme])

    def go(self, url: str) -> None:
        self.do("Page.navigate", url=url)

    def ask(self, expression: str) -> Any:
        """Evaluate a JavaScript expression in the page, and return its value."""
        told = self.do("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def until(self, expression: str, limit_s: float = LIMIT_S) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + limit_s
        while not self.ask(f"!!document.body && !!({expression})"):
            text = self.ask("document.body && document.body.innerText")
            assert time.monotonic() < deadline, (
                f"never {expression}; the page says:\n{text}\n{self.complaints}"
            )
            self._listen(0.05)

    @property
    def text(self) -> str:
        return str(self.ask("document.body.innerText"))

    @property
    def violations(self) -> list[str]:
        return list(self.ask("window.violations || []"))

    def picture(self, path: Path) -> None:
        shot = self.do("Page.captureScreenshot", format="png", captureBeyondViewport=False)
        path.write_bytes(base64.b64decode(shot["data"]))

    # --- the protocol ------------------------------------------------------------------------------------------

    def do(self, method: str, **parameters: Any) -> Any:
        return self._call(method, session=self._session, **parameters)

    def _call(self, method: str, *, session: str = "", is_answered: bool = True, **parameters: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + LIMIT_S
        while is_answered:
            assert time.monotonic() < deadline, f"no answer to {method}"
            for told in self._listen(1.0):
                if told.get("id") == self._number:
                    assert "error" not in told, (method, told["error"])
                    return told["result"]
        return None

    def _listen(self, limit_s: float) -> list[dict[str, Any]]:
        if not select.select([self._in], [], [], limit_s)[0]:
            return []
        data = os.read(self._in, 1 << 20)
        assert data, "the browser has ended"
        *whole, self._unread = (self._unread + data).split(b"\0")
        found = [json.loads(each) for each in whole]
        for each in found:
            self._note(each)
        return found

    def _note(self, told: dict[str, Any]) -> None:
        about = told.get("params", {})
        match told.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(about["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(about["args"]))
            case "Log.entryAdded" if about["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")
            case _:
                pass
