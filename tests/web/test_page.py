"""The web UI without a browser: authentication, responses, reads, and rejected requests."""

from __future__ import annotations

import hashlib
import http.client
import itertools
import json
import os
import random
import re
import subprocess
import sys
import time
import urllib.parse
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import pytest

import burnish
from burnish.config.errors import UserError
from burnish.models.quantization.quantize import LIBRARY_OF
from burnish.report.metadata import launch_record
from burnish.serve.http.errors import APIError
from burnish.serve.page.app import _figure, _short
from burnish.serve.page.command import read_options
from burnish.serve.page.home import Home
from burnish.serve.page.jobs import commands
from burnish.serve.page.layout import BOXES, DEPENDS, PRESETS
from burnish.serve.page.places import Roots
from burnish.serve.page.runs.follow import FilePosition, cursor_text, end_of, new_events, read_cursor
from burnish.serve.page.runs.log_columns import columns_of
from burnish.serve.page.runs.series import downsample
from burnish.serve.page.session import Sessions
from burnish.serve.page.words import language_of, page_words
from web.conftest import KEY
from web.page_thread import start_page

WEB = Path(burnish.__file__).parent / "serve" / "page"
PAGES = ["/runs", "/new", "/compare", "/chat", "/evaluate", "/export", "/settings"]
READS = [
    "/api/runs",
    "/api/models",
    "/api/datasets",
    "/api/engines",
    "/api/chats",
    "/api/poll",
    "/api/machine",
    "/api/trash",
    "/api/jobs",
]
EFFECTS = [
    ("POST", "/api/runs"), ("POST", "/api/check"), ("POST", "/api/yaml"),
    ("POST", "/api/runs/{id}/stop"), ("POST", "/api/runs/{id}/continue"),
    ("DELETE", "/api/queue/1"), ("POST", "/api/engines"), ("DELETE", "/api/engines/x"), ("POST", "/api/chat/x"),
    ("PUT", "/api/chats/x"), ("DELETE", "/api/chats/x"), ("PUT", "/api/datasets/x"), ("POST", "/api/exports"),
    ("POST", "/sign-out"),
    ("POST", "/api/evaluations"), ("PUT", "/api/runs/{id}/label"), ("DELETE", "/api/runs/x"), ("POST", "/api/trash/x"),
    ("DELETE", "/api/trash"), ("PUT", "/api/uploads/x"),
]  # fmt: skip


# --- authentication ---------------------------------------------------------------------------------------------------


def test_errors_of_pages_are_pages_for_browsers_and_json_for_others(page) -> None:
    browser = {"Accept": "text/html,*/*", "Accept-Language": "zh", "Accept-Encoding": ""}
    for path, text in (("/runs/000000000000", "未找到该运行"), ("/no/page", "该网址不存在")):
        status, headers, body = page.send("GET", path, **browser)
        assert (status, headers["content-type"].partition(";")[0]) == (404, "text/html")
        assert [text in body, 'href="../runs"' in body] == [True, True]
        assert json.loads(page.send("GET", path)[2])["error"]["message"]
    status, headers, _ = page.send("GET", "/api/runs/000000000000", **browser)
    assert (status, headers["content-type"]) == (404, "application/json")


def test_missing_cookie_redirects_pages_to_sign_in_and_gives_scripts_401(page) -> None:
    for path in PAGES:
        status, headers, _ = page.send("GET", path, Cookie="")
        assert (status, headers["location"].partition("?")[0]) == (303, "sign-in")
    for path in READS:
        assert page.send("GET", path, Cookie="")[0] == 401
    for method, path in EFFECTS:
        assert page.send(method, path.format(id="x"), {}, Cookie=f"{page.sessions.cookie}=1.2")[0] == 401
    assert page.send("GET", "/healthz", Cookie="")[0] == 200


def test_sign_in_by_script_and_form_sets_a_strict_cookie(page) -> None:
    status, headers, _ = page.send("POST", "/sign-in", {"key": KEY}, Cookie="")
    assert status == 200
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {part.strip() for part in headers["set-cookie"].split(";")}
    value = headers["set-cookie"].partition("=")[2].partition(";")[0]
    assert page.send("GET", "/runs", Cookie=f"{page.sessions.cookie}={value}")[0] == 200
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    status, headers, _ = page.send("POST", "/sign-in", f"key={KEY}&to=new".encode(), Cookie="", **kind)
    assert (status, headers["location"]) == (303, "new")
    for to in ("//evil.example", "https://evil.example", "../x", "javascript:alert(1)"):
        _, headers, _ = page.send("POST", "/sign-in", f"key={KEY}&to={to}".encode(), Cookie="", **kind)
        assert headers["location"] == "runs"
    status, _, text = page.send("POST", "/sign-in", b"key=wrong", Cookie="", **kind)
    assert status == 403
    assert "Invalid key" in text
    text = page.send("POST", "/sign-in", b"key=wrong", Cookie="", **kind, **{"Accept-Language": "zh"})[2]
    assert "密钥错误" in text


def test_sign_in_leads_to_the_page_with_its_query(page) -> None:
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    for path in ("compare?runs=a1b2c3d4e5f6,0123456789ab", "runs/a1b2c3d4e5f6", "runs?q=50%25+of&state=done"):
        _, headers, _ = page.send("GET", f"/{path}", Cookie="")
        up, _, query = headers["location"].partition("sign-in")
        assert up == "../" * path.count("/")
        to = urllib.parse.parse_qs(query.removeprefix("?"))["to"][0]
        assert to == path
        assert f'value="{path.replace("&", "&amp;")}"' in page.send("GET", f"/sign-in{query}", Cookie="")[2]
        body = urllib.parse.urlencode({"key": KEY, "to": to}).encode()
        assert page.send("POST", "/sign-in", body, Cookie="", **kind)[1]["location"] == path
    for to in ("//evil.example?a=b", "https:evil?a", "runs?a=\n\nb", "runs?<script>", "?a=b", "/runs?a=b"):
        body = urllib.parse.urlencode({"key": KEY, "to": to}).encode()
        assert page.send("POST", "/sign-in", body, Cookie="", **kind)[1]["location"] == "runs"


def test_pages_behind_a_prefix_have_relative_links(root, tmp_path) -> None:
    with start_page(root, tmp_path / "home", KEY, web_root_path="/proxy/7860") as page:
        for cookie in ("", f"{page.sessions.cookie}={page.cookie}"):
            for path in ("/", "/proxy/7860", "/proxy/7860/"):
                status, headers, _ = page.send("GET", path, Cookie=cookie)
                place = urllib.parse.urljoin(path, headers["location"])
                assert (status, place) == (303, "/runs" if path == "/" else "/proxy/7860/runs")
        assert page.send("GET", "/proxy/7860/runs")[0] == 200
        assert page.send("GET", "/proxy/7860", Host="evil.example")[0] == 421


def test_servers_of_one_host_have_their_own_sessions(page) -> None:
    other = Sessions("another key of sixteen")
    both = f"{page.sessions.cookie}={page.cookie}; {other.cookie}={other.new_cookie()}"
    assert page.send("GET", "/runs", Cookie=both)[0] == 200
    assert other.cookie != page.sessions.cookie  # browsers send the cookies of a host to each of its ports
    assert Sessions(KEY).cookie == page.sessions.cookie


def test_ten_wrong_keys_a_minute_block_sign_in_and_no_page_shows_the_key(page) -> None:
    statuses = [page.send("POST", "/sign-in", {"key": f"wrong {n}"}, Cookie="")[0] for n in range(12)]
    assert statuses == [403] * 10 + [429] * 2
    for path in [*PAGES, *READS, f"/runs/{page.id_of('first')}"]:
        assert KEY not in page.send("GET", path)[2]


def test_session_ends_with_its_time_and_with_the_key(page) -> None:
    sessions = page.sessions
    assert sessions.is_valid(sessions.new_cookie())
    ends, _, proof = sessions.new_cookie().partition(".")
    assert not sessions.is_valid(f"{int(ends) + 1}.{proof}")
    other = "0" if proof[-1] != "0" else "1"
    assert not sessions.is_valid(f"{ends}.{proof[:-1]}{other}")
    assert not sessions.is_valid("")
    past = str(int(time.time()) - 1)
    assert not sessions.is_valid(f"{past}.{sessions._signature(past)}")
    assert not type(sessions)("another key of sixteen").is_valid(sessions.new_cookie())


@pytest.mark.parametrize("origin", ["", "null", "https://evil.example", "http://localhost:1", "http://127.0.0.1"])
def test_state_changing_requests_require_an_allowed_origin(page, origin) -> None:
    for method, path in [*EFFECTS, ("POST", "/sign-in")]:
        status, _, text = page.send(method, path.format(id=page.id_of("first")), {"key": KEY}, Origin=origin)
        assert (status, json.loads(text)["error"]["code"]) == (403, "origin_not_allowed"), path


def test_cross_site_and_foreign_host_requests_are_rejected(page) -> None:
    assert page.send("POST", "/sign-out", {}, **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert page.send("GET", "/runs", Host="evil.example")[0] == 421
    status, headers, _ = page.send("GET", "/runs", Origin="https://evil.example")
    assert status == 403
    assert not [name for name in headers if name.startswith("access-control")]


def test_every_response_has_the_strict_csp_and_no_inline_script_or_style(page) -> None:
    for path in [*PAGES, f"/runs/{page.id_of('first')}", "/api/runs", "/nowhere", "/sign-in"]:
        _, headers, text = page.send("GET", path)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        if not headers["content-type"].startswith("text/html"):
            continue
        assert "require-trusted-types-for 'script'" in policy
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert headers["referrer-policy"] == ("same-origin" if path == "/sign-in" else "no-referrer")
        result = _Attributes()
        result.feed(text)
        assert not [name for name, _ in result.all if name == "style" or name.startswith("on")], path
        assert not [value for name, value in result.all if name in ("src", "href") and "//" in (value or "")], path
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style", text), path


class _Attributes(HTMLParser):
    """Collects all attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all += attrs


def test_no_module_creates_html_or_code_from_text_or_fetches_other_origins() -> None:
    for file in (WEB / "static").glob("*.js"):
        text = file.read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setTimeout\(['\"]", text
        )
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), file
        assert len(text.splitlines()) < 250, file
        assert text.startswith("// @ts-check\n"), file


def test_get_requests_change_nothing(page, root) -> None:
    def state() -> list[tuple[str, int]]:
        return sorted((str(path), path.stat().st_mtime_ns) for path in root.rglob("*") if path.is_file())

    before = state()
    for path in [*PAGES, *READS, f"/runs/{page.id_of('first')}", f"/api/runs/{page.id_of('first')}/series"]:
        assert page.send("GET", path)[0] == 200
    assert state() == before
    for _, path in EFFECTS:
        assert page.send("GET", path.format(id="x"))[0] in {200, 404, 405}
    assert state() == before


# --- reads ------------------------------------------------------------------------------------------------------------


def test_runs_of_all_libraries_are_listed_with_their_states(page) -> None:
    runs = {run["name"]: run for run in page.get("/api/runs")["runs"]}
    assert {name: (run["maker"], run["state"]) for name, run in runs.items()} == {
        "first": ("burnish", "done"), "factory": ("LLaMA-Factory", "done"), "trl": ("transformers", "running"),
        "<img src=x onerror=alert(1)>": ("burnish", "failed"),
    }  # fmt: skip
    _, _, text = page.send("GET", "/runs")
    assert "<img src=x" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert text.count("<polyline") >= 2


def test_run_is_readable_without_javascript(page) -> None:
    _, _, text = page.send("GET", f"/runs/{page.id_of('first')}")
    assert "Loss 3 to 0.075 over 40 steps, lowest 0.075 at step 40." in text
    assert "<noscript><svg" in text
    assert 'lang="en"' in text


def test_page_is_chinese_for_chinese_browsers(page) -> None:
    _, _, text = page.send("GET", "/runs", **{"Accept-Language": "zh-CN,zh;q=0.9,en;q=0.5"})
    assert 'lang="zh"' in text
    assert "训练列表" in text
    assert language_of("en", "zh") == "en"
    assert language_of("xx", "fr,zh") == "zh"


def test_both_languages_have_the_same_keys_and_placeholders() -> None:
    english, chinese = page_words("en"), page_words("zh")
    from_server = ("error_", "term_")  # already English
    assert english.keys() == {key for key in chinese if not key.startswith(from_server) or key in english}
    for key, text in english.items():
        assert sorted(re.findall(r"\{\w+\}", text)) == sorted(re.findall(r"\{\w+\}", chinese[key])), key


def test_every_used_translation_exists_and_pages_contain_no_text() -> None:
    english, used = page_words("en"), set()
    for file in [*(WEB / "static").glob("*.js"), *(WEB / "pages").glob("*.html")]:
        text = file.read_text(encoding="utf-8")
        used |= set(re.findall(r"\bt\(['\"](\w+)['\"]", text))
        if file.suffix == ".html":
            text = re.sub(r"<style>.*?</style>", "", text, flags=re.DOTALL)
            bare = re.sub(r"\{[{%#].*?[%}#]\}|<[^>]*>", "", text, flags=re.DOTALL)
            left = set(re.findall(r"[A-Za-z]{3,}", bare)) - {
                "burnish",
                "run",
                "yaml",
                "CSV",
                "ids",
                "temperature",
                "seed",
            }
            assert not left - {"top"}, (file.name, left)
    used = {word for word in used if not word.endswith("_")}  # prefixes of composed keys
    assert used <= english.keys(), used - english.keys()


def test_scripts_use_no_translation_that_only_templates_have() -> None:
    scripts = "".join(file.read_text(encoding="utf-8") for file in (WEB / "static").glob("*.js"))
    only_templates = json.loads((WEB / "words" / "page.en.json").read_text(encoding="utf-8"))
    assert only_templates.keys() & set(re.findall(r"""["'`](\w+)["'`]""", scripts)) == set()


def test_series_keeps_every_spike_and_marks_non_numeric_values(page, root) -> None:
    result = page.get(f"/api/runs/{page.id_of('first')}/series?points=16")
    columns = result["columns"]
    assert max(value for value in columns["loss"] if value is not None) == pytest.approx(3 / 20 + 5)
    assert 0.5 in columns["eval_loss"]
    assert result["rows"] == 41
    trl = page.get(f"/api/runs/{page.id_of('trl')}/series")["columns"]
    assert trl["loss"][2] == "NaN"
    assert trl["grad_norm"] == [0.3] * 5


def test_objective_metrics_are_columns_under_their_names() -> None:
    margins = {"current_steps": 1, "loss": 0.6, "total_steps": 9, "rewards/margins": 0.25, "rewards/accuracies": 1.0}
    rows = [margins | {"accuracy": 1.0}, {"current_steps": 1, "eval_loss": 0.5, "eval_kl": 0.1, "eval_runtime": 3.0}]
    columns = columns_of([*rows, {"current_steps": 2, "loss": 1.0, "<b>": 1, "what": "text"}])
    assert columns["rewards/margins"] == [0.25, None, None]
    assert columns["eval_kl"] == [None, 0.1, None]
    assert set(columns) == {"step", "loss", "eval_loss", "rewards/margins", "rewards/accuracies", "eval_kl"}
    of_llama_factory = columns_of([{"current_steps": 1, "loss": 0.6, "accuracy": 0.75}])
    assert of_llama_factory["rewards/accuracies"] == [0.75]


def test_thinning_keeps_minimum_and_maximum_of_every_interval() -> None:
    draw = random.Random(3)
    rows = [{"current_steps": step, "loss": draw.random()} for step in range(5000)]
    rows[1234]["loss"], rows[4321]["loss"] = 99.0, -99.0
    rows[77]["loss"] = float("inf")
    columns = columns_of(rows)
    few = downsample(columns, 200)
    assert len(few["step"]) <= 450
    assert {1234, 4321, 77, 0, 4999} <= set(few["step"])
    assert few["loss"][few["step"].index(77)] == "Infinity"


def test_reconnecting_reader_receives_every_row_once(tmp_path) -> None:
    draw, folder = random.Random(11), tmp_path / "run"
    folder.mkdir()
    (folder / "launch.json").write_text(json.dumps(launch_record([])))
    path, recorded, written = folder / "trainer_log.jsonl", [], 0
    cursor, pending = "", b""
    with path.open("ab", buffering=0) as file:
        for _ in range(1000):
            for _ in range(draw.randrange(3)):
                written += 1
                pending += json.dumps({"current_steps": written, "loss": 1.0}).encode() + b"\n"
            cut = draw.randrange(len(pending) + 1)  # split anywhere
            file.write(pending[:cut])
            pending = pending[cut:]
            if draw.random() < 0.5:
                position = read_cursor(cursor).get("a" * 12, FilePosition())
                for name, data, next_position in new_events("a" * 12, folder, position, log=False):
                    position = next_position
                    if name == "rows":
                        recorded += data["columns"]["step"]
                cursor = cursor_text({"a" * 12: position})
        file.write(pending)
    for name, data, _ in new_events("a" * 12, folder, read_cursor(cursor)["a" * 12], log=False):
        if name == "rows":
            recorded += data["columns"]["step"]
    assert recorded == list(range(1, written + 1))


def test_truncated_log_is_fetched_again(tmp_path) -> None:
    (tmp_path / "trainer_log.jsonl").write_text('{"current_steps": 1, "loss": 1}\n')
    names = [name for name, _, _ in new_events("b" * 12, tmp_path, FilePosition(rows=1000), log=False)]
    assert names[0] == "resync"


@pytest.mark.parametrize("name", ["run.log", "console.log"], ids=["started in a terminal", "started by the page"])
def test_log_of_a_run_is_followed_from_its_current_end(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("step 1\n")
    position = end_of(tmp_path, None)
    (tmp_path / name).write_text("step 1\nstep 2\n")
    assert [data["text"] for _, data, _ in new_events("b" * 12, tmp_path, position, log=True)] == ["step 2\n"]


def test_log_of_a_run_that_was_started_over_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("step 1\nstep 2\n")
    position = end_of(tmp_path, None)
    (tmp_path / "run.log").write_text("step 1\n")
    assert [name for name, _, _ in new_events("b" * 12, tmp_path, position, log=True)] == ["resync"]
    assert [name for name, _, _ in new_events("b" * 12, tmp_path, position, log=False)] == []


def test_cursor_keeps_the_positions_of_a_hundred_long_runs() -> None:
    positions = {f"{number:012x}": FilePosition(10**14, 10**9, 10**14, "0123abcd") for number in range(100)}
    assert read_cursor(cursor_text(positions)) == positions
    assert read_cursor(cursor_text(positions) + ",x" * 10_000) == positions


def test_new_rows_arrive_as_events_and_continue_from_the_cursor(page, root) -> None:
    run = page.id_of("first")
    first = page.get(f"/api/poll?runs={run}&log=1")
    assert [m["event"] for m in first["messages"]] == ["rows", "event", "run", "log"]
    again = page.get(f"/api/poll?runs={run}&log=1&after={first['cursor']}")
    assert again["messages"] == []
    with (root / "saves/first/trainer_log.jsonl").open("a") as file:
        file.write('{"current_steps": 41, "total_steps": 41, "loss": 0.01}\n')
    third = page.get(f"/api/poll?runs={run}&after={again['cursor']}")
    assert third["messages"][0]["data"]["columns"]["step"] == [41]
    assert page.get("/api/poll?runs=nobody&after=%00%ff,x:y")["messages"] == []


def test_list_of_runs_is_updated_with_the_loss_curve(page, root) -> None:
    run = page.id_of("first")
    first = page.get("/api/poll?list=1")
    with (root / "saves/first/trainer_log.jsonl").open("a") as file:
        file.write('{"current_steps": 41, "total_steps": 41, "loss": 9.0}\n')

    curves: list[str] = []
    while not curves:  # the list is refreshed after some time
        found = page.get(f"/api/poll?list=1&after={first['cursor']}")["messages"]
        curves = [one["data"]["curve"] for one in found if one["data"].get("id") == run]
        time.sleep(0.1)
    points = [tuple(map(float, point.split(","))) for point in curves[0].split()]
    assert points[-1] == (120.0, 2.0)  # the largest loss is the last one


def test_stream_says_once_that_a_run_is_gone(page, root) -> None:
    run = page.id_of("first")
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
    connection.request("GET", f"/api/stream?runs={run}", headers={"Cookie": f"{page.sessions.cookie}={page.cookie}"})
    response = connection.getresponse()
    while b"event: run" not in response.readline():
        pass
    (root / "saves/first").rename(root / "saves/other")
    while b"event: gone" not in response.readline():
        pass
    time.sleep(0.6)  # the server looks four times a second
    (root / "saves/other").rename(root / "saves/first")  # ends the reading below
    with (root / "saves/first/trainer_log.jsonl").open("a") as file:
        file.write('{"current_steps": 41, "total_steps": 41, "loss": 9.0}\n')
    lines: list[bytes] = []
    while b"event: rows\n" not in lines:
        lines.append(response.readline())
    connection.close()
    assert b"event: gone\n" not in lines


def test_log_is_text_and_only_listed_files_are_served(page, root) -> None:
    run, odd = page.id_of("first"), 'generated_predictions_中文 "1".jsonl'
    (root / "saves/first" / odd).write_text("{}\n")
    assert "onerror" in page.get(f"/api/runs/{run}/log")["text"]
    names = [file["name"] for file in page.get(f"/api/runs/{run}")["files"]]
    assert "training_loss.png" in names
    assert "model.safetensors" not in names
    status, headers, _ = page.send("GET", f"/api/runs/{run}/download/training_loss.png")
    assert (status, headers["content-disposition"]) == (200, "attachment; filename*=UTF-8''training_loss.png")
    status, headers, body = page.send("GET", f"/api/runs/{run}/download/{quote(odd)}")
    assert (status, headers["content-disposition"]) == (200, f"attachment; filename*=UTF-8''{quote(odd)}")
    assert body == "{}\n"
    for name in ("model.safetensors", "..%2frun.yaml", "%2e%2e", "/etc/passwd", ".lock"):
        assert page.send("GET", f"/api/runs/{run}/download/{name}")[0] == 404


def test_log_is_read_back_to_its_beginning_in_whole_lines(page, root) -> None:
    run, whole = page.id_of("first"), "".join(f"line {n} {'é' * (n % 90)}\n" for n in range(9000)) + "unfinished"
    (root / "saves/first/console.log").write_text(whole)
    parts = [page.get(f"/api/runs/{run}/log")]
    while parts[0]["from"]:
        assert parts[0]["text"].startswith("line ")
        parts.insert(0, page.get(f"/api/runs/{run}/log?before={parts[0]['from']}"))
    assert len(parts) > 3
    assert all(before["to"] == after["from"] for before, after in itertools.pairwise(parts))
    assert "".join(part["text"] for part in parts) == whole


def test_log_is_searched_backwards(page, root) -> None:
    run, log = page.id_of("first"), root / "saves/first/console.log"
    log.write_text(
        "".join(f"{'Warning' if n % 1000 == 1 else 'line'} {n} {'é' * 90}\n" for n in range(30_000)) + "warn"
    )
    lines, end = [], None
    while end != 0:
        part = page.get(f"/api/runs/{run}/log?find=wARn" + (f"&before={end}" if end else ""))
        lines, end = [*part["text"].splitlines(), *lines], part["from"]
    assert [line.split()[1:2] for line in lines] == [*([str(n)] for n in range(1, 30_000, 1000)), []]
    assert page.get(f"/api/runs/{run}/log?find=missing&before=9999") == {"from": 0, "to": 9999, "text": ""}


def test_search_of_a_log_finds_no_secret(page, root) -> None:
    run, secret = page.id_of("first"), "hf_" + "aB3" * 12
    (root / "saves/first/console.log").write_text(f"before\ntoken {secret}\n")
    assert page.get(f"/api/runs/{run}/log?find=token")["text"].startswith("token ")
    assert page.get(f"/api/runs/{run}/log?find={secret[:9]}")["text"] == ""


# --- rejected requests ------------------------------------------------------------------------------------------------

HOSTILE = [
    "; touch PWNED", "$(touch PWNED)", "`touch PWNED`", "a\nb: c", "--help", "@/etc/passwd",
    "!!python/object/apply:os.system",
    "&a [*a,*a]", "\u202egnp.exe", "x" * 200_000, "{{7*7}}", "<img src=x onerror=alert(1)>", "'; DROP TABLE runs; --",
]  # fmt: skip


@pytest.mark.parametrize("place", ["/etc", "../outside", "a/../../outside", "link", "a\0b", "x" * 300, "~root"])
def test_path_outside_the_roots_is_rejected_with_one_message(page, root, place) -> None:
    (root / "link").symlink_to("/etc")
    for name in ("output_dir", "dataset_dir", "model_name_or_path"):
        values = {"model_name_or_path": "m", "dataset": "d", "output_dir": "saves/x", name: place}
        status, _, text = page.send("POST", "/api/runs", {"values": values})
        error = json.loads(text)["error"]
        assert (status, error["option"]) == (422, name)
        assert error["code"] in {"outside", "invalid_value"}
    assert not (root.parent / "outside").exists()


def test_hostile_texts_are_only_values(page, root, monkeypatch) -> None:
    started = []
    monkeypatch.setattr(
        "burnish.serve.page.jobs.starting.start_burnish", lambda argv, *rest: started.append(argv) or _Ended()
    )
    for number, text in enumerate(HOSTILE):
        values = {
            "model_name_or_path": "m",
            "dataset": "d",
            "output_dir": f"saves/h{number}",
            "run_name": text,
            text[:99]: text,
        }
        status, _, body = page.send("POST", "/api/runs", {"values": values})
        assert status in {201, 422}, body
    assert not list(root.rglob("PWNED"))
    assert started
    for argv in started:
        assert argv[0] == "train"
        assert Path(argv[1]).name == "run.yaml"
        assert len(argv) == 2


class _Ended:
    pid = 2**22 + 5

    def poll(self) -> int:
        return 0


def test_proposed_output_folder_is_empty(page, root) -> None:
    assert page.get("/api/free?folder=saves/first") == {"folder": "saves/first-2"}
    assert page.get("/api/free?folder=saves/fresh") == {"folder": "saves/fresh"}
    assert page.send("GET", "/api/free?folder=/etc")[0] == 422


def test_folder_with_a_run_is_not_overwritten_without_confirmation(page, root, monkeypatch) -> None:
    monkeypatch.setattr("burnish.serve.page.jobs.starting.start_burnish", lambda *_: _Ended())
    values = {"model_name_or_path": "m", "dataset": "d", "output_dir": "saves/first"}
    status, _, text = page.send("POST", "/api/runs", {"values": values})
    assert (status, json.loads(text)["error"]["code"]) == (409, "folder_not_empty")
    status, _, text = page.send("POST", "/api/runs", {"values": values, "folder": "another"})
    assert status == 201
    assert (root / "saves/first-2/run.yaml").is_file()
    (root / "saves/first/launch.json").write_text(json.dumps(launch_record([])))
    status, _, text = page.send("POST", "/api/runs", {"values": values, "folder": "overwrite"})
    assert (status, json.loads(text)["error"]["code"]) == (409, "folder_in_use")


@pytest.mark.run
def test_signal_is_sent_only_to_the_verified_process_of_the_run(page, root) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    run = root / "saves/first/launch.json"
    options = {**launch_record([], child.pid), "time": time.time()}
    (root / "saves/first/outcome.json").unlink()
    identity = page.id_of("first")
    for wrong in ({"start_ticks": options["start_ticks"] + 1}, {"boot_id": "x"}, {"pid": 1}, {"pid": -1}):
        run.write_text(json.dumps({**options, **wrong}))
        status, _, _ = page.send("POST", f"/api/runs/{identity}/stop", {"how": "now"})
        assert status == 409
        assert child.poll() is None
    run.write_text(json.dumps(options))
    assert page.send("POST", f"/api/runs/{identity}/stop", {"how": "save"})[0] == 202
    assert child.wait(10) == -15


def test_queue_survives_the_page_and_continues(root, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("burnish.serve.page.jobs.starting.start_burnish", lambda *_: _Ended())
    (root / "saves/first/launch.json").write_text(json.dumps({**launch_record([]), "time": 1.9e9}))
    values = {"model_name_or_path": "m", "dataset": "d", "output_dir": "saves/next"}
    with start_page(root, tmp_path / "home", KEY) as page:
        status, _, text = page.send("POST", "/api/runs", {"values": values, "when": "queue"})
        number = json.loads(text)["queued"]
        assert status == 202
    with start_page(root, tmp_path / "home", KEY) as page:
        assert [one["number"] for one in page.get("/api/runs")["queue"]] == [number]
        assert "Queued, position 1: saves/next" in page.send("GET", "/runs")[2]
        starter = page.site.starter
        import asyncio

        from burnish.serve.page.runs.runs import find

        assert page.run(starter.next_of_queue(find([root]))) is None  # the other one still runs
        (root / "saves/first/launch.json").write_text(json.dumps({**launch_record([]), "start_ticks": 1}))
        (root / "trl/trainer_state.json").unlink()
        assert page.run(starter.next_of_queue(find([root]))) == root / "saves/next"
        assert starter.queued_jobs() == []
        assert asyncio.run(page.site.find_runs(0.0))


def test_queued_runs_have_different_folders_and_numbers(page, root) -> None:
    (root / "saves/first/outcome.json").unlink()
    (root / "saves/first/launch.json").write_text(json.dumps({**launch_record([]), "time": 1.9e9}))
    values = {"model_name_or_path": "m", "dataset": "d", "output_dir": "saves/next"}
    numbers = []
    for folder in ("new", "another", "another"):
        status, _, text = page.send("POST", "/api/runs", {"values": values, "when": "queue", "folder": folder})
        assert status == 202
        numbers.append(json.loads(text)["queued"])
    folders = [one["values"]["output_dir"] for one in page.get("/api/runs")["queue"]]
    assert folders == ["saves/next", "saves/next-2", "saves/next-3"]
    assert page.get("/api/free?folder=saves/next")["folder"] == "saves/next-4"
    status, _, text = page.send("POST", "/api/runs", {"values": values, "when": "queue"})
    assert (status, json.loads(text)["error"]["code"]) == (409, "folder_queued")
    for number in numbers:
        assert page.send("DELETE", f"/api/queue/{number}", {})[0] == 200
    _, _, text = page.send("POST", "/api/runs", {"values": values, "when": "queue"})
    assert json.loads(text)["queued"] not in numbers  # a page that shows the removed runs cannot remove this one


@pytest.mark.sample(3)
@pytest.mark.parametrize("queue", [[{"number": "x"}], [{"number": 1, "values": 3}], [{}], [7], {"a": 1}])
def test_damaged_queue_does_not_stop_the_page(page, monkeypatch, queue) -> None:
    import asyncio

    rest = asyncio.sleep
    monkeypatch.setattr("burnish.serve.page.site.asyncio.sleep", lambda seconds: rest(seconds / 100))
    page.site.home.write("queue.json", json.dumps(queue))
    with pytest.raises(TimeoutError):
        page.run(asyncio.wait_for(page.site.look_after(), 0.5))
    assert page.send("GET", "/api/runs")[0] == 200
    assert page.send("GET", "/runs")[0] == 200


def test_yaml_text_is_parsed_like_a_file_with_line_numbers(page) -> None:
    status, _, text = page.send(
        "POST", "/api/yaml", {"text": "lora_rank: 8 # so\ndataset: [a, b]\nlearning_rate: 1e-4\n"}
    )
    assert (status, json.loads(text)["values"]) == (
        200,
        {"lora_rank": "8", "dataset": ["a", "b"], "learning_rate": "1e-4"},
    )
    for wrong, message in (
        ("a: 1\nb: [1\n", "run.yaml"), ("a: 1\na: 2\n", "line 2"), ("a: &x [*x]\n", "run.yaml, line 1"),
        ("", "run.yaml"),
        ("!!python/object/apply:os.system ['touch PWNED']", "run.yaml"),
    ):  # fmt: skip
        _, _, text = page.send("POST", "/api/yaml", {"text": wrong})
        problems = json.loads(text)["problems"]
        assert message in problems[0]
        assert str(page.site.home.folder) not in problems[0]
    assert page.send("POST", "/api/yaml", {"text": 3})[0] == 422


@pytest.mark.run
def test_presets_are_yaml_files_of_the_page(page) -> None:
    text = "finetuning_type: lora\nlora_rank: 16\n"
    assert page.send("PUT", "/api/presets/mine", {"text": text})[0] == 200
    assert page.get("/api/form")["own_presets"] == {"mine": {"finetuning_type": "lora", "lora_rank": "16"}}
    assert (page.site.home.folder / "presets/mine.yaml").read_text() == text
    for name, body, status in (
        ("..%2Fkey", {"text": text}, 404), ("a b", {"text": text}, 404), ("mine", {"text": "a: [1"}, 422),
        ("mine", {}, 422), ("mine", {"text": "!!python/name:os.system"}, 422),
    ):  # fmt: skip
        assert page.send("PUT", f"/api/presets/{name.replace(' ', '%20')}", body)[0] == status, (name, body)
    assert page.send("DELETE", "/api/presets/mine", {})[0] == 200
    assert page.send("DELETE", "/api/presets/mine", {})[0] == 404
    assert page.get("/api/form")["own_presets"] == {}


def test_export_accepts_only_known_formats(page, root, monkeypatch) -> None:
    started = []
    child = type("Child", (), {"pid": 1, "poll": lambda self: 0})
    monkeypatch.setattr(page.site.starter, "start_command", lambda argv, log: started.append(argv) or child())
    (root / "saves" / "whole").mkdir()
    options = {"path": str(root / "saves" / "whole"), "folder": str(root / "gguf")}
    status, _, text = page.send("POST", "/api/exports", {**options, "format": "gguf q8_0"})
    assert status == 202, text
    assert {"export_format=gguf", "export_gguf_type=q8_0"} < set(started[0])
    job = f"/api/jobs/{json.loads(text)['id']}"
    assert page.get(job)["state"] == "done"
    assert "burnish chat gguf" in page.get(job)["lines"]
    (root / "gguf").mkdir()
    (root / "gguf" / "value_head.safetensors").touch()
    lines = ["burnish score gguf dataset=FILE", "burnish api gguf"]  # a reward model has no responses
    assert page.get(job)["lines"] == lines
    assert page.send("POST", "/api/exports", {**options, "format": "pickle"})[0] == 422


@pytest.mark.parametrize("libraries", [{"gptqmodel"}, {"gptqmodel", "optimum"}, {"optimum"}])
def test_quantized_exports_are_offered_where_their_libraries_are_installed(page, root, monkeypatch, libraries) -> None:
    started = []
    child = type("Child", (), {"pid": 1, "poll": lambda self: 0})
    monkeypatch.setattr(page.site.starter, "start_command", lambda argv, log: started.append(argv) or child())
    monkeypatch.setattr(commands, "find_spec", lambda name: (name in libraries) or None)
    is_installed = "gptqmodel" in libraries
    (root / "saves" / "whole").mkdir()
    options = {"path": str(root / "saves" / "whole"), "folder": str(root / "small"), "format": "awq 4 bits"}
    text = page.send("GET", "/export")[2]
    assert ("awq 4 bits" in text, "gptq 4 bits" in text) == (is_installed, len(libraries) == 2)
    status, _, text = page.send("POST", "/api/exports", options)
    assert (status, json.loads(text)["error"]["option"]) == (422, "dataset" if is_installed else "format")
    status, _, text = page.send("POST", "/api/exports", {**options, "dataset": "notes", "dataset_dir": "data"})
    assert status == (202 if is_installed else 422), text
    used = ["export_quantization_method=awq", "export_quantization_bit=4", "export_quantization_dataset=notes",
            "dataset_dir=data"]  # fmt: skip
    assert not started or started[0][3:] == used
    assert all(LIBRARY_OF[method] == needed for method, needed in commands._LIBRARIES.items())
    outside = {**options, "dataset": "notes", "dataset_dir": "/etc"}
    assert page.send("POST", "/api/exports", outside)[0] == 422


@pytest.mark.run
def test_invalid_bodies_are_never_server_errors(page) -> None:
    draw = random.Random(23)
    odd = [None, 1, -1, "x", "", [], {}, {"a": 1}, ["x"], True, 1e300, "\u0000", "../..", {"output_dir": 3}, [1, "a"]]
    names = [
        "values",
        "folder",
        "when",
        "devices",
        "how",
        "run",
        "checkpoint",
        "path",
        "key",
        "seed",
        "messages",
        "targets",
    ]
    run = page.id_of("first")
    for _ in range(400):
        method, path = draw.choice(EFFECTS)
        if path in ("/api/check", "/sign-out"):
            continue
        body = {draw.choice(names): draw.choice(odd) for _ in range(draw.randrange(4))}
        status, _, text = page.send(method, path.format(id=run), body)
        assert status < 500, (path, body, text)


@pytest.mark.parametrize("odd", ["abc", "-1", "1e3", "9" * 40, "²"])
def test_invalid_number_in_a_url_is_rejected(page, odd: str) -> None:
    run = page.id_of("first")
    for path, name in ((f"/api/runs/{run}/series", "points"), (f"/api/runs/{run}/log", "before")):
        status, _, text = page.send("GET", f"{path}?{name}={urllib.parse.quote(odd)}")
        assert (status, json.loads(text)["error"]["message"]) == (422, f'"{name}" must be a non-negative integer.'), (
            path
        )
    values = {"model_name_or_path": "m", "output_dir": "o"}
    assert page.send("POST", "/api/check", {"values": values, "seed": odd})[0] == 422


# --- other ------------------------------------------------------------------------------------------------------------


def test_layout_names_existing_options() -> None:
    from burnish.config.options import specs
    from burnish.run.plan.plan import RunOptions
    from burnish.serve.page.planner_process import form

    known = set(specs(RunOptions))
    fields = form()["fields"]
    assert [field["name"] for field in fields] == list(specs(RunOptions))
    assert {name for names in BOXES.values() for name in names} <= known
    assert set(DEPENDS) | {on for on, _ in DEPENDS.values()} <= known
    assert {name for preset in PRESETS.values() for name in preset} <= known
    controls = {field["name"]: field["control"] for field in fields}
    assert (controls["bf16"], controls["learning_rate"], controls["dataset"], controls["finetuning_type"]) == (
        "switch", "number", "list", "choice",
    )  # fmt: skip


def test_bundled_files_match_their_hashes() -> None:
    bundled = WEB / "bundled"
    message = dict(
        reversed(line.split()) for line in (bundled / "README.md").read_text().splitlines() if line.startswith("    ")
    )
    assert set(message) == {"uPlot.iife.min.js", "uPlot.min.css", "inter-latin.woff2"}
    for name, digest in message.items():
        assert hashlib.sha256((bundled / name).read_bytes()).hexdigest() == digest
    assert "MIT" in (bundled / "uPlot.LICENSE").read_text()
    assert "SIL Open Font License" in (bundled / "inter.LICENSE").read_text()


def test_page_folder_is_private_and_used_by_one_page(tmp_path) -> None:
    home = Home(str(tmp_path / "state"))
    assert oct(home.folder.stat().st_mode & 0o777) == "0o700"
    key = home.key()
    assert Home(str(tmp_path / "state")).key() == key
    assert oct((home.folder / "key").stat().st_mode & 0o777) == "0o600"
    home.hold("http://127.0.0.1:7860")
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:7860"):
        Home(str(tmp_path / "state")).hold("http://127.0.0.1:7861")


def test_invalid_page_options_are_rejected(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GRADIO_SERVER_PORT", "7999")
    assert read_options(["--page", "chat"])[0].web_port == 7999
    pages = ["chat", "evaluate", "settings"]
    assert [read_options(["--page", page])[1] for page in pages] == pages
    for argv, message in (
        (["web_key=0123456789abcdef"], "process list"), (["web_prot=1"], "web_port"),
        (["web_roots=[/no/where]"], "must contain existing folders"),
        (["web_no_key=true", "web_host=0.0.0.0"], "start processes"), (["--page", "admin"], "Unknown page"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            read_options(argv)
    monkeypatch.setenv("GRADIO_SHARE", "true")
    with pytest.raises(UserError, match="tunnel"):
        read_options([])


def test_paths_are_checked_after_resolving_links(tmp_path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "out").symlink_to(tmp_path)
    roots = Roots([str(tmp_path / "in")])
    assert roots.within("a/b", "x") == tmp_path / "in" / "a" / "b"
    with pytest.raises(APIError):
        roots.within("out/secret", "x")


@pytest.mark.run
def test_page_starts_without_model_libraries_and_stops_on_a_signal(tmp_path) -> None:
    script = (
        "import sys, threading, os, signal\n"
        "def look():\n    sys.stdin.readline()\n"
        "    heavy = {'torch', 'transformers', 'huggingface_hub', 'pydantic'}\n"
        "    print('LOADED', *(heavy & set(sys.modules)), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "threading.Thread(target=look, daemon=True).start()\n"
        "from burnish.cli import main\nsys.exit(main(['webui', 'web_port=0']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(WEB.parents[1]), "BURNISH_HOME": str(tmp_path / "home")}
    pipe = subprocess.PIPE
    run = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    assert run.stdout is not None
    line = re.search(r"page     http://127\.0\.0\.1:(\d+)/sign-in#key=\S{40,}", run.stdout.readline())
    assert line
    connection = http.client.HTTPConnection("127.0.0.1", int(line[1]), timeout=30)
    connection.request("GET", "/sign-in")
    assert connection.getresponse().status == 200  # it is served, so signals are handled
    rest, problems = run.communicate("\n", timeout=60)
    assert "LOADED\n" in rest
    assert run.returncode == 143, problems


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"), (30.0, "30"), (500, "500"), (123456, "123,456"), (2027.4, "2,027"), (123456.7, "123.5K"),
        (1.23456, "1.235"), (0.00005, "5e-5"), (5.354e-9, "5.35e-9"), (-0.5, "-0.5"), (1e18, "1e18"),
        (float("nan"), "nan"),
    ],
)  # fmt: skip
def test_integers_are_shown_in_full_and_other_numbers_with_four_digits(value, shown) -> None:
    assert _short(value) == shown
    assert f">{shown}</span>" in _figure(value)
    assert value is None or f'title="{value}"' in _figure(value)
