"""Headless Chromium, driven over a pipe with its DevTools protocol (https://chromedevtools.github.io/devtools-protocol/): no package needed."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
# key: (code, Windows' virtual key code, text)
KEYS = {
    "Enter": ("Enter", 13, "\r"),
    "Tab": ("Tab", 9, ""),
    "Escape": ("Escape", 27, ""),
    " ": ("Space", 32, " "),
    "ArrowDown": ("ArrowDown", 40, ""),
    "Backspace": ("Backspace", 8, ""),
}
SHIFT = 8
WANTED = {"awaitPromise": True, "returnByValue": True, "allowUnsafeEvalBlockedByCSP": False}
TIMEOUT_S = 20.0
ANSWERED = "the server responded with a status of"  # noted as an error for 400 and above; what a test asks for


def program() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Navigated(Exception):
    """The page was left while it was asked."""


class Browser:
    """One browser with one tab. errors: exceptions of scripts, messages of the console that are errors, and what the policy refused."""

    def __init__(self, folder: Path):
        ours, theirs = os.pipe(), os.pipe()
        # Above 10, so that none is 3 or 4, which Chromium reads and writes.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (ours[0], theirs[1])]
        options = (
            "--headless --no-sandbox --disable-gpu --remote-debugging-pipe --no-first-run --disable-extensions "
            "--disable-background-networking --disable-component-update --hide-scrollbars --mute-audio --disable-dev-shm-usage"
        )
        found = program()
        assert found is not None
        self._process = subprocess.Popen(
            [found, *options.split(), f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: (os.dup2(high[0], 3), os.dup2(high[1], 4)),
            pass_fds=(3, 4),
        )
        for fd in (ours[0], theirs[1], *high):
            os.close(fd)
        self._out, self._in = ours[1], theirs[0]
        self._number, self._data, self._session = 0, b"", ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait(10)

    # The protocol: JSON, a zero byte behind each message

    def _receive(self, until: float) -> dict:
        while b"\0" not in self._data:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            piece = os.read(self._in, 1 << 20) if ready else b""
            assert piece, "the browser does not answer"
            self._data += piece
        message, _, self._data = self._data.partition(b"\0")
        return json.loads(message)

    def _note(self, message: dict) -> None:
        method, given = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            detail = given["exceptionDetails"]
            self.errors.append(detail.get("exception", {}).get("description") or detail["text"])
        elif (
            method == "Log.entryAdded" and given["entry"]["level"] == "error" and ANSWERED not in given["entry"]["text"]
        ):
            self.errors.append(f"{given['entry']['text']} {given['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and given["type"] == "error":
            self.errors.append(str([argument.get("value") for argument in given["args"]]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])

    def send(self, method: str, **params):
        """The result of a command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + TIMEOUT_S
        while (reply := self._receive(until)).get("id") != self._number:
            self._note(reply)
        if "navigated" in reply.get("error", {}).get("message", ""):
            raise Navigated
        assert "error" not in reply, reply["error"]
        return reply["result"]

    # The tab

    def evaluate(self, script: str):
        """The value of an expression, awaited. An exception of it fails."""
        found = self.send("Runtime.evaluate", expression=script, **WANTED)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, timeout: float = TIMEOUT_S) -> None:
        """Until the expression is true."""
        until = time.monotonic() + timeout
        while not self._is_true(script):
            assert time.monotonic() < until, f"{script}\n{self.evaluate('document.body.innerText')}\n{self.errors}"
            time.sleep(0.02)

    def _is_true(self, script: str) -> bool:
        try:
            return self.evaluate(f"Boolean({script})")
        except Navigated:
            return False

    def open(self, url: str) -> None:
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.protocol !== 'about:'")

    def forget(self, origin: str) -> None:
        """What the page kept."""
        self.send("Storage.clearDataForOrigin", origin=origin, storageTypes="all")
        self.evaluate("sessionStorage.clear()")

    def window(self, width: int = 1280, height: int = 800, dark: bool = False, phone: bool = False) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.send("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        code, number, text = KEYS[key]
        base = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": modifiers}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **base)
        self.send("Input.dispatchKeyEvent", type="keyUp", **base)

    def click(self, selector: str) -> None:
        self.wait(f"document.querySelector({json.dumps(selector)})")
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def choose(self, selector: str, *files: Path) -> None:
        """Files for an input."""
        self.send("DOM.enable")
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(file) for file in files])
        self.send("DOM.disable")

    def focused(self) -> str:
        """Text or name of what has the focus."""
        return self.evaluate("(e => e.ariaLabel || e.name || e.innerText || e.tagName)(document.activeElement)")

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))
