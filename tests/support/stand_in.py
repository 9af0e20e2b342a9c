"""Stand-ins for servers: small programs that record how they were called and handle signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# How a stand-in behaves, by the first word of the variable STAND_IN:
#   (unset)     listens where --host and --port say, answers /health, ends on a signal
#   die CODE    writes ten lines and ends with the code
#   hang        writes one line and never listens
PROGRAM = """#!{python}
import http.server, json, os, signal, sys, time

if sys.argv[1:] == ["--list-devices"]:  # a look at the machine is no start
    print("Available devices:")
    sys.exit()

record = {record!r}

def note(**facts):
    with open(record, "a") as out:
        out.write(json.dumps(facts) + "\\n")

def stop(number, frame):
    note(signal=number)
    print("stand-in: signal", number, flush=True)
    os._exit(int(os.environ.get("STAND_IN_CODE", "0")))

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, stop)
note(argv=sys.argv[1:], program=os.path.basename(sys.argv[0]), group=os.getpgrp())
mode = os.environ.get("STAND_IN", "").split()
if mode[:1] == ["die"]:
    for line in range(10):
        print("stand-in: line", line)
    sys.exit(int(mode[1]))
if mode == ["hang"]:
    print("stand-in: still loading", flush=True)
    while True:
        time.sleep(1)

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

port = int(sys.argv[len(sys.argv) - sys.argv[::-1].index("--port")])
print("stand-in: listening", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class StandIn:
    """A program that was written into a directory, and what it recorded."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / name
        self._record = directory / f"{name}.calls"
        directory.mkdir(parents=True, exist_ok=True)
        self.path.write_text(PROGRAM.format(python=sys.executable, record=str(self._record)))
        self.path.chmod(0o755)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """One entry for each start and each signal."""
        text = self._record.read_text() if self._record.is_file() else ""
        return [json.loads(line) for line in text.splitlines()]

    @property
    def argv(self) -> list[str]:
        """Arguments of the only start."""
        (argv,) = [call["argv"] for call in self.calls if "argv" in call]
        return list(argv)


class Dspine:
    """`dspine …` as a process of its own; its log is collected while it runs."""

    def __init__(self, *arguments: object, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dspine", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "NO_COLOR": "1", "COLUMNS": "100", **environment},
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)

    @property
    def err(self) -> str:
        return "".join(self._lines)

    def wait_for(self, text: str, timeout_s: float = 60) -> None:
        """Wait until standard error holds a text."""
        deadline = time.monotonic() + timeout_s
        while text not in self.err:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self._reader.join(5)
                assert text in self.err, self.err
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, timeout_s: float = 60) -> tuple[int, str, str]:
        """Exit code, standard output and standard error; killed where it does not end."""
        assert self.process.stdout is not None
        try:
            code = self.process.wait(timeout_s)  # what these commands print fits the pipe
        finally:
            self.process.kill()
        out = self.process.stdout.read()
        self._reader.join(5)
        return code, out, self.err


def run(*arguments: object, **environment: str) -> tuple[int, str, str]:
    """Run `dspine …` to its end."""
    return Dspine(*arguments, **environment).end()
