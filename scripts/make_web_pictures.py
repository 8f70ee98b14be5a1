"""Create the screenshots of docs/web with Chromium: runs of the bundled demo, and the pages of the web UI over them.

    python scripts/make_web_pictures.py [FOLDER]

FOLDER is kept with its runs, so that a second call takes the screenshots only. Default: a temporary folder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "web"
DEMO = ROOT / "src" / "burnish" / "demo"
RUNS = {"demo": "5e-4", "demo-low-rate": "5e-5"}
"""Learning rate of each run."""
OPTIONS = (
    "stage=sft", "do_train=true", "finetuning_type=full", "model_name_or_path=model", "dataset_dir=data",
    "dataset=demo_train", "cutoff_len=128", "logging_steps=10", "per_device_train_batch_size=16",
    "lr_scheduler_type=cosine", "warmup_steps=20", "val_size=0.02", "eval_strategy=steps", "eval_steps=60",
    "save_steps=120", "bf16=false", "report_to=none",
)  # fmt: skip


def main() -> None:
    if len(sys.argv) > 1:
        take_pictures(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        take_pictures(Path(folder))


def take_pictures(folder: Path) -> None:
    """Train the runs that ``folder`` lacks, start the server and visit its pages."""
    make_runs(folder)
    environment = {**os.environ, "BURNISH_HOME": str(folder / ".home"), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "burnish", "webui", "web_port=0"]
    with subprocess.Popen(argv, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            visit(server.stdout.readline().split()[1])
        finally:
            server.terminate()


def make_runs(folder: Path) -> None:
    """Copy the model and the data of the demo to ``folder``, and train."""
    for name in ("model", "data"):
        if not (folder / name).exists():
            shutil.copytree(DEMO / name, folder / name)
    for name, rate in RUNS.items():
        if not (folder / "saves" / name / "model.safetensors").exists():
            options = [*OPTIONS, f"learning_rate={rate}", "num_train_epochs=2", f"output_dir=saves/{name}"]
            subprocess.run([sys.executable, "-m", "burnish", "train", *options], cwd=folder, check=True)
    shutil.rmtree(folder / "saves" / "demo-long", ignore_errors=True)


def visit(link: str) -> None:
    """Save a screenshot of each page of the web UI to docs/web."""
    with sync_playwright() as playwright:
        path = next(found for name in ("chromium", "google-chrome") if (found := shutil.which(name)))
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800}, locale="en-US")
        page.set_default_timeout(120_000)
        address = link.partition("/sign-in")[0]
        page.goto(f"{address}/sign-in")
        save(page, "sign-in")
        page.goto(link)
        page.wait_for_url("**/runs")
        fill_form(page, address)
        save(page, "new")
        page.click("#start")
        page.wait_for_url(re.compile(r"/runs/[0-9a-f]{12}$"))
        page.locator(".chart canvas").first.wait_for()
        page.goto(f"{address}/runs")
        page.locator("tr[data-run]").nth(1).wait_for()
        page.wait_for_timeout(20_000)  # for the first points of the curve
        save(page, "runs")
        page.click("#language")
        page.wait_for_timeout(1000)
        save(page, "runs-zh")
        page.click("#language")
        page.goto(f"{address}/runs")
        visit_run(page, address)
        visit_comparison(page, address)
        browser.close()


def fill_form(page: Any, address: str) -> None:
    """Fill in the form of a new run, which lasts longer than the visit."""
    page.goto(f"{address}/new")
    page.wait_for_selector("#box-model_name_or_path")
    page.evaluate("for (const topic of document.querySelectorAll('.topic')) topic.open = true")
    page.select_option("#box-finetuning_type", "full")
    values = {
        "model_name_or_path": "model", "dataset": "demo_train", "dataset_dir": "data", "cutoff_len": "128",
        "per_device_train_batch_size": "16", "learning_rate": "5e-4", "num_train_epochs": "20", "logging_steps": "2",
        "output_dir": "saves/demo-long",
    }  # fmt: skip
    for name, value in values.items():
        page.fill(f"#box-{name}", value)
    page.wait_for_selector("#start:not([disabled])")
    page.evaluate("for (const topic of document.querySelectorAll('.topic')) topic.open = false")
    page.locator("#box-model_name_or_path").scroll_into_view_if_needed()
    page.evaluate("scrollTo(0, 0)")
    page.mouse.click(640, 20)


def visit_run(page: Any, address: str) -> None:
    """Stop the run that was started, and show the finished one in both themes and in the chat."""
    page.get_by_role("link", name="demo-long").first.click()
    page.click("#stop")
    page.locator("#state", has_text=re.compile("stopped|done")).wait_for()
    page.goto(f"{address}/runs")
    page.get_by_role("link", name="demo", exact=True).click()
    page.locator(".chart canvas").first.wait_for()
    page.wait_for_timeout(1500)
    save(page, "run")
    page.click("#theme")
    if page.evaluate("document.documentElement.dataset.theme") != "dark":
        page.click("#theme")
    page.wait_for_timeout(500)
    save(page, "run-dark")
    page.click("#theme")
    page.goto(f"{address}/chat?target={page.url.rpartition('/')[2]}")
    page.locator("#engine-states", has_text="demo ✓").wait_for()
    other = page.locator("select[data-side='1'] option", has_text="demo-low-rate").first
    page.select_option("select[data-side='1']", other.get_attribute("value"))
    page.locator("#engine-states", has_text="demo-low-rate ✓").wait_for()
    page.fill("#temperature", "0", force=True)
    page.fill("#message", "What is the opposite of proud?")
    page.keyboard.press("Control+Enter")
    for side in (0, 1):
        page.locator(f".side[data-side='{side}'] .figures", has_text="tokens/s").wait_for()
    save(page, "chat")


def visit_comparison(page: Any, address: str) -> None:
    """Compare the two finished runs."""
    page.goto(f"{address}/runs")
    page.locator("tr[data-run]").nth(1).wait_for()
    for name in RUNS:
        page.locator("tr[data-run]").filter(has=page.get_by_role("link", name=name, exact=True)).locator(
            "input"
        ).check()
    page.click("#compare")
    page.locator(".chart canvas").first.wait_for()
    page.wait_for_timeout(1000)
    save(page, "compare")


def save(page: Any, name: str) -> None:
    page.screenshot(path=str(PICTURES / f"{name}.png"))


if __name__ == "__main__":
    main()
