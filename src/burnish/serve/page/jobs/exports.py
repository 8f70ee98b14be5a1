"""Exports from the web UI: each runs ``burnish export`` in its own process, and its log is shown while it runs.

In: a folder with a model or an adapter, an output folder, a format. Out: the state of the process, and when it has
finished, commands that serve the exported model.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish.serve.http.errors import APIError
from burnish.serve.page.site import Site

FORMATS: Mapping[str, tuple[str, ...]] = {
    "safetensors": (),
    **{f"gguf {kind}": ("export_format=gguf", f"export_gguf_type={kind}") for kind in ("f16", "bf16", "q8_0", "q4_0")},
}
"""Format, as the form names it -> words of the command."""
_TEXT = 8000


class Exports:
    def __init__(self, site: Site) -> None:
        self.site = site
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def begin(self, path: Path, folder: Path, form: str) -> str:
        """Start one. Returns its name.

        Raises:
            APIError: 409 if the folder is not empty, 422 for an unknown format.
        """
        if form not in FORMATS:
            raise APIError(422, "invalid_value", f'"format" must be one of {", ".join(FORMATS)}.', param="format")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise APIError(409, "folder_not_empty", "The folder is not empty.", param="folder")
        adapter = path / "adapter_config.json"
        words = ["export", f"export_dir={folder}", *FORMATS[form]]
        if adapter.is_file():
            base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
            words += [f"adapter_name_or_path={path}", f"model_name_or_path={base}"]
        else:
            words.append(f"model_name_or_path={path}")
        name = f"export-{int(time.time() * 1000):x}"
        child = self.site.starter.started(words, self._log(name))
        self.site.home.write(f"{name}.json", json.dumps({"pid": child.pid, "folder": str(folder)}))
        self._children[name] = child
        return name

    def state(self, name: str) -> dict[str, Any]:
        """State of an export, the end of its log, and the serving commands when it is done."""
        if name not in self._children:
            raise APIError(404, "no_export", "The export does not exist.")
        status, log = self._children[name].poll(), self._log(name)
        text = log.read_text(encoding="utf-8", errors="replace")[-_TEXT:] if log.is_file() else ""
        state = "running" if status is None else "done" if status == 0 else "failed"
        folder = Path(self.site.home.read(f"{name}.json")["folder"])
        lines = _serving_lines(self.site.places.shown(folder), folder) if state == "done" else []
        return {"state": state, "text": text, "folder": str(folder), "lines": lines}

    def _log(self, name: str) -> Path:
        return self.site.home.folder / f"{name}.log"


def _serving_lines(shown: str, folder: Path) -> list[str]:
    file = next(folder.glob("*.gguf"), None)
    return [
        f"burnish api {shown}",
        f"burnish chat {shown}",
        f"vllm serve {shown}",
        f"python -m sglang.launch_server --model-path {shown}",
        *([f"llama-server -m {shown}/{file.name}"] if file is not None else []),
        f"cd {shown} && ollama create my-model -f Modelfile",
    ]
