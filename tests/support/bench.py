"""For the benchmarks' tests: reports made of samples, and a server that answers by rule."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dspine_bench.schema import (
    Config,
    Hardware,
    Mode,
    Provenance,
    Sample,
    ServerReport,
    WorkloadFile,
)
from dspine_bench.summary import summarize

PLAIN = Mode(
    name="plain",
    baseline="plain",
    drafter=None,
    n_draft=0,
    cache_type="q8_0",
    temperature=0.0,
    url=None,
    command=[],
)
DRAFT = PLAIN.model_copy(update={"name": "draft", "drafter": "draft.gguf", "n_draft": 7})


def sample(mode: str, prompt: str, repeat: int, ms: float, **changed: Any) -> Sample:
    """A sample of 100 tokens in `ms` milliseconds; the draft mode accepted 60 in 39 rounds."""
    drafting = mode != "plain"
    values: dict[str, Any] = {
        "mode": mode,
        "repeat": repeat,
        "prompt": prompt,
        "category": prompt.partition("-")[0],
        "prompt_tokens": 10,
        "cached": 0,
        "tokens": 100,
        "rounds": 39 if drafting else 99,
        "drafted": 120 if drafting else 0,
        "accepted": 60 if drafting else 0,
        "accepted_at": [30, 20, 10] if drafting else None,
        "prompt_ms": 5.0,
        "generated_ms": ms,
        "first_token_ms": None,
        "wall_ms": ms + 6.0,
        "stop": "limit",
        "digest": hashlib.sha256(prompt.encode()).hexdigest(),
        "compared": "ids",
    }
    return Sample(**(values | changed))


def report_of(
    samples: list[Sample], modes: tuple[Mode, ...] = (PLAIN, DRAFT), **changed: Any
) -> ServerReport:
    """A `tasks` report of these samples."""
    values: dict[str, Any] = {
        "schema_version": 1,
        "provenance": Provenance(
            command=["dspine-bench", "tasks"],
            time="2026-01-02T03:04:05+00:00",
            version="0.1.0",
            commit="a" * 40,
            dirty=False,
            pin="0c1e57098",
            build="b0-0c1e57098-dspine",
        ),
        "hardware": Hardware(
            system="Linux",
            machine="x86_64",
            cpu="A processor",
            cores=2,
            memory_bytes=8 << 30,
            devices=[],
            driver=None,
            limits=None,
        ),
        "workload": "tasks",
        "files": [WorkloadFile(name="tasks.v1.jsonl", sha256="0" * 64)],
        "models": [],
        "config": Config(
            repeats=5,
            warmup=1,
            quick=False,
            max_tokens=100,
            n_ctx=4096,
            parallel=1,
            interleave="request",
            extra=[],
        ),
        "modes": list(modes),
        "samples": samples,
        "replays": [],
        "summary": summarize(modes, samples),
    }
    return ServerReport(**(values | changed))


class FakeServer:
    """A llama-server that answers by rule: the n-th id of an answer is (prompt length + n) % 97.

    Attributes:
        requests: path and body of every POST, in order.
        routes: what exists; take one out for a server that lacks it.
        ms_per_token: what its timings claim.
        gives_ids: whether its completions have ids.
        drafts: whether its timings claim a drafter that accepts half of what it drafts.
        shift: added to every id, for a server that answers otherwise.
        message: fields of every chat message beside its text.
        n_ctx, slots: the context of a request, and how many it works on at a time, None where it
            does not tell.
        build, model: what it calls itself, and the path that it has loaded.
        connections: how often it was connected to.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.routes = {"/apply-template", "/completion", "/tokenize", "/metrics", "/props"}
        self.routes.add("/v1/chat/completions")
        self.ms_per_token, self.drafts, self.shift = 2.0, False, 0
        self.template_thinks = False
        self.message: dict[str, Any] = {}
        self.n_ctx: int | None = None
        self.slots: int | None = None
        self.build, self.model = "b1-abcdef012-fake", ""
        self.gives_ids, self.connections = True, 0
        self.accepted = [0, 0]
        self.lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                with fake.lock:
                    fake.connections += 1
                super().setup()

            def log_message(self, *args: object) -> None:
                return

            def do_GET(self) -> None:
                fake.get(self)

            def do_POST(self) -> None:
                fake.post(self)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def send(self, handler: BaseHTTPRequestHandler, body: Any, status: int = 200) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def get(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.path not in self.routes:
            self.send(handler, {"error": {"message": "no such route"}}, 404)
        elif handler.path == "/metrics":
            name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
            lines = [f"# TYPE {name} counter"]
            lines += [f'{name}{{position="{i}"}} {n}' for i, n in enumerate(self.accepted)]
            self.send(handler, "\n".join(lines))
        else:
            props = {"build_info": self.build, "model_path": self.model, "chat_template_caps": {}}
            props |= {"default_generation_settings": {"n_ctx": self.n_ctx}}
            self.send(handler, props | {"total_slots": self.slots})

    def post(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            self.requests.append((handler.path, body))
        if handler.path not in self.routes:
            self.send(handler, {"error": {"message": "no such route"}}, 404)
            return
        made: dict[str, Callable[[dict[str, Any]], Any]] = {
            "/apply-template": self.template,
            "/tokenize": lambda b: {"tokens": list(range(len(b["content"].split())))},
            "/completion": self.completion,
            "/v1/chat/completions": self.chat,
        }
        answer = made[handler.path](body)
        if body.get("stream"):
            answer = f"data: {json.dumps(answer)}\n\n"
        self.send(handler, answer)

    def template(self, body: dict[str, Any]) -> Any:
        text = "\n".join(f"{m['role']}: {m['content']}" for m in body["messages"])
        thinking = body.get("chat_template_kwargs", {}).get("enable_thinking", True)
        return {"prompt": text + ("\n<think>" if self.template_thinks and thinking else "")}

    def timings(self, n: int, prompt: int) -> dict[str, Any]:
        drafted = {"draft_n": n, "draft_n_accepted": n // 2} if self.drafts else {}
        if self.drafts:
            with self.lock:
                self.accepted = [self.accepted[0] + n // 4, self.accepted[1] + n // 4]
        return {
            "prompt_n": prompt,
            "cache_n": 0,
            "prompt_ms": 3.0,
            "predicted_n": n,
            "predicted_ms": n * self.ms_per_token,
            **drafted,
        }

    def completion(self, body: dict[str, Any]) -> Any:
        n, prompt = body["n_predict"], body["prompt"]
        tokens = [(len(prompt) + i + self.shift) % 97 for i in range(n)]
        return {
            "content": " ".join(map(str, tokens)),
            "tokens": tokens if self.gives_ids else [],
            "stop_type": "limit",
            "timings": self.timings(n, len(prompt)),
        }

    def chat(self, body: dict[str, Any]) -> Any:
        n = body["max_tokens"]
        text = f"{len(body['messages'])} {self.shift} {n}"
        choice = {"message": {"content": text, **self.message}, "finish_reason": "length"}
        return {"choices": [choice], "timings": self.timings(n, 5)}
