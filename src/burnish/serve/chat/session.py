"""A conversation in the terminal, and the commands that change it.

The conversation can be saved as a training record. Tool calls of the model are never executed: a call is printed, and
the user enters its result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from burnish.config.conversion import as_type
from burnish.config.errors import UserError, did_you_mean
from burnish.serve.chat.backends import SETTINGS, AnswerEnded, Backend, Request, WireMessage, checked_setting
from burnish.serve.chat.console import Console
from burnish.serve.chat.help import HELP
from burnish.serve.chat.records import (
    conversation_of,
    images_in,
    read_image,
    read_record,
    text_of,
    tool_call,
    tools_of,
    user_message,
)
from burnish.utils.files import expand_user


class ChatSession:
    """One conversation.

    Args:
        backend: generates responses.
        console: the terminal.
        settings: settings from the command line.
        system: system message.
    """

    def __init__(
        self, backend: Backend, console: Console, settings: Mapping[str, Any] | None = None, system: str = ""
    ) -> None:
        self.backend, self.console = backend, console
        self.settings = dict(settings or {})
        self._from_start = set(self.settings)
        self.messages: list[WireMessage] = []
        self.system, self.adapter = system, ""
        self.enable_thinking: bool | None = None
        self.thoughts: Literal["show", "hide"] = "show"
        self.tools: list[Mapping[str, Any]] = []
        self.last: AnswerEnded | None = None
        self._retries = 0
        self._images: list[str] = []  # data URIs of images for the next message
        self._prefill = ""  # a message to edit

    # --- input --------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Read lines and respond until the end. Returns 0, or 1 if the last response failed."""
        status = 0
        while True:
            prefill, self._prefill = self._prefill, ""
            try:
                line = self.console.ask("> ", prefill)
            except EOFError:
                self.console.say()
                return status
            except KeyboardInterrupt:  # the first one clears the line, a second one quits
                self.console.say("\n(Press Ctrl-C again or Ctrl-D to quit)", "dim")
                try:
                    line = self.console.ask("> ")
                except (EOFError, KeyboardInterrupt):
                    self.console.say()
                    return status
            if line.strip() in ("/exit", "exit", "/quit"):
                return status
            status = self.take(line)

    def take(self, line: str) -> int:
        """Process one line. Returns 1 if a response failed."""
        word, _, rest = line.strip().partition(" ")
        if not line.strip():
            return 0
        try:
            if word == "/new" or line.strip() == "clear":
                self.start_conversation()
            elif word.startswith("/"):
                return self._command(word[1:], rest.strip())
            else:
                return self.say(line.strip("\n"))
        except UserError as error:
            self.console.print_wrapped(str(error), "red")
            return 1
        except KeyboardInterrupt:  # during a command, or after the last word of a response
            self.console.say("[stopped]", "yellow")
        return 0

    def _command(self, name: str, rest: str) -> int:
        commands: dict[str, Callable[[str], int | None]] = {
            "help": lambda _: self.console.print_wrapped(HELP), "system": self._system, "set": self._set,
            "think": self._set_thinking, "tools": self._tools, "answer": self._answer, "retry": lambda _: self._retry(),
            "undo": lambda _: self._undo(), "edit": lambda _: self._edit(), "adapter": self._adapter,
            "both": self._compare_adapters, "tokens": self._tokens, "prompt": lambda _: self._prompt(),
            "save": self._save, "load": self._load, "image": self._image,
        }  # fmt: skip
        if name not in commands:
            raise UserError(f"Unknown command: /{name}.{did_you_mean(name, commands)} /help lists the commands.")
        return commands[name](rest) or 0

    def start_conversation(self) -> None:
        self.messages, self._images = [], []
        self.last, self._retries = None, 0
        self.console.say("New conversation.", "dim")

    # --- responses ----------------------------------------------------------------------------------------------------

    def say(self, text: str) -> int:
        """Send a message of the user and print the response."""
        if waiting := self._open_calls():
            what = (
                f"{len(waiting)} tool calls have no result yet: enter it with /answer text, or remove them with /undo."
            )
            raise UserError(what)
        self._retries = 0
        images, self._images = self._images, []
        return self._respond([*self.messages, user_message(text, images)])

    def _image(self, name: str) -> None:
        """Add an image to the next message."""
        url, size = read_image(expand_user(name))
        tokens = self.backend.num_tokens(url)
        self._images.append(url)
        cost = f", {tokens:,} tokens" if tokens is not None else ""
        self.console.say(f"{Path(name).name}: {size[0]}x{size[1]}{cost}. It is sent with the next message.", "dim")

    def _respond(self, messages: list[WireMessage]) -> int:
        """Let the backend respond to these messages. If it fails, the conversation is left unchanged."""
        before, self.messages = self.messages, messages
        found = None
        try:
            found = self._print_response(self._request())
        finally:
            self.messages = before if found is None else [*messages, found]
        return int(found is None)

    def _request(self, **changes: Any) -> Request:
        first = [{"role": "system", "content": self.system}] if self.system else []
        settings = dict(self.settings)
        if "seed" in settings:
            settings["seed"] += self._retries
        request = Request([*first, *self.messages], settings, tuple(self.tools), self.enable_thinking, self.adapter)
        return replace(request, **changes)

    def _print_response(self, request: Request) -> WireMessage | None:
        """Print a response as it arrives. Returns it as a message, or None if it failed."""
        found: WireMessage = {"role": "assistant", "content": ""}
        thought, began, thought_s = "", time.monotonic(), 0.0
        calls: list[dict[str, Any]] = []
        ended = None
        with closing(self.backend.answer(request)) as events:  # type: ignore[type-var]
            try:
                for event in events:
                    if event.kind == "thought":
                        thought += event.text
                        thought_s = time.monotonic() - began
                        if self.thoughts == "show":
                            self.console.stream(event.text, "dim")
                    elif event.kind == "content":
                        if thought and not found["content"]:
                            self._end_thought(thought, thought_s)
                        found["content"] += event.text
                        self.console.stream(event.text)
                    elif event.kind == "call" and event.call is not None:
                        calls.append(tool_call(event.call, len(self.messages), len(calls)))
                    else:
                        ended = event.end
            except KeyboardInterrupt:
                self.console.stream(" [stopped]", "yellow")
        if thought and not found["content"]:
            self._end_thought(thought, thought_s)
        self.console.end_stream()
        self._show_calls(calls)
        if thought:
            found["reasoning_content"] = thought
        if calls:
            found["tool_calls"] = calls
        is_empty = ended is None and len(found) == 2 and not found["content"]  # stopped before the first token
        return found if self._print_measurements(ended) and not is_empty else None

    def _end_thought(self, thought: str, seconds: float) -> None:
        if self.thoughts == "hide":
            self.console.say(f"reasoning: {seconds:.1f} s, {len(thought):,} characters", "dim")
        else:
            self.console.say()

    def _show_calls(self, calls: list[dict[str, Any]]) -> None:
        for call in calls:
            function = call["function"]
            width = max(len(function["name"]) + 6, *(len(line) for line in function["arguments"].splitlines()), 20)
            self.console.say(f"┌─ {function['name']} {'─' * (width - len(function['name']) - 3)}", "cyan")
            for line in function["arguments"].splitlines() or [""]:
                self.console.say(f"│ {line}", "cyan")
            self.console.say(f"└{'─' * width}", "cyan")
        if calls:
            self.console.say("The call was not executed. Enter its result with /answer.", "dim")

    def _print_measurements(self, ended: AnswerEnded | None) -> bool:
        """Print measurements below a response. Returns False if the response failed."""
        self.last = ended or self.last
        if ended is None:
            return True  # stopped
        if ended.error and ended.reason == "failed":
            self.console.print_wrapped(ended.error, "red")
            return False
        parts = []
        if ended.tokens is not None:
            rate = ended.tokens / ended.seconds if ended.seconds else 0.0
            parts += [f"{ended.tokens} tokens", f"{rate:.1f} tokens/s"]
        parts.append(f"first token after {ended.first_s:.2f} s")
        if ended.left is not None:
            parts.append(f"{ended.left:,} tokens of context left")
        if ended.reason == "length":
            parts.append("truncated at max_new_tokens")
        self.console.print_wrapped(", ".join(parts), "dim")
        return True

    # --- commands -----------------------------------------------------------------------------------------------------

    def _system(self, text: str) -> None:
        if not text:
            self.console.say(self.system or "No system message is set.", "dim")
            return
        self.system = text
        self.start_conversation()

    def _set(self, text: str) -> None:
        if not text:
            self._show_settings()
        for pair in text.split():
            name, equals, value = pair.partition("=")
            if not equals or name not in SETTINGS:
                raise UserError(f'"{pair}" is not a setting (name=value).{did_you_mean(name, SETTINGS)}')
            if value in ("", "none", "default"):
                self.settings.pop(name, None)
            else:
                try:
                    self.settings[name] = checked_setting(name, as_type(SETTINGS[name], value))
                except ValueError as error:
                    raise UserError(f"{name} {error}") from error
            self._from_start.discard(name)

    def _show_settings(self) -> None:
        settings, defaults = self.settings, self.backend.defaults()
        for name in SETTINGS:
            who = "the command line" if name in self._from_start else "you" if name in settings else "the model"
            value = settings.get(name, defaults.get(name))
            self.console.say(
                f"  {name:<20}{'not set' if value is None else value!s:<12} {who if value is not None else ''}"
            )

    def _set_thinking(self, text: str) -> None:
        if text not in ("on", "off", "hide"):
            raise UserError(f'/think requires on, off or hide. Received: "{text}".')
        if self.backend.has_reasoning is False and text != "hide":
            raise UserError("The template of this model has no reasoning that can be switched on or off.")
        # hide: the template's default, unless it can be switched on
        self.enable_thinking = text == "on" if text != "hide" else True if self.backend.has_reasoning else None
        self.thoughts = "hide" if text == "hide" else "show"

    def _tools(self, text: str) -> None:
        if text == "off":
            self.tools = []
        elif text:
            listed = read_record(expand_user(text))
            if not isinstance(listed, list):
                raise UserError(f"{text} must contain a JSON list of tools.")
            self.tools = [*tools_of(listed, text)]
        names = [tool["function"]["name"] for tool in self.tools]
        self.console.say(f"Tools: {', '.join(names)}." if names else "No tools.", "dim")

    def _open_calls(self) -> list[str]:
        """Return the ids of tool calls without a result."""
        for at in range(len(self.messages) - 1, -1, -1):
            if self.messages[at]["role"] == "assistant":
                answered = {message.get("tool_call_id") for message in self.messages[at + 1 :]}
                ids = [call["id"] for call in self.messages[at].get("tool_calls") or ()]
                return [call for call in ids if call not in answered]
        return []

    def _answer(self, text: str) -> int:
        waiting = self._open_calls()
        if not waiting:
            raise UserError("No tool call is waiting for a result.")
        messages = [*self.messages, {"role": "tool", "content": text, "tool_call_id": waiting[0]}]
        if len(waiting) > 1:
            self.messages = messages
        return self._respond(messages) if len(waiting) == 1 else 0

    def _retry(self) -> int:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise UserError("There is no response to regenerate.")
        self._retries += 1
        return self._respond(self.messages[:-1])

    def _undo(self) -> None:
        if not self.messages:
            raise UserError("The conversation is empty.")
        while self.messages and self.messages.pop()["role"] != "user":
            pass
        shown = text_of(self.messages[-1])[:60] if self.messages else "the beginning"
        self.console.say(f"Back to: {shown}", "dim")

    def _edit(self) -> None:
        place = next((at for at in range(len(self.messages) - 1, -1, -1) if self.messages[at]["role"] == "user"), None)
        if place is None:
            raise UserError("There is no message to edit.")
        self._prefill, self._images = text_of(self.messages[place]), images_in(self.messages[place])
        if self._images:
            self.console.say(f"Images of the message: {len(self._images)}. They are sent again with it.", "dim")
        self.messages = self.messages[:place]

    def _adapter(self, name: str) -> None:
        self.adapter = self._adapter_in_requests(name)

    def _adapter_in_requests(self, name: str) -> str:
        """Return the name of an adapter as used in requests. Raises UserError if it is unknown."""
        known = ("base", *self.backend.adapters)
        if name not in known:
            raise UserError(f'Unknown adapter "{name}". Available: {", ".join(known)}.')
        return "" if name == "base" else name

    def _compare_adapters(self, name: str) -> None:
        """Respond to the last message with the current model and with another one. The conversation does not change."""
        other = self._adapter_in_requests(name)
        messages = self.messages[:-1] if self.messages and self.messages[-1]["role"] == "assistant" else self.messages
        if not messages:
            raise UserError("There is no message yet.")
        first = [{"role": "system", "content": self.system}] if self.system else []
        for adapter in (self.adapter, other):
            self.console.say(f"{adapter or 'base'}:", "bold")
            self._print_response(self._request(messages=[*first, *messages], adapter=adapter))

    def _tokens(self, text: str) -> None:
        last = self._last_ids()
        self._show_pieces(last.prompt, ())
        self.console.say()
        self._show_pieces(last.ids, last.chances if text == "p" else ())
        self.console.say()
        self.console.say(f"{len(last.prompt)} prompt tokens: {list(last.prompt)}", "dim")
        self.console.say(f"{len(last.ids)} response tokens: {list(last.ids)}", "dim")

    def _show_pieces(self, ids: tuple[int, ...], chances: tuple[float, ...]) -> None:
        for at, (piece, is_control) in enumerate(self.backend.pieces(ids)):
            chance = chances[at] if at < len(chances) else None
            color = "yellow" if is_control else "" if chance is None else _color_of(chance)
            shown = piece.replace("\n", "⏎\n")
            self.console.say(f"{shown}{'' if chance is None else f'({chance:.0%})'}", color, end="·")

    def _prompt(self) -> None:
        pieces = self.backend.pieces(self._last_ids().prompt)
        for piece, is_control in pieces:
            self.console.say(piece, "yellow" if is_control else "", end="")
        self.console.say()

    def _last_ids(self) -> AnswerEnded:
        if self.last is None or not self.last.prompt:
            raise UserError("There is no exchange yet, or the server does not return token ids.")
        return self.last

    # --- files --------------------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """Return the conversation as a training record."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return {"messages": [*first, *self.messages], **({"tools": self.tools} if self.tools else {})}

    def _save(self, text: str) -> None:
        path = expand_user(text or time.strftime("chat-%Y%m%d-%H%M%S.jsonl"))
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(self.record(), ensure_ascii=False) + "\n")
        except FileExistsError:
            raise UserError(f"{path} already exists and is not overwritten. Choose a different file.") from None
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}.") from error
        self.console.say(f"Written: {path}", "dim")

    def _load(self, text: str) -> None:
        self.system, loaded, tools = conversation_of(read_record(expand_user(text)), text)
        self.messages, self.tools = [*loaded], [*tools]
        self.console.say(f"{len(self.messages)} messages loaded.", "dim")


def _color_of(chance: float) -> str:
    return "green" if chance > 0.5 else "" if chance > 0.1 else "red"
