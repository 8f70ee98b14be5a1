"""Dockerfiles, checked without a Docker daemon: instructions, arguments, ports, users, and copied files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FILES = ["docker/Dockerfile", "docker/Dockerfile.cuda"]
KNOWN = {
    "ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK",
    "ENTRYPOINT", "CMD",
}  # fmt: skip


def instructions(name: str) -> list[tuple[str, str]]:
    """Return (instruction, arguments) pairs, with continued lines joined and without comments."""
    text = (ROOT / name).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(" ", 1)) for line in joined.splitlines() if line.strip()]  # type: ignore[misc]


@pytest.mark.parametrize("name", FILES)
def test_dockerfile_has_known_instructions_and_uses_its_declarations(name: str) -> None:
    declared: set[str] = set()
    before_from: set[str] = set()
    for word, rest in instructions(name):
        assert word in KNOWN, word
        used = set(re.findall(r"\$\{?([A-Z][A-Z_]*)", rest))
        assert used <= declared | before_from | {"PATH"}, (word, rest)
        if word == "ARG":
            declared.add(rest.partition("=")[0])
            if not any(kind == "FROM" for kind, _ in instructions(name)[: instructions(name).index((word, rest))]):
                before_from.add(rest.partition("=")[0])


@pytest.mark.parametrize("name", FILES)
def test_image_is_pinned_slim_and_not_run_as_root(name: str) -> None:
    result = instructions(name)
    base = next(rest for word, rest in result if word == "ARG" and rest.startswith("BASE="))
    assert re.search(r":\d+\.\d+\.\d+-slim$|@sha256:", base)
    assert all(rest.startswith("${BASE} AS") for word, rest in result if word == "FROM")
    assert [rest for word, rest in result if word == "USER"][-1] not in {"root", "0"}
    text = (ROOT / name).read_text()
    for forbidden in ("latest", "| sh", "curl", "wget", "ADD ", "devel", "pip install -e", "apt-get"):
        assert forbidden not in text, forbidden
    last = dict(result)
    for word in ("ENTRYPOINT", "CMD"):
        assert isinstance(json.loads(last[word]), list)
    assert json.loads(last["ENTRYPOINT"]) == ["burnish"]
    assert json.loads(last["CMD"]) == ["webui"]
    assert last["STOPSIGNAL"] == "SIGTERM"
    assert '"burnish", "env", "--health"' in last["HEALTHCHECK"]


@pytest.mark.run
@pytest.mark.parametrize("name", FILES)
def test_copied_files_are_tracked_and_not_ignored(name: str) -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for word, rest in instructions(name):
        if word != "COPY" or rest.startswith("--from"):
            continue
        for source in rest.split()[:-1]:
            assert any(path == source or path.startswith(f"{source}/") for path in tracked), source
            assert f"!{source.removeprefix('./')}" in ignored, source


def test_exposed_ports_match_options() -> None:
    from burnish.serve.api.options import ApiOptions
    from burnish.serve.page.options import WebOptions

    for name in FILES:
        assert dict(instructions(name))["EXPOSE"].split() == [str(WebOptions().web_port), str(ApiOptions().api_port)]


def test_compose_binds_to_localhost_with_minimal_privileges() -> None:
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    assert set(compose["services"]) == {"webui", "api"}
    for name, service in compose["services"].items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert service["user"] == "1000:1000"
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        assert "no-new-privileges:true" in service["security_opt"]
        assert service["stop_grace_period"] == "60s"
        targets = {volume.partition(":")[2] for volume in service["volumes"]}
        assert targets == {"/app/data", "/app/output", "/app/models", "/home/burnish/.cache"}
        declared = {rest.partition("=")[0] for word, rest in instructions("docker/Dockerfile") if word == "ARG"}
        assert set(service["build"]["args"]) <= declared
    assert compose["services"]["api"]["profiles"] == ["api"]
    cuda = yaml.safe_load((ROOT / "docker/compose.cuda.yaml").read_text())
    assert all(service["gpus"] == "all" for service in cuda["services"].values())


def test_environment_variables_are_used() -> None:
    from burnish.serve.api.options import ENVIRONMENT as API
    from burnish.serve.page.options import ENVIRONMENT as WEB

    options = dict(part.split("=", 1) for part in dict(instructions("docker/Dockerfile"))["ENV"].split())
    known = {*API, *WEB, "PATH", "PYTHONUNBUFFERED", "BURNISH_HOME", "BURNISH_CONTAINER"}
    assert set(options) <= known
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    assert set(compose["services"]["webui"]["environment"]) <= {*known, "USE_MODELSCOPE_HUB", "HF_ENDPOINT", "HF_HOME"}


@pytest.mark.run
@pytest.mark.parametrize(
    ("arguments", "extras"),
    [({}, "web"), ({"INSTALL_BNB": "true"}, "web,quantization"), ({"INSTALL_MODELSCOPE": "true"}, "web,modelscope")],
)
def test_build_arguments_select_existing_extras(tmp_path: Path, arguments: dict[str, str], extras: str) -> None:
    assert _choose_extras(tmp_path, arguments).returncode == 0
    assert (tmp_path / "extras").read_text().strip() == extras
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras.split(","))


@pytest.mark.run
@pytest.mark.parametrize("name", ["INSTALL_VLLM", "INSTALL_DEEPSPEED", "INSTALL_FLASHATTN"])
def test_unsupported_commands_in_the_image_are_rejected(tmp_path: Path, name: str) -> None:
    run = _choose_extras(tmp_path, {name: "true"})
    assert run.returncode == 1
    assert run.stderr.startswith(f"{name}=true: ")


def _choose_extras(folder: Path, arguments: dict[str, str]) -> subprocess.CompletedProcess[str]:
    names = ("INSTALL_BNB", "INSTALL_MODELSCOPE", "INSTALL_VLLM", "INSTALL_DEEPSPEED", "INSTALL_FLASHATTN")
    environment = {**dict.fromkeys(names, "false"), "EXTRAS": "web", "PATH": "/usr/bin:/bin", **arguments}
    script = str(ROOT / "docker/choose_extras.sh")
    return subprocess.run(["sh", script], cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_image_builds_if_a_daemon_is_available() -> None:
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no docker daemon is running: the image was not built")
    subprocess.run(["docker", "build", "-f", "docker/Dockerfile", "-t", "burnish-test", "."], cwd=ROOT, check=True)
