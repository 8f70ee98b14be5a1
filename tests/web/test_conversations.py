"""Past conversations: listed by their first question, read, deleted and restored."""

from __future__ import annotations

import json

TURNS = [{"user": "What is\n 2 + 2?", "answers": [{"text": "4"}, None], "again": 0}]


def send(page, method: str, path: str, body: object = None) -> tuple[int, dict]:
    status, _, text = page.send(method, path, body) if body is not None else page.send(method, path)
    return status, json.loads(text)


def test_conversations_are_listed_by_first_question_latest_first(page) -> None:
    for name, turns in (("chat-a", TURNS), ("chat-b", [{**TURNS[0], "user": "Hello"}]), ("chat-c", [])):
        assert send(page, "PUT", f"/api/chats/{name}", {"turns": turns, "targets": []})[0] == 200
    _, result = send(page, "GET", "/api/chats")
    assert [(one["id"], one["title"]) for one in result["chats"]] == [("chat-b", "Hello"), ("chat-a", "What is 2 + 2?")]


def test_conversation_is_deleted_and_restored(page) -> None:
    body = {"turns": TURNS, "targets": []}
    send(page, "PUT", "/api/chats/chat-a", body)
    assert send(page, "DELETE", "/api/chats/chat-a")[0] == 200
    assert send(page, "GET", "/api/chats") == (200, {"chats": []})
    assert send(page, "GET", "/api/chats/chat-a")[0] == 404
    assert send(page, "DELETE", "/api/chats/chat-a")[0] == 404
    send(page, "PUT", "/api/chats/chat-a", body)
    assert send(page, "GET", "/api/chats/chat-a") == (200, body)


def test_file_that_is_not_a_conversation_is_skipped(page) -> None:
    page.site.home.write("chats/torn.json", "{")
    page.site.home.write("chats/odd.json", json.dumps({"turns": "none"}))
    assert send(page, "GET", "/api/chats") == (200, {"chats": []})
