"""The page of a run: names of its metrics and events, and what appears on it while the run goes on."""

from __future__ import annotations

import json
import shutil

import pytest

from browser.conftest import wait_for
from web.conftest import make_runs

pytestmark = [pytest.mark.run, pytest.mark.slow]


@pytest.fixture
def first(visitor, server):
    """The folder of a finished run, whose page is open."""
    shutil.rmtree(server.root / "saves")
    make_runs(server.root)
    visitor.goto(f"{server.address}/runs")
    visitor.get_by_role("link", name="first", exact=True).click()
    visitor.locator(".chart canvas").first.wait_for()
    return server.root / "saves" / "first"


def add_row(folder, **values) -> None:
    with (folder / "trainer_log.jsonl").open("a") as file:
        file.write(json.dumps({"current_steps": 41, "total_steps": 41, "loss": 0.5, **values}) + "\n")


def test_metrics_of_rollouts_have_names_in_both_languages(visitor, server, first) -> None:
    values = {"reward": 0.5, "eval_reward": 0.4, "clip_ratio/low_mean": 0.1, "eval_pass@1": 0.2, "time/train": 1.0}
    add_row(first, **values)
    visitor.reload()
    visitor.get_by_role("heading", name="Fraction of clipped tokens").wait_for()
    assert "Reward (evaluation)" in visitor.inner_text("#charts")
    assert "pass@1 (evaluation)" in visitor.inner_text("#charts")
    visitor.click("#language")
    visitor.get_by_role("heading", name="被裁剪的 token 占比").wait_for()
    visitor.click("#tab-events")
    visitor.locator("#panel-events", has_text="开始训练").wait_for()


def test_completions_appear_while_the_page_is_open(visitor, server, first) -> None:
    assert visitor.is_hidden("#tab-completions")
    row = {
        "step": 41,
        "record": "data, record 1",
        "sample": 0,
        "prompt": "p",
        "completion": "c",
        "rewards": {"exact": 1},
    }
    (first / "completions.jsonl").write_text(json.dumps(row) + "\n")
    add_row(first, **{"reward": 0.5, "completions/mean_length": 3.0})
    visitor.locator("#tab-completions").wait_for(state="visible")
    visitor.click("#tab-completions")
    visitor.locator("#panel-completions .tag", has_text="exact").wait_for()


def test_reward_model_is_not_offered_for_chat(visitor, server, first) -> None:
    assert visitor.is_visible("#to-chat")
    run = visitor.url.rpartition("/")[2]
    with (first / "run.yaml").open("a") as file:
        file.write('stage: "rm"\n')
    visitor.reload()
    visitor.locator("#to-chat").wait_for(state="hidden")
    visitor.goto(f"{server.address}/chat?target={run}")
    wait_for(lambda: visitor.locator("select[data-side='0'] option").count() > 1)
    assert visitor.locator("select[data-side='0'] option", has_text="first").count() == 0
