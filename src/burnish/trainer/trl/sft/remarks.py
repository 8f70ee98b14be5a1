"""Rows that a script can hardly mean: refused where they say nothing at all, else named once of each kind.

In: rows as they are given. Refused: a message without content. Warned of, because some template or model may mean it:
a conversation without an answer, a role that few templates know, a system message that is not the first, a marker of an
image. What is done where is in docs/parity-sft.md.
"""

from __future__ import annotations

from typing import Any

from transformers.utils import logging

logger = logging.get_logger("transformers.trainer")

ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython", "observation", "tool_response"}
"""Roles that published templates write; others may fall out of a text without a word."""
MARKERS = ("<image>", "<video>", "<audio>")


class Remarks:
    """Oddities of the rows of a set; each kind is said once, with the first row that has it."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def of_texts(self, *texts: str) -> None:
        for marker in MARKERS:
            if any(marker in text for text in texts):
                where = next(text for text in texts if marker in text)
                self._say(f"{marker} in a row is learned as text: burnish's SFTTrainer trains on text only", where)

    def of_chat(self, chat: list[Any]) -> None:
        """Raises ValueError for a message that says nothing."""
        roles = [message.get("role") for message in chat]
        for message in chat:
            if message.get("content") is None and not any(
                v for k, v in message.items() if k not in ("role", "content")
            ):
                raise ValueError(
                    f"A message's `content` is null, so that there is nothing to learn or to read: {message}. Fill it, "
                    f"or drop the row. The row: {str(chat)[:200]}"
                )
        if "assistant" not in roles:
            self._say("a conversation has no message of the assistant: what others say is learned", chat)
        for role in dict.fromkeys(roles):
            if role not in ROLES:
                self._say(f"the role {role!r} is none that published chat templates know", chat)
        if "system" in roles[1:]:
            self._say("a system message is not the first of its conversation", chat)
        self.of_texts(*(message["content"] for message in chat if isinstance(message.get("content"), str)))

    def _say(self, what: str, where: Any) -> None:
        if what not in self.said:
            self.said.add(what)
            logger.warning(f"In the data set, {what}. The first such row: {str(where)[:200]} Said once.")
