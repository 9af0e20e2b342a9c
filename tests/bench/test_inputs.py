"""Prompts, recorded conversations, and the flags that make modes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from dspine_bench.errors import BenchError
from dspine_bench.modes import expand, parse_sweep, remote
from dspine_bench.prompts import (
    decisions,
    first_of_each,
    load_depth,
    load_replay,
    load_tasks,
    without_tools,
)


def test_the_shipped_tasks() -> None:
    talks, file = load_tasks(None)
    kinds = {t.category: sum(o.category == t.category for o in talks) for t in talks}
    assert kinds["chat"] == 10 and kinds["code"] == 4
    assert set(kinds) == {
        "chat", "code", "math", "json", "tools", "summary", "translation", "prose",
    }  # fmt: skip
    assert file.name == "tasks.v1.jsonl" and len(file.sha256) == 64
    assert [t.category for t in first_of_each(talks)] == list(kinds)


def test_the_shipped_conversations() -> None:
    talks, _ = load_replay(None)
    assert len(talks) == 8
    assert all(any(m["role"] == "tool" for m in t.messages) for t in talks)
    for talk in talks:
        calls = {c["id"] for m in talk.messages for c in m.get("tool_calls", ())}
        answered = {m["tool_call_id"] for m in talk.messages if m["role"] == "tool"}
        assert calls == answered
        for one in decisions(talk):
            assert one.messages == talk.messages[: len(one.messages)]
            assert talk.messages[len(one.messages)]["role"] == "assistant"


def test_tools_as_text() -> None:
    talk = load_replay(None)[0][0]
    plain = without_tools(talk)
    assert plain.messages[0]["role"] == "system" and "read_file" in plain.messages[0]["content"]
    roles = [m["role"] for m in plain.messages]
    assert all(a != b for a, b in itertools.pairwise(roles))
    assert set(roles) == {"system", "user", "assistant"}
    text = json.dumps(plain.messages)
    assert "invoice/tax.py" in text and "Result of the tool" in text


def test_the_long_text_grows() -> None:
    text, _ = load_depth()
    assert text.text(0) == text.intro
    long = text.text(20)
    assert "20. " in long and long.startswith(text.text(7))


def line_of(**changed: object) -> str:
    """A prompt's line with other fields."""
    message = {"role": "user", "content": "a"}
    return json.dumps({"id": "a", "category": "b", "messages": [message]} | changed)


def calling(*calls: object) -> str:
    """A prompt's line with these calls of tools."""
    return line_of(messages=[{"role": "assistant", "tool_calls": [*calls]}])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "too many levels"),
        (line_of(messages=[{"role": "user", "content": "\ud800"}]), "the half one \\ud800"),
        (line_of(temperature=float("nan")), "no JSON"),
        (line_of(id=3), "id: expected a text, found 3"),
        (line_of(id="a\0"), "id: expected a text without control characters, found 'a\\x00'"),
        (line_of(category="\x1b[2J"), "category: expected a text without control characters"),
        (line_of(category="all"), "category: expected another name than 'all'"),
        (line_of(id="a, thinking"), "id: expected another end than ', thinking'"),
        (line_of(tools=[3]), "tools[0]: expected an object with function, found 3"),
        (line_of(tools=[{"function": {}}]), "tools[0].function.name: expected a text"),
        (line_of(tools=None), "tools: expected a list, found NoneType"),
        (calling({"id": "1"}), "messages[0].tool_calls[0]: expected an object with function"),
        (
            calling({"function": {"name": "f", "arguments": {}}}),
            "messages[0].tool_calls[0].function.arguments: expected a text, found dict",
        ),
        (
            line_of(messages=[{"role": "assistant", "tool_calls": "f"}]),
            "messages[0].tool_calls: expected a list, found str",
        ),
        ("[]", "expected an object"),
        ('{"id": "a", "messages": []}', "category"),
        ('{"id": "a", "category": "b", "messages": []}', "messages"),
        ('{"id": "a", "category": "b", "messages": [{"role": "god"}]}', "messages[0]"),
        ('{"id": "a", "category": "b", "messages": [{"role": "user"}], "tools": 3}', "tools"),
    ],
)
def test_a_wrong_line_is_named(line: str, said: str, tmp_path: Path) -> None:
    good = '{"id": "x", "category": "b", "messages": [{"role": "user", "content": "a"}]}'
    path = tmp_path / "mine.jsonl"
    path.write_text(f"{good}\n\n{line}\n")
    with pytest.raises(BenchError) as caught:
        load_tasks(path)
    assert "mine.jsonl:3: " in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_end_at_a_line_feed(end: str, tmp_path: Path) -> None:
    text = "one\u2028two\u0085three"
    line = json.dumps({"role": "user", "content": text}, ensure_ascii=False)
    path = tmp_path / "mine.jsonl"
    lines = [f'{{"id": "{n}", "category": "b", "messages": [{line}]}}{end}' for n in range(2)]
    path.write_bytes("".join(lines).encode())
    talks, _ = load_tasks(path)
    assert [talk.messages[0]["content"] for talk in talks] == [text, text]


def test_prompts_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with pytest.raises(BenchError, match="No such file"):
        load_tasks(path)
    path.write_text("\n")
    with pytest.raises(BenchError, match="no prompt"):
        load_tasks(path)
    path.write_bytes(b"\xff")
    with pytest.raises(BenchError, match="UTF-8"):
        load_tasks(path)
    line = '{"id": "a", "messages": [{"role": "user", "content": "a"}]}'
    path.write_text(line)
    with pytest.raises(BenchError, match="no assistant message"):
        load_replay(path)
    twice = '{"id": "a", "category": "b", "messages": [{"role": "user", "content": "a"}]}\n' * 2
    path.write_text(twice)
    with pytest.raises(BenchError, match="twice"):
        load_tasks(path)


def test_modes() -> None:
    one, two = Path("d/one.gguf"), Path("d/two.gguf")
    modes = expand([one, two], [2, 15], ["q8_0", "f16"], [0.0])
    assert [m.name for m in modes if m.drafter is None] == ["plain q8_0", "plain f16"]
    assert len(modes) == 2 * (1 + 2 * 2)
    assert all(m.baseline.endswith(m.cache_type or "?") for m in modes)
    assert "two n=15 f16" in {m.name for m in modes}
    hot = expand([one], (), ["q8_0"], [0.0, 1.0])
    assert len({m.server for m in hot}) == 2, "a temperature needs no server of its own"
    assert [m.name for m in expand([Path("a/d.gguf"), Path("b/d.gguf")])][1:] == ["a/d", "b/d"]
    with pytest.raises(BenchError, match="same name"):
        expand([one, one])
    own = expand([one, two], own={one: 15})
    assert [(m.name, m.n_draft) for m in own[1:]] == [("one", 15), ("two", None)]
    assert expand([one], [3], own={one: 15})[1].n_draft == 3


def test_remote_modes() -> None:
    plain, server = remote("http://a:1", "http://b:2")
    assert plain.url == "http://b:2" and server.baseline == plain.name
    with pytest.raises(BenchError, match="--url-baseline b:2: expected http"):
        remote("http://a:1", "b:2")


@pytest.mark.parametrize("text", ["", "n-draft", "n-draft=", "n-draft=a", "p-min=1", "n-draft=0,2"])
def test_sweeps_that_are_none(text: str) -> None:
    with pytest.raises(BenchError, match="--sweep"):
        parse_sweep(text)
    assert parse_sweep("n-draft=4,2,4") == parse_sweep("n_draft=4,2") == [4, 2]
