"""A Chromium without a window, driven by the DevTools protocol over a pipe."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import tempfile
import time
from types import TracebackType
from typing import Any, Self

PROGRAM = "chromium"
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
_PATIENCE_S = 60.0


class Chromium:
    """A browser with one page; `problems` are errors of the page's script and requests that it was refused."""

    def __init__(self) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()

        def pipes() -> None:  # the protocol's descriptors are 3 and 4; those of the pipes may be these
            above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in (theirs_in, theirs_out)]
            os.dup2(above[0], 3)
            os.dup2(above[1], 4)

        self._process = subprocess.Popen(
            [PROGRAM, *_OPTIONS, f"--user-data-dir={self._profile.name}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=pipes,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._text, self._session = 0, b"", ""
        self.problems: list[str] = []

    def __enter__(self) -> Self:
        (page,) = [found for found in self._call("Target.getTargets")["targetInfos"] if found["type"] == "page"]
        self._session = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session = ""
        self._call("Browser.close")
        self._process.wait(_PATIENCE_S)
        os.close(self._out)
        os.close(self._in)
        self._profile.cleanup()

    def open(self, url: str) -> None:
        """Opens a page; the one that is there is left, even if only the fragment differs."""
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """Returns the value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str) -> Any:
        """Waits until an expression is true, and returns it; True for an element."""
        script = f"(value => value instanceof Node || value)({script})"
        end = time.monotonic() + _PATIENCE_S
        while not (value := self.evaluate(script)):
            assert time.monotonic() < end, f"{script} is still {value}; {self.problems}"
            time.sleep(0.05)
        return value

    def press(self, key: str) -> None:
        """Presses and releases a key."""
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent", type=kind, key=key, text=key if len(key) == 1 and kind == "keyDown" else ""
            )

    def move(self, x: float, y: float) -> None:
        """Moves the pointer."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def size(self, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """Sets the preferred colors, light or dark."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._text:
            block = os.read(self._in, 1 << 16)
            assert block, "Chromium has ended"
            self._text += block
        message, _, self._text = self._text.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        of = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(of["exceptionDetails"].get("exception", {}).get("description", "exception"))
        elif event.get("method") == "Log.entryAdded" and of["entry"]["level"] == "error":
            self.problems.append(of["entry"]["text"])
