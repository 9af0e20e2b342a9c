"""A conversation in the terminal, or over pipes: answers on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from dspine_convert.streams import say

from dspine._engine import Engine, Result, Stream
from dspine._errors import InvalidError
from dspine._pair import Round, Stats

if TYPE_CHECKING:
    from dspine._sampling import DraftPolicy, Settings

HELP = "/stats shows counts, /clear starts anew, /exit (or end of input) ends"
PROMPT = "> "


class StoppedError(Exception):
    """The user wants no more of this answer."""


class Chat:
    """Reads messages line by line and prints answers while they grow.

    Attributes:
        failed: a message could not be answered.

    Args:
        engine: who answers.
        settings: of every answer.
        system: the system message, or "".
        thinking: let the target think, or not; None as llama-server does by default.
    """

    def __init__(
        self, engine: Engine, settings: Settings, *, system: str = "", thinking: bool | None = None
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._thinking = thinking
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, str]] = list(self._system)
        self._last: Result | None = None
        self._interrupt = _Interrupt()
        self.failed = False

    def run(self, lines: TextIO) -> None:
        """Answer until the input ends or says /exit."""
        terminal = lines.isatty()
        if terminal:
            say(HELP)
        with self._interrupt.handled():
            while (line := self._read(lines, terminal)) is not None:
                text = line.strip()
                if (bad := _first_bad_byte(text)) is not None:
                    self.failed = True
                    say(f"dspine: no UTF-8 text at byte {bad} of this message")
                elif text.startswith("/"):
                    if not self._command(text):
                        return
                elif text:
                    self.answer(text)

    def answer(self, text: str) -> None:
        """Print the answer to one message, and remember both."""
        self._messages.append({"role": "user", "content": text})
        try:
            result = self._show(text)
        except InvalidError as error:
            self._messages.pop()
            self.failed = True
            say(f"dspine: {error}\n(/clear forgets the conversation)")
            return
        self._last = result
        self._messages.append({"role": "assistant", "content": result.text})

    def _show(self, text: str) -> Result:
        begin = time.monotonic()
        policy = _Stoppable(self._engine.policy, self._interrupt)
        settings: Settings = {**self._settings, "n_draft": policy}
        with (
            self._engine.chat(
                self._messages, thinking=self._thinking, stream=True, **settings
            ) as stream,
            shown() as show,
        ):
            with contextlib.suppress(StoppedError):
                for piece in stream:
                    show(piece.text, status_line(stream, time.monotonic() - begin))
            stream.close()
            return stream.result

    def _read(self, lines: TextIO, terminal: bool) -> str | None:
        """The next line; None at the end of the input."""
        while True:
            try:
                with self._interrupt.raising():
                    if terminal and sys.stdout.isatty():
                        return input(PROMPT)
                    if terminal:
                        sys.stderr.write(PROMPT)
                        sys.stderr.flush()
                    return lines.readline() or None
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not terminal:
                    raise
                say("\n(/exit or Ctrl-D ends)")

    def _command(self, text: str) -> bool:
        """Obey a line that begins with a slash; False to end."""
        if text == "/exit":
            return False
        if text == "/clear":
            self._messages = list(self._system)
            say("(a new conversation)")
        elif text == "/stats":
            say(describe(self._last.stats) if self._last else "(no answer yet)")
        else:
            say(f"unknown command {text.split()[0]}: {HELP}")
        return True


def _first_bad_byte(text: str) -> int | None:
    """Where a line was no UTF-8: such bytes come as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return len(text[: error.start].encode())
    return None


class _Interrupt:
    """Ctrl-C: an exception while a line is read, a note while an answer grows.

    Only noted then, because an exception could hit anywhere inside the engine.
    """

    def __init__(self) -> None:
        self.noted = False
        self._raise = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._raise:
            raise KeyboardInterrupt
        self.noted = True

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Own the signal, unless the parent asked for it to be ignored."""
        main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGINT)
        if not main or before in (signal.SIG_IGN, None):
            yield
            return
        signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        self.noted, self._raise = False, True
        try:
            yield
        finally:
            self._raise = False


class _Stoppable:
    """A draft policy that ends the answer between two steps once Ctrl-C was noted."""

    def __init__(self, policy: DraftPolicy, interrupt: _Interrupt) -> None:
        self._policy = policy
        self._interrupt = interrupt

    def next_depth(self) -> int:
        if self._interrupt.noted:
            raise StoppedError
        return self._policy.next_depth()

    def observe(self, round_: Round, draft_ms: float, verify_ms: float) -> None:
        self._policy.observe(round_, draft_ms, verify_ms)


@contextlib.contextmanager
def shown() -> Iterator[Any]:
    """Give a function that shows text and a status line; the status only on a terminal."""
    if not sys.stdout.isatty():
        yield _write
        sys.stdout.write("\n")
        sys.stdout.flush()
        return
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    line = ""
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def show(text: str, status: str) -> None:
            nonlocal line
            *done, line = (line + text).split("\n")
            for text_line in done:
                console.print(Text(text_line))
            live.update(Group(Text(line), Text(status, style="dim")), refresh=True)

        yield show
    console.print(Text(line))


def _write(text: str, status: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def status_line(stream: Stream, seconds: float) -> str:
    """Tokens a second since the prompt was read, and the mean accepted length."""
    stats = stream.stats
    spent = seconds - stats.prompt_ms / 1000
    speed = stream.n_tokens / spent if spent > 0 else 0.0
    return f"{speed:.1f} tok/s, {stats.mean_accepted_length:.2f} accepted a round"


def describe(stats: Stats) -> str:
    """The counts of an answer in a few lines."""
    by_position = " ".join(f"{rate:.2f}" for rate in stats.acceptance_by_position)
    return (
        f"rounds {stats.rounds}, drafted {stats.drafted}, accepted {stats.accepted}: "
        f"mean accepted length {stats.mean_accepted_length:.2f}, "
        f"acceptance rate {stats.acceptance_rate:.2f}\n"
        f"by position: {by_position or '-'}\n"
        f"prompt {stats.prompt_tokens} tokens ({stats.prompt_reused} from the cache) in "
        f"{stats.prompt_ms:.0f} ms, drafting {stats.draft_ms:.0f} ms, "
        f"verifying {stats.verify_ms:.0f} ms"
    )
