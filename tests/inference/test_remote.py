"""Remote engines follow the protocol of the local engine, tested with recorded responses."""

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import httpx2 as httpx
import pytest
from generation_runs import ResponseCollector

from burnish.config.errors import UserError
from burnish.inference.loading import engine_of as engine_for
from burnish.inference.loading import load_for_inference
from burnish.inference.options import InferOptions, check_infer, infer_notes, is_remote
from burnish.inference.remote import process as child
from burnish.inference.remote.client import RemoteEngine
from burnish.inference.remote.openai_server import OpenAIServer
from burnish.inference.remote.process import arguments
from burnish.inference.types import Closed, GenerationRequest, QueueFullError, Sampling
from burnish.run.plan.plan import RunOptions
from burnish.serve.chat.backends import ServerBackend
from small_run import make_model
from tiny_models import tiny_tokenizer


class RecordedServer(ThreadingHTTPServer):
    """A server that answers each completion request with recorded chunks."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), RequestHandler)
        self.bodies, self.keys = [], []
        self.chunks = [
            {"text": " w1", "token_ids": [5]},
            {"text": " w2", "token_ids": [6, 7], "finish_reason": "length"},
        ]
        self.status, self.pause_s, self.breaks = 200, 0.0, False
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class RequestHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("Authorization"))
        self._send(json.dumps({"data": [{"id": "first"}]}).encode())

    def do_POST(self) -> None:
        stub = self.server
        stub.keys.append(self.headers.get("Authorization"))
        stub.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if stub.status != 200:
            self.send_response(stub.status)
            self.end_headers()
            self.wfile.write(b"no")
            return
        self.send_response(200)
        self.end_headers()
        try:
            for chunk in stub.chunks:
                time.sleep(stub.pause_s)
                self.wfile.write(f"data: {json.dumps({'choices': [chunk]})}\n\n".encode())
                self.wfile.flush()
            if not stub.breaks:
                self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            pass  # the client has disconnected

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args) -> None: ...


@pytest.fixture
def stub():
    server = RecordedServer()
    yield server
    server.shutdown()


def engine_of(stub: RecordedServer, **more) -> RemoteEngine:
    return RemoteEngine(stub.url, tiny_tokenizer(), key="canary", **more)


def run(engine: RemoteEngine, request: GenerationRequest) -> ResponseCollector:
    answer = ResponseCollector()
    engine.submit(request, answer)
    deadline = time.monotonic() + 10
    while answer.reason is None and time.monotonic() < deadline:
        time.sleep(0.005)
    return answer


def test_response_is_token_ids_with_finish_reason(stub: RecordedServer) -> None:
    answer = run(engine_of(stub), GenerationRequest([3, 4], 9))
    assert (answer.ids, answer.reason) == ([5, 6, 7], "length")
    assert answer.filled is not None
    stub.chunks[-1]["finish_reason"] = "stop"
    assert run(engine_of(stub), GenerationRequest([3, 4], 9)).reason == "stop"


def test_prompt_is_sent_as_ids_with_all_settings(stub: RecordedServer) -> None:
    sampling = Sampling(temperature=0.5, top_k=3, top_p=0.9, repetition_penalty=1.1, bias={7: 2.0}, seed=4)
    run(
        engine_of(stub, adapters=("poet",)),
        GenerationRequest([3, 4], 9, adapter="poet", sampling=sampling, stop_ids=frozenset({2})),
    )
    body = stub.bodies[0]
    assert (body["prompt"], body["model"], body["max_tokens"]) == ([3, 4], "poet", 9)
    assert (body["temperature"], body["top_k"], body["top_p"], body["seed"]) == (0.5, 3, 0.9, 4)
    assert (body["logit_bias"], body["stop_token_ids"], body["return_token_ids"]) == ({"7": 2.0}, [2], True)


def test_text_of_a_server_without_ids_is_tokenized(stub: RecordedServer) -> None:
    stub.chunks = [{"text": "w1 w"}, {"text": "2 w3"}, {"text": "", "finish_reason": "stop"}]
    tokenizer = tiny_tokenizer()
    assert run(engine_of(stub), GenerationRequest([3], 9)).ids == tokenizer.convert_tokens_to_ids(["w1", "w2", "w3"])


def test_key_is_sent_only_to_its_server(stub: RecordedServer) -> None:
    run(engine_of(stub), GenerationRequest([3], 9))
    assert set(stub.keys) == {"Bearer canary"}
    stub.keys.clear()
    run(RemoteEngine(stub.url, tiny_tokenizer()), GenerationRequest([3], 9))
    assert set(stub.keys) == {None}


def test_server_error_fails_only_its_request(stub: RecordedServer) -> None:
    engine = engine_of(stub)
    stub.status = 500
    failed = run(engine, GenerationRequest([3], 9))
    assert failed.reason == "failed"
    assert "HTTP 500" in str(failed.error)
    stub.status, stub.breaks = 200, True
    assert "ended before" in str(run(engine, GenerationRequest([3], 9)).error)
    stub.breaks = False
    assert run(engine, GenerationRequest([3], 9)).reason == "length"


def test_requests_can_be_cancelled_and_time_out(stub: RecordedServer) -> None:
    stub.pause_s, stub.chunks = 0.05, [{"token_ids": [5]}] * 100
    engine, answer = engine_of(stub), ResponseCollector()
    handle = engine.submit(GenerationRequest([3], 200), answer)
    time.sleep(0.2)
    engine.cancel(handle)
    timed_out = run(engine, GenerationRequest([3], 200, deadline=time.monotonic() + 0.1))
    assert answer.reason == timed_out.reason == "cancelled"
    assert "timed out" in str(timed_out.error)


def test_cancelled_request_ends_before_a_slot_is_free(stub: RecordedServer) -> None:
    stub.pause_s, stub.chunks = 0.05, [{"token_ids": [5]}] * 100
    engine, first, second = engine_of(stub, slots=1), ResponseCollector(), ResponseCollector()
    running = engine.submit(GenerationRequest([3], 200), first)
    time.sleep(0.1)
    engine.cancel(engine.submit(GenerationRequest([4], 200), second))
    timed_out = run(engine, GenerationRequest([4], 200, deadline=time.monotonic() + 0.1))
    assert (first.reason, second.reason, timed_out.reason) == (None, "cancelled", "cancelled")
    assert "timed out" in str(timed_out.error)
    assert [body["prompt"] for body in stub.bodies] == [[3]]
    engine.cancel(running)


@pytest.mark.parametrize(
    "chunk", [{"token_ids": [5], "logprobs": {"token_logprobs": [None]}}, {"token_ids": 5}, "text", None]
)
def test_unexpected_response_of_a_server_fails_its_request(stub: RecordedServer, chunk) -> None:
    stub.chunks = [chunk]
    engine = engine_of(stub)
    assert run(engine, GenerationRequest([3], 9, top_logprobs=0)).reason == "failed"
    assert engine.facts().running == 0


def test_too_many_requests_and_requests_to_a_closed_engine_are_rejected(stub: RecordedServer) -> None:
    stub.pause_s = 0.1
    engine = engine_of(stub, slots=1, waiting=1)
    result = [ResponseCollector(), ResponseCollector()]
    engine.submit(GenerationRequest([3], 9), result[0])
    time.sleep(0.05)
    engine.submit(GenerationRequest([3], 9), result[1])
    with pytest.raises(QueueFullError):
        engine.submit(GenerationRequest([3], 9), ResponseCollector())
    engine.close(drain_s=5)
    assert [answer.reason for answer in result] == ["length", "length"]
    with pytest.raises(Closed):
        engine.submit(GenerationRequest([3], 9), ResponseCollector())


def test_unsupported_remote_engine_features_are_rejected_by_name(stub: RecordedServer) -> None:
    with pytest.raises(UserError, match="log-probabilities of the prompt"):
        engine_of(stub).submit(GenerationRequest([3, 4], 1, prompt_logprobs_from=1), ResponseCollector())
    with pytest.raises(UserError, match="unknown adapter"):
        engine_of(stub).submit(GenerationRequest([3, 4], 1, adapter="poet"), ResponseCollector())


@pytest.mark.parametrize("data", ["{", "5", '["text"]'])
def test_chunk_that_is_no_object_is_not_reported_as_a_failed_connection(data: str) -> None:
    server = OpenAIServer("http://server/v1")
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=f"data: {data}\n\n"))
    server._client = httpx.Client(transport=transport)
    with pytest.raises(UserError) as raised:
        list(server.chunks("completions", {}))
    assert "connect" not in str(raised.value)


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:port", "http://127.0.0.1:99999", "http://"])
def test_malformed_url_is_an_error_of_its_option(url: str) -> None:
    (problem,) = check_infer(InferOptions(infer_url=url))
    assert problem.options == ("infer_url",)
    with pytest.raises(UserError, match="--url"):
        ServerBackend(url)


def test_unreachable_server_is_reported() -> None:
    with pytest.raises(UserError, match="cannot connect"):
        RemoteEngine("http://127.0.0.1:9", tiny_tokenizer())


def test_llamafactory_options_become_server_flags() -> None:
    options = InferOptions(
        infer_backend="vllm", vllm_maxlen=99, vllm_gpu_util=0.5, vllm_enforce_eager=True, vllm_max_lora_rank=16,
        vllm_config={"max_num_seqs": 8},
    )  # fmt: skip
    argv = " ".join(arguments(options, "model", {"a": "folder"}, 1234))
    assert argv == (
        "serve model --host 127.0.0.1 --port 1234 --max-model-len 99 --gpu-memory-utilization 0.5 --enforce-eager "
        "--enable-lora --max-lora-rank 16 --lora-modules a=folder --max-num-seqs 8"
    )
    options = InferOptions(
        infer_backend="sglang",
        sglang_maxlen=9,
        sglang_mem_fraction=0.4,
        sglang_tp_size=2,
        sglang_config='{"x_y": true}',
    )
    argv = " ".join(arguments(options, "model", {}, 1))
    assert argv.endswith("--context-length 9 --mem-fraction-static 0.4 --tp-size 2 --x-y")
    with pytest.raises(UserError, match="must not set host"):
        arguments(InferOptions(infer_backend="vllm", vllm_config={"host": "0.0.0.0"}), "m", {}, 1)
    for value in ("[1]", "5", "{"):
        with pytest.raises(UserError, match="vllm_config"):
            arguments(InferOptions(infer_backend="vllm", vllm_config=value), "m", {}, 1)


@pytest.mark.run
def test_child_server_is_started_awaited_and_stopped(tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\nfrom http.server import *\n"
        "class H(BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n        self.send_response(200)\n        self.end_headers()\n"
        "print('key', bool(os.environ['VLLM_API_KEY']), 'canary' in ' '.join(sys.argv), flush=True)\n"
        "HTTPServer(('127.0.0.1', int(sys.argv[sys.argv.index('--port') + 1])), H).serve_forever()\n"
    )
    program.chmod(0o755)
    options = InferOptions(infer_backend="vllm", infer_executable=str(program))
    started = child.start_server(options, "model", {}, wait_s=30)
    assert "key True False" in started.log.read_text()
    started.close()
    assert started.process.poll() is not None


@pytest.mark.run
def test_server_that_is_still_loading_is_asked_again_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses, pauses = [503, 503, 200], []
    monkeypatch.setattr(child.httpx, "get", lambda url, **settings: httpx.Response(statuses.pop(0)))
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append)  # other threads keep the real one
    monkeypatch.setattr(child, "time", clock)
    with subprocess.Popen(["sleep", "60"]) as process:
        child._wait(child.Child(process, "http://127.0.0.1:1", "", tmp_path / "log"), time.monotonic() + 60)
        process.kill()
    assert len(pauses) == 2


@pytest.mark.run
def test_exited_child_server_is_reported_with_last_log_lines(tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.write_text(f"#!{sys.executable}\nraise SystemExit('no GPU was found')\n")
    program.chmod(0o755)
    with pytest.raises(RuntimeError, match="no GPU was found"):
        child.start_server(InferOptions(infer_backend="vllm", infer_executable=str(program)), "model", {}, wait_s=30)


def test_missing_server_program_is_named() -> None:
    with pytest.raises(UserError, match='executable "nowhere"'):
        child.start_server(InferOptions(infer_backend="sglang", infer_executable="nowhere"), "model", {})


def test_infer_url_serves_the_model(
    stub: RecordedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("INFER_KEY", "canary")
    options = RunOptions(model_name_or_path=str(make_model(tmp_path)), infer_url=stub.url)
    loaded = load_for_inference(options)
    assert loaded.model is None
    engine = engine_for(loaded)
    assert run(engine, GenerationRequest([3, 4], 9)).ids == [5, 6, 7]
    assert stub.keys[-1] == "Bearer canary"
    engine.close()


@pytest.mark.parametrize(
    ("settings", "unread"),
    [
        ({"vllm_maxlen": 9}, ["vllm_maxlen"]),
        ({"infer_executable": "vllm"}, ["infer_executable"]),
        ({"infer_backend": "vllm", "vllm_maxlen": 9, "infer_executable": "vllm", "max_concurrent_requests": 2}, []),
        ({"infer_backend": "vllm", "sglang_maxlen": 9}, ["sglang_maxlen"]),
        ({"infer_backend": "sglang", "infer_context": 9, "infer_exact": True}, ["infer_context", "infer_exact"]),
        ({"infer_url": "http://x", "infer_context": 9, "infer_exact": True}, ["infer_exact"]),
        ({"infer_url": "http://x", "infer_backend": "vllm", "vllm_maxlen": 9}, ["vllm_maxlen", "infer_backend"]),
        ({"infer_context": 9, "infer_exact": True}, []),
    ],
    ids=str,
)
def test_options_that_the_engine_does_not_read_are_reported(settings: dict[str, object], unread: list[str]) -> None:
    assert [note.split('"')[1] for note in infer_notes(InferOptions(**settings))] == unread


def test_engines_in_other_processes_are_recognized() -> None:
    assert list(check_infer(InferOptions(infer_url="localhost:1")))
    assert is_remote(InferOptions(infer_url="http://x"))
    assert not is_remote(InferOptions(infer_backend="huggingface"))
