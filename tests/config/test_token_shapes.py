"""Secrets are recognized by their format and by the key before them, before any option is parsed."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.cli import main
from burnish.config.secrets import MASK, SecretFormatter, mask_json, without_secrets

ALNUM = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
HEX = "0123456789abcdef"


def random_text(alphabet: str, min_size: int, max_size: int | None = None) -> st.SearchStrategy[str]:
    return st.text(alphabet, min_size=min_size, max_size=max_size or min_size)


SHAPES = {
    "hugging face": random_text(ALNUM, 34, 37).map("hf_{}".format),
    "hugging face organisation": random_text(ALNUM, 34).map("api_org_{}".format),
    "openai": random_text(ALNUM, 40, 48).map("sk-{}7".format),
    "openai project": random_text(ALNUM + "_-", 60, 100).map("sk-proj-a1{}".format),
    "anthropic": random_text(ALNUM + "_-", 80, 95).map("sk-ant-api03-{}A".format),
    "github": st.tuples(st.sampled_from("pousr"), random_text(ALNUM, 36)).map(lambda p: f"gh{p[0]}_{p[1]}"),
    "github fine grained": random_text(ALNUM, 59).map("github_pat_11{}".format),
    "gitlab": random_text(ALNUM + "_-", 20).map("glpat-{}".format),
    "aws": st.tuples(st.sampled_from(["AKIA", "ASIA"]), random_text(ALNUM[:26] + "234567", 16)).map("".join),
    "slack": st.tuples(st.sampled_from("bpars"), random_text("0123456789", 11), random_text(ALNUM, 24)).map(
        lambda p: f"xox{p[0]}-{p[1]}-{p[2]}"
    ),
    "google": random_text(ALNUM + "_-", 35).map("AIza{}".format),
    "npm": random_text(ALNUM, 36).map("npm_{}".format),
    "pypi": random_text(ALNUM + "_-", 100).map("pypi-AgEIcHlwaS5vcmc{}".format),
    "jwt": st.tuples(*[random_text(ALNUM + "_-", 30)] * 3).map(lambda p: f"eyJ{p[0]}.eyJ{p[1]}.{p[2]}"),
    "wandb": random_text(HEX, 40).map("WANDB_API_KEY={}".format),
    "wandb in yaml": random_text(HEX, 40).map("wandb_api_key: {}".format),
    "bearer": random_text(ALNUM + "._~-", 20, 60).map("Bearer {}".format),
    "basic": random_text(ALNUM, 20, 40).map("Authorization: Basic {}".format),
    "replicate": random_text(ALNUM, 37).map("r8_{}".format),
    "groq": random_text(ALNUM, 52).map("gsk_{}".format),
    "nvidia": random_text(ALNUM + "_-", 64).map("nvapi-{}".format),
    "modelscope": st.uuids().map("ms-{}".format),
    "stripe": random_text(ALNUM, 24).map("sk_live_{}".format),
}
AROUND = st.sampled_from([" ", "'", '"', ",", ": ", " #", "\n", ")", "]", "}", ";", "\t", "`", "/", "=", "@", "\\n"])


def secret_part(text: str) -> str:
    return re.split(r"[= ]", text)[-1]


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_token_of_known_format_is_masked_anywhere(name: str) -> None:
    @settings(max_examples=60, deadline=None)
    @given(SHAPES[name], AROUND, AROUND)
    def check(token: str, before: str, after: str) -> None:
        masked = without_secrets(f"lr{before}{token}{after}end")
        assert secret_part(token) not in masked, (token, before, after)
        assert MASK in masked

    check()


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["hf_hub_token", "hub_token", "WANDB_API_KEY", "ms_hub_token", "password", "client_secret",
                     "search_query_key", "private_key"]),
    st.sampled_from(["{}: {}", '{}: "{}"', "{}: '{}", '{}: "{}\nlr: 1', "{}={}", "{}: {}: x", "{}: [{}, 2]",
                     '{}: ["{}"', '"{}": "{}"', "{} : {}", "{}:\n  {}", "{}:\n- {}", "{}: |\n  {}", "{}: {{a: {}}}",
                     "--{} {}",
                     "'{}': '{}'", "{}:{}"]),
    st.text(ALNUM + "!$%^&*()+.", min_size=8, max_size=40),
)  # fmt: skip
def test_value_after_the_name_of_a_secret_is_masked(name: str, form: str, value: str) -> None:
    assert value not in without_secrets(form.format(name, value))


RANDOM = "Zx9Qw8Er7Ty6Ui5Op4"


@pytest.mark.parametrize(
    "text",
    ["http://h/score?subscription-key={}", "https://h/?sig={}&a=1", "https://h/?a=1&X-Amz-Signature={}",
     "https://h/a?X-Amz-Credential={}", "https://{}@h/x", "https://h/?auth={}", "https://h/?pwd={}", "https://h/?jwt={}",
     "https://h/?apiKey={}", "https://h/?api%5Fkey={}", "https://h/?KEY={}", "https://h/?Token={}",
     "https://hooks.slack.com/services/T0/B0/{}", "https://discord.com/api/webhooks/1/{}", "Authorization: Token {}",
     "Authorization: {}", '{{"Authorization": "Basic {}"}}', "Set-Cookie: session={}; HttpOnly", "api-key: {}",
     "apikey={}", "hub-token: {}", "AccountKey={};", "SharedAccessKey={};", "token: {}", "key: {}",
     "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----"],
)  # fmt: skip
def test_secrets_in_urls_and_headers_are_masked(text: str) -> None:
    assert RANDOM not in without_secrets(text.format(RANDOM))
    assert MASK in without_secrets(text.format(RANDOM))


@pytest.mark.parametrize(
    "text",
    ["https://h/a?step=12&signal=3", "https://git@github.com/a/b", "https://h/?design=1", "A cookie is set.",
     "the turnkey: a longer sentence", "token: 12345", "key: lora_rank", "ssh://user@host/path", "monkey=banana-split",
     "basic authorization of the page", "https://h/?authors=someone", "tokens: 12345678901234567890"],
)  # fmt: skip
def test_ordinary_url_is_unchanged(text: str) -> None:
    assert without_secrets(text) == text


@pytest.mark.parametrize(
    "text",
    ["hf_hub_token has no effect", "pad_token: <pad>", "eos_token: <|im_end|>", 'the form "key: value"', "risk-free",
     "hf_transfer, hf_hub_url", "max_new_tokens: 512", "tokens: 12345678", "sk-learn-like-estimators",
     "hub_token: null", "api_key: none", "task-specific-head-pruning-of-transformers",
     "e3b0c44298fc1c149afbf4c8996fb92427ae41e4",
     "tokenizer: meta-llama/Llama-3.2-1B", "eos_token_id=50256", '"hf_hub_token" must be text',
     "a key: longer text here",
     "organisation/hf-model-v2", "saves/hf_qwen25half", "sort_key: lengths", '"primary_key": "identifier"',
     "--foreign-key rows"],
)  # fmt: skip
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert without_secrets(text) == text


def test_documentation_contains_nothing_that_resembles_a_token() -> None:
    for page in (Path(__file__).parents[2] / "docs").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        changed = [line for line in text.splitlines() if without_secrets(line) != line]
        assert changed == [], page


TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567"


@pytest.mark.parametrize(
    "text",
    [f"hf_hub_token: {TOKEN}: x\n", f'hf_hub_token: "{TOKEN}\nlr: 1\n', f"hf_hub_token: [{TOKEN}, 2]\nlr: 1\n",
     f"{TOKEN}\n", f"- {TOKEN}\n", f"{TOKEN}: 1\n", f"hf_hub_token: {{a: {TOKEN}}}\n", f"model_name_or_path: {TOKEN}\n",
     f"lora_rank: {TOKEN}\n", f"a: 1\n\thub_token: {TOKEN}\n", f"report_to: {TOKEN}\n", f"hf_hub_token: *{TOKEN}\n",
     "hf_hub_token: [short1x, 2]\n", "hf_hub_token: short1x: x\n", "hf_hub_token: 'short1x\n",
     'hf_hub_token: "first\\\n  short1x" x: y\n', "hf_hub_token: 'first\n  short1x' x: y\n",
     "hf_hub_token: first\n  short1x: y\n"],
)  # fmt: skip
def test_file_error_shows_no_token(text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    for command in ("train", "explain", "api", "chat"):
        assert main([command, str(file), *(["--once", "Hi"] if command == "chat" else [])]) == 2
        out, err = capfd.readouterr()
        assert TOKEN not in out + err
        assert "short1x" not in out + err
        assert err


@pytest.mark.parametrize(
    "argv", [[TOKEN], ["run.yaml", TOKEN], [f"--{TOKEN}", "1"], [f"{TOKEN}=1"], ["--lora_rank", TOKEN]]
)
def test_command_line_error_shows_no_token(argv: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    for command in ("train", "export", "runs", "webui", TOKEN):
        assert main([command, *argv]) == 2
        out, err = capfd.readouterr()
        assert TOKEN not in out + err


def test_entire_logs_are_masked() -> None:
    record = logging.LogRecord("burnish", logging.INFO, "here", 1, "asked with %s", (f"Bearer {TOKEN}",), None)
    assert SecretFormatter("%(message)s").format(record) == f"asked with Bearer {MASK}"


def test_masking_numeric_text_costs_little() -> None:
    import time

    text = "[" + ",".join(f"{n / 7:.12f}" for n in range(200_000)) + "]"
    began = time.perf_counter()
    assert without_secrets(text) == text
    assert time.perf_counter() - began < 0.5


PLAIN = "correcthorse99batteryX"  # no known format


@pytest.mark.parametrize(
    "text",
    [
        f"wandb_api_key: # mine\n  {PLAIN}", f"wandb_api_key:\n\n  {PLAIN}",
        f"hub_token: >-\n  first\n  {PLAIN}\nseed: 3",
        f"hub_token:\n- a1b2c3\n- {PLAIN}\nseed: 3", f"? hub_token\n: {PLAIN}",
        f"a:\n  hub_token: |\n    {PLAIN}\n  b: 3",
        f"Command '['burnish', '--hub_token', '{PLAIN}']'", f"os.environ['HF_TOKEN'] = '{PLAIN}'",
        f'{{"argv": ["train", "--hub_token", "{PLAIN}"]}}',
    ],
)  # fmt: skip
def test_value_below_or_beside_the_name_of_a_secret_is_masked(text: str) -> None:
    masked = without_secrets(text)
    assert PLAIN not in masked
    assert MASK in masked


@pytest.mark.parametrize(
    "text",
    ["names: ['hub_token', 'run_name']", "pad_token:\n  <pad>", "tokenizer:\n  folder", "The hub_token, which is"],
)
def test_text_beside_other_names_is_kept(text: str) -> None:
    assert without_secrets(text) == text


@pytest.mark.parametrize("text", ['api_key="canary 1"', 'api_key="canary', '{"hub_token": "canary1"}'])
def test_value_in_a_json_string_is_masked_and_the_json_stays_valid(text: str) -> None:
    inner = json.dumps({"text": text, "n": 1})
    masked = without_secrets(inner)
    assert "canary" not in masked
    assert json.loads(masked)["n"] == 1


def test_item_after_the_option_of_a_secret_is_masked() -> None:
    argv = ["burnish", "train", "--hub_token", PLAIN, "--seed", "3"]
    assert mask_json({"argv": argv})["argv"] == [*argv[:3], MASK, *argv[4:]]


@pytest.mark.parametrize("before", ["%20", "\x1b[31m", "\x1b[1;31m", "\x1b[38;5;214m", "\\u001b", "\\x1b[0m"])
def test_token_after_an_escape_sequence_is_masked(before: str) -> None:
    assert without_secrets(f"{before}hf_{ALNUM[:34]}") == f"{before}{MASK}"


@pytest.mark.parametrize("text", ["wandbApiKey: {}", '{{"SecretAccessKey": "{}"}}', 'hub_token = """{}"""'])
def test_value_after_a_name_of_other_spelling_is_masked(text: str) -> None:
    assert PLAIN not in without_secrets(text.format(PLAIN))


@pytest.mark.parametrize("value", [{"a": PLAIN}, [["x", [PLAIN]]], [{"a": PLAIN}], (PLAIN, "b")])
def test_texts_nested_under_the_name_of_a_secret_are_masked(value: object) -> None:
    assert mask_json({"hub_token": value, "eos_token": {"content": "</s>"}}) == {
        "hub_token": MASK,
        "eos_token": {"content": "</s>"},
    }


@pytest.mark.parametrize("name", ["Authorization", "Proxy-Authorization", "Cookie", "Set-Cookie"])
def test_header_of_a_mapping_is_masked(name: str) -> None:
    assert PLAIN not in json.dumps(mask_json({"headers": {name: f"session={PLAIN}"}}))
