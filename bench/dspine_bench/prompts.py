"""The prompts of the workloads, from the package's data files or the user's own.

The format is described in data/README.md.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from dspine_bench.errors import BenchError
from dspine_bench.schema import ALL, CONTROL, WorkloadFile

Message = Mapping[str, Any]

TASKS, REPLAY, DEPTH = "tasks.v1.jsonl", "replay.v1.jsonl", "depth.v1.json"
ROLES = ("system", "user", "assistant", "tool")
THINKING = ", thinking"  # behind id and category of a prompt that is asked in thinking mode


@dataclass(frozen=True)
class Conversation:
    """Messages and tools as in OpenAI's chat API; `category` is empty for a replay."""

    id: str
    category: str
    messages: Sequence[Message]
    tools: Sequence[Message] = field(default_factory=tuple)


@dataclass(frozen=True)
class LongText:
    """The parts of `depth`'s prompt."""

    intro: str
    paragraphs: Sequence[str]
    question: str

    def text(self, paragraphs: int) -> str:
        """The introduction and so many numbered paragraphs."""
        lines = [self.intro]
        for i in range(paragraphs):
            lines.append(f"{i + 1}. {self.paragraphs[i % len(self.paragraphs)]}")
        return "\n\n".join(lines)


def read(name: str, path: Path | None) -> tuple[str, WorkloadFile]:
    """The text of the user's file, or of the package's `name`, and what it is."""
    if path is None:
        data = (resources.files("dspine_bench") / "data" / name).read_bytes()
    else:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BenchError(f"{path}: {error.strerror or error}") from None
    where = path.name if path else name
    try:
        return data.decode(), WorkloadFile(name=where, sha256=hashlib.sha256(data).hexdigest())
    except UnicodeDecodeError as error:
        raise BenchError(f"{path or name}: no UTF-8 text at byte {error.start}") from None


def parse_lines(text: str, where: str, *, category: bool) -> list[Conversation]:
    """Conversations of a JSONL text; BenchError names the line that is wrong."""
    found: list[Conversation] = []
    # splitlines() splits at U+2028 too, which may stand in a text; JSON ignores "\r" at the end
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        entry = _entry(line, f"{where}:{number}")
        problem = _problem(entry, category=category)
        if problem:
            raise BenchError(f"{where}:{number}: {problem}")
        found.append(
            Conversation(
                entry["id"], entry.get("category", ""), entry["messages"], entry.get("tools", ())
            )
        )
    ids = [one.id for one in found]
    if not ids:
        raise BenchError(f"{where}: there is no prompt in it")
    for one in ids:
        if ids.count(one) > 1:
            raise BenchError(f"{where}: the id {one!r} stands in it twice")
    return found


def _entry(line: str, where: str) -> Any:
    """What a line says; BenchError for one that is no JSON, or cannot be sent as JSON again."""
    try:
        entry = json.loads(line)
        json.dumps(entry, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise BenchError(f"{where}: expected whole characters, found the half one {half}") from None
    except ValueError as error:
        raise BenchError(f"{where}: no JSON: {error}") from None
    except RecursionError:
        raise BenchError(f"{where}: JSON of too many levels, expected a conversation") from None
    return entry


def _problem(entry: object, *, category: bool) -> str | None:
    """What is wrong with an entry, None of nothing."""
    if not isinstance(entry, dict):
        return f"expected an object, found {type(entry).__name__}"
    for name in ("id", "category") if category else ("id",):
        if problem := _name_problem(entry.get(name)):
            return f"{name}: {problem}"
    if entry.get("category") == ALL and category:
        return f"category: expected another name than {ALL!r}, which rows of all categories have"
    messages = entry.get("messages")
    if not isinstance(messages, list) or not messages:
        return "messages must be a list that is not empty"
    for index, message in enumerate(messages):
        if problem := _message_problem(message):
            return f"messages[{index}]{problem}"
    if problem := _functions_problem(entry.get("tools", []), ("name",)):
        return f"tools{problem}"
    if not category and not any(m["role"] == "assistant" for m in messages[1:]):
        return "no assistant message to replay"
    return None


def _name_problem(name: object) -> str | None:
    """What is wrong with an id or a category: tables and the page show them as they are."""
    if not isinstance(name, str) or not name:
        return f"expected a text, found {name!r:.60}"
    if re.search(f"[{CONTROL}]", name):
        return f"expected a text without control characters, found {name!r:.60}"
    if name.endswith(THINKING):
        return f"expected another end than {THINKING!r}, which thinking mode adds"
    return None


def _message_problem(message: object) -> str | None:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        return f": role must be one of {', '.join(ROLES)}"
    calls = message.get("tool_calls")
    problem = None if calls is None else _functions_problem(calls, ("name", "arguments"))
    return f".tool_calls{problem}" if problem else None


def _functions_problem(entries: object, texts: Sequence[str]) -> str | None:
    """What is wrong with tools or calls of them: objects whose `function` has these texts."""
    if not isinstance(entries, list):
        return f": expected a list, found {type(entries).__name__}"
    for index, one in enumerate(entries):
        function = one.get("function") if isinstance(one, dict) else None
        if not isinstance(function, dict):
            return f"[{index}]: expected an object with function, found {one!r:.60}"
        for name in texts:
            if not isinstance(function.get(name), str):
                found = type(function.get(name)).__name__
                return f"[{index}].function.{name}: expected a text, found {found}"
    return None


def load_tasks(path: Path | None) -> tuple[list[Conversation], WorkloadFile]:
    """The prompts of `tasks`."""
    text, file = read(TASKS, path)
    return parse_lines(text, str(path or TASKS), category=True), file


def load_replay(path: Path | None) -> tuple[list[Conversation], WorkloadFile]:
    """The conversations of `replay`."""
    text, file = read(REPLAY, path)
    return parse_lines(text, str(path or REPLAY), category=False), file


def load_depth() -> tuple[LongText, WorkloadFile]:
    """The long text of `depth`."""
    text, file = read(DEPTH, None)
    entry = json.loads(text)
    return LongText(entry["intro"], entry["paragraphs"], entry["question"]), file


def first_of_each(prompts: Sequence[Conversation]) -> list[Conversation]:
    """One prompt of every category: what `--quick` takes."""
    seen: dict[str, Conversation] = {}
    for prompt in prompts:
        seen.setdefault(prompt.category, prompt)
    return list(seen.values())


def decisions(conversation: Conversation) -> list[Conversation]:
    """The prefixes that end where the recorded assistant spoke, in order."""
    found: list[Conversation] = []
    for index, message in enumerate(conversation.messages):
        if index and message["role"] == "assistant":
            name = f"{conversation.id}/{len(found) + 1}"
            found.append(Conversation(name, "", conversation.messages[:index], conversation.tools))
    return found


def without_tools(conversation: Conversation) -> Conversation:
    """The same for a template that knows no tools: calls and results as plain text.

    Neighbours of one role are joined, as many templates want roles to alternate.
    """
    plain: list[dict[str, str]] = []
    if conversation.tools:
        listing = "\n".join(json.dumps(tool["function"]) for tool in conversation.tools)
        rule = 'To call a tool, answer {"tool": name, "arguments": {...}} alone. Tools:'
        plain.append({"role": "system", "content": f"{rule}\n{listing}"})
    for message in conversation.messages:
        _append(plain, _plain(message))
    return Conversation(conversation.id, conversation.category, plain)


def _plain(message: Message) -> dict[str, str]:
    text = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"Result of the tool:\n{text}"}
    for call in message.get("tool_calls") or ():
        function = call["function"]
        shown = f'{{"tool": "{function["name"]}", "arguments": {function["arguments"]}}}'
        text = f"{text}\n{shown}" if text else shown
    return {"role": message["role"], "content": text}


def _append(messages: list[dict[str, str]], message: dict[str, str]) -> None:
    if messages and messages[-1]["role"] == message["role"]:
        joined = f"{messages[-1]['content']}\n\n{message['content']}"
        messages[-1] = {"role": message["role"], "content": joined}
    else:
        messages.append(message)
