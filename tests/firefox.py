"""Firefox without a display, by its own protocol (Marionette), which needs no driver."""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFERENCES = {"marionette.port": 0, "datareporting.policy.dataSubmissionEnabled": False}
LIMIT = 120
"""Seconds that it may take to start, and to answer."""


class Firefox:
    """One window."""

    def __init__(self, port: int) -> None:
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=LIMIT)
        self.stream = self.connection.makefile("rb")
        self._received()
        self.command("WebDriver:NewSession")

    def _received(self):
        length = b""
        while (digit := self.stream.read(1)) != b":":
            length += digit
        return json.loads(self.stream.read(int(length)))

    def command(self, name, **parameters):
        request = json.dumps([0, 1, name, parameters]).encode()
        self.connection.sendall(b"%d:%s" % (len(request), request))
        _, _, error, result = self._received()
        assert error is None, error
        return result

    def open(self, address):
        self.command("WebDriver:Navigate", url=address)

    def run(self, script):
        """What some JavaScript of the page returns."""
        return self.command("WebDriver:ExecuteScript", script=script, args=[])["value"]

    def until(self, truth):
        """Wait for it."""
        for _ in range(500):
            if self.run(f"return Boolean({truth})"):
                return
            time.sleep(0.02)
        raise AssertionError(truth)

    def click(self, selector):
        using = {"using": "css selector", "value": selector}
        (element,) = self.command("WebDriver:FindElement", **using)["value"].values()
        self.command("WebDriver:ElementClick", id=element)

    def type(self, keys):
        """Press keys, one after the other."""
        acts = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        keyboard = {"type": "key", "id": "keys", "actions": acts}
        self.command("WebDriver:PerformActions", actions=[keyboard])


@contextmanager
def firefox(folder: Path) -> Iterator[Firefox]:
    """A browser with a profile of its own in this folder."""
    lines = [f"user_pref({json.dumps(k)}, {json.dumps(v)});\n" for k, v in PREFERENCES.items()]
    (folder / "user.js").write_text("".join(lines))
    program = shutil.which("firefox-esr") or "firefox"
    command = [program, "--headless", "--marionette", "--no-remote", "--profile", str(folder)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as process:
        try:
            active = folder / "MarionetteActivePort"
            for _ in range(LIMIT * 10):
                if active.exists() and active.read_text():
                    break
                time.sleep(0.1)
            window = Firefox(int(active.read_text()))
            with window.connection, window.stream:
                yield window
        finally:
            process.kill()
