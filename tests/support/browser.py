"""Opens pages in Chromium, in a window of a given width. Controls Chromium over its debugging pipe, which needs neither
a driver nor a network."""

import json
import os
import shutil
import subprocess
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"),
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no page may load from a network
)


class Browser:
    """A browser with one page. Args: profile: folder for the browser's profile, which no other browser uses."""

    def __init__(self, profile: Path) -> None:
        (to_browser, self._out), (self._in, from_browser) = os.pipe(), os.pipe()
        # Chromium reads from descriptor 3 and writes to descriptor 4
        command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._left, self._session = 0, b"", {}
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def open(self, page: Path, width: int, height: int = 1000, dark: bool = False) -> None:
        """Opens a page, and returns after it has loaded and been drawn."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self.errors.clear()
        self._ask("Page.navigate", url=page.as_uri())
        self.settle()

    def run(self, script: str) -> object:
        """Returns the value of a JavaScript expression. If the expression is a promise, returns the value with which
        the promise is fulfilled."""
        options = {"awaitPromise": True, "returnByValue": True}
        found = self._ask("Runtime.evaluate", expression=script, **options)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description"))
        return found["result"].get("value")

    def settle(self) -> None:
        loaded = "document.readyState === 'complete' ? done() : addEventListener('load', done)"
        self.run(f"new Promise((done) => {{ {loaded} }}).then(() => new Promise((done) => setTimeout(done, 400)))")

    def close(self) -> None:
        os.close(self._out)  # Chromium exits when its pipe is closed
        os.close(self._in)
        self._process.wait(30)

    def _ask(self, method: str, **parameters) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            said = self._message()
            if said.get("id") == self._number:
                assert "error" not in said, said["error"]
                return said["result"]
            self._hear(said)

    def _message(self) -> dict:
        while b"\0" not in self._left:
            more = os.read(self._in, 1 << 20)
            assert more, "the browser has ended"
            self._left += more
        whole, _, self._left = self._left.partition(b"\0")
        return json.loads(whole)

    def _hear(self, said: dict) -> None:
        """Collects the errors and warnings of the page in `errors`."""
        method, told = said.get("method"), said.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(told["exceptionDetails"].get("exception", {}).get("description", str(told)))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
            self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(told["entry"]["text"])
