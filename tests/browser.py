"""A headless Chromium for tests, driven through the DevTools protocol (one page, blocking calls)."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp

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
    "--force-device-scale-factor=1",
    "--remote-debugging-port=0",
]
_SHIFTED = {"?": ("Slash", "?"), "G": ("KeyG", "G")}


def find_chromium() -> str | None:
    """The browser's program: ``MAIEUTIC_CHROMIUM``, else the usual names."""
    named = os.environ.get("MAIEUTIC_CHROMIUM")
    return named or next(
        (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None
    )


class Browser:
    """One page of one browser with its own profile. ``requests``: addresses that it tried to load; ``errors``: its complaints."""

    def __init__(self, program: str, profile: Path) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._id = 0
        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._connect(profile / "DevToolsActivePort"))
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    async def _connect(self, port_file: Path) -> None:
        for _ in range(600):
            if port_file.exists() and port_file.read_text().strip():
                break
            if self._process.poll() is not None:
                raise RuntimeError(f"chromium ended with {self._process.returncode} before it listened")
            await asyncio.sleep(0.1)
        port = port_file.read_text().split()[0]
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            f"http://127.0.0.1:{port}/json/list"
        ) as reply:
            page = next(t for t in json.load(reply) if t["type"] == "page")
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)

    def close(self) -> None:
        async def end() -> None:
            await self._socket.close()
            await self._session.close()

        self._loop.run_until_complete(end())
        self._loop.close()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    async def _call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._id += 1
        mine = self._id
        await self._socket.send_str(json.dumps({"id": mine, "method": method, "params": params}))
        while True:
            message = json.loads((await self._socket.receive(timeout=120)).data)
            if message.get("id") == mine:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(
                str(params["exceptionDetails"].get("exception", {}).get("description", params))
            )
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self.errors.append(f"dialog: {params['message']}")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One DevTools command and its result."""
        return self._loop.run_until_complete(self._call(method, params))

    def js(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise AssertionError(result["exceptionDetails"].get("exception", {}).get("description", result))
        return result["result"].get("value")

    def until(self, expression: str, what: str = "") -> None:
        """Wait until a JavaScript expression is true; the limit only ends a test that would hang."""
        end = time.monotonic() + 60
        while not self.js(f"Boolean({expression})"):
            if time.monotonic() > end:
                raise AssertionError(f"never true in the page: {what or expression}")
            time.sleep(0.02)

    def open(self, path: Path, fragment: str = "") -> None:
        """Load a file from the disk in a fresh document."""
        self.call("Page.navigate", url="about:blank")
        self.until("location.href === 'about:blank'")
        self.requests.clear()
        self.errors.clear()
        self.call("Page.navigate", url=path.resolve().as_uri() + (f"#{fragment}" if fragment else ""))
        self.until("location.protocol === 'file:' && document.readyState === 'complete'")

    def key(self, key: str) -> None:
        """Press and release one key."""
        code, text = _SHIFTED.get(key, ("", key if len(key) == 1 else ""))
        press: dict[str, Any] = {"key": key, "code": code}
        if key == "Enter":
            press |= {"windowsVirtualKeyCode": 13, "code": "Enter"}
            text = "\r"
        if key == "Escape":
            press |= {"windowsVirtualKeyCode": 27, "code": "Escape"}
        self.call("Input.dispatchKeyEvent", type="keyDown", **press, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **press)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def settle(self) -> None:
        """Wait until the page has been laid out and drawn: only then does a click find what is seen."""
        self.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def click(self, selector: str) -> None:
        """A real mouse click in the middle of the first element that matches."""
        self.settle()
        box = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{block: 'nearest'}}); "
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def choose(self, selector: str, value: str) -> None:
        """Pick an option of a select, or set the value of an input, as a user's change."""
        self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.value = {json.dumps(value)}; "
            "e.dispatchEvent(new Event('change', {bubbles: true})); return null; })()"
        )

    def scheme(self, scheme: str) -> None:
        """The system's colour scheme: light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def screenshot(self, path: Path) -> None:
        self.settle()
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
