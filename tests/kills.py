"""Kill a training process at random moments, most of them during a save or a rotation of checkpoints, rerun the same
command until the run is complete, and compare the result bitwise with an uninterrupted run.

    python tests/kills.py --kills 300 --seconds 600 --seed 0        # make test-kills

The process counts the calls of some functions: renames, flushes and removals of files, updates of weights, decoded
images. It kills itself with SIGKILL before or after a call that is drawn at random. The seed reproduces the draws.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

_FILE_FUNCTIONS = ("rename", "fsync", "unlink", "rmdir", "replace", "mkdir")


def kill_at(at: int, kind: str) -> None:
    """Make this process kill itself before or after call number ``at`` of the functions counted as ``kind``."""
    from burnish.inference.scheduler import Scheduler
    from burnish.loop.loop import Loop
    from burnish.models.images.processor import ImageProcessor
    from burnish.rollouts.completions import SlotSource
    from burnish.rollouts.generation import Generator
    from burnish.rollouts.rewards.builtin import RepetitionPenaltyReward

    count, lock = 0, Lock()

    def tick(what: str) -> None:
        nonlocal count
        with lock:
            count += what == kind
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)

    def count_calls(module: Any, name: str, what: str) -> None:
        function = getattr(module, name)

        def call(*arguments: Any, **kwargs: Any) -> Any:
            tick(what)
            result = function(*arguments, **kwargs)
            tick(what)
            return result

        setattr(module, name, call)

    for name in _FILE_FUNCTIONS:
        count_calls(os, name, "save")
    count_calls(ImageProcessor, "tensors", "decode")  # in threads that decode ahead of the step
    count_calls(Loop, "save", "save")
    count_calls(Loop, "step", "step")
    count_calls(SlotSource, "complete", "step")
    count_calls(Generator, "_compute_rewards", "step")
    count_calls(Loop, "microstep", "pass")
    count_calls(Scheduler, "turn", "generation")
    count_calls(RepetitionPenaltyReward, "_penalty", "reward")


WAYS: dict[str, list[str]] = {
    "full": [],
    "lora with dropout": ["finetuning_type=lora", "lora_dropout=0.1"],
    "badam": ["use_badam=true", "badam_switch_interval=2"],
    "packing": ["packing=true", "cutoff_len=64"],
    "streaming": ["streaming=true", "buffer_size=8"],
    "neftune and evaluation": ["neftune_noise_alpha=5", "val_size=4", "eval_strategy=steps", "eval_steps=3"],
    "accumulation, synchronous saves": ["gradient_accumulation_steps=2", "save_in_background=false"],
    "save_total_limit": ["save_total_limit=2"],
    "packing, neftune, accumulation": ["packing=true", "cutoff_len=64", "neftune_noise_alpha=5",
                                    "gradient_accumulation_steps=2"],
    "spike detection": ["on_spike=rollback", "spike_ratio=1000"],
    "8-bit optimizer": ["optim=adamw_bnb_8bit"],
    "two processes": ["ddp_backend=gloo"],
    "completions, used twice": [
        "stage=grpo", 'reward_funcs=[{"repetition_penalty_reward": {"ngram_size": 1}}]', "num_generations=2",
        "max_completion_length=8", "per_device_train_batch_size=4", "steps_per_generation=2", "num_iterations=2",
        "gradient_accumulation_steps=1", "logging_steps=1", "num_train_epochs=1", "log_completions=false",
    ],
    "ppo": [
        "stage=ppo", 'reward_funcs=[{"repetition_penalty_reward": {"ngram_size": 1}}]', "max_completion_length=8",
        "ppo_buffer_size=2", "ppo_epochs=2", "gradient_accumulation_steps=1", "logging_steps=1", "num_train_epochs=1",
        "log_completions=false",
    ],
    "online dpo": [
        "stage=dpo", "online=true", 'reward_funcs=[{"repetition_penalty_reward": {"ngram_size": 1}}]',
        "num_generations=3", "max_completion_length=8", "gradient_accumulation_steps=1", "logging_steps=1",
        "num_train_epochs=1", "log_completions=false",
    ],
}  # fmt: skip
_IMAGES = ["template=qwen2_vl", "cutoff_len=512", "dataset=images", "media_dir=data", "image_ahead_mb=1"]
WAYS |= {
    "images": _IMAGES,
    "images of pairs, tower trained": [*_IMAGES[:2], "dataset=pairs", *_IMAGES[3:], "stage=dpo", "image_cache=none",
                                       "freeze_vision_tower=false", "finetuning_type=lora", "lora_dropout=0.1"],
}  # fmt: skip
IMAGES = ("images", "images of pairs, tower trained")
"""Configurations whose images are decoded in background threads; ``make_image_folder`` writes their model and data."""
ROLLOUTS = ("completions, used twice", "ppo", "online dpo")
KINDS: dict[str, dict[str, int]] = {
    **{way: {"save": 60, "step": 20, "pass": 16, "generation": 40, "reward": 40} for way in ROLLOUTS},
    **{way: {"save": 60, "step": 10, "decode": 40} for way in IMAGES},
}
"""The kinds of calls that are counted in a configuration, and the number of calls from which one is drawn."""
_USUAL = {"save": 60, "step": 10}
RANKS = {"two processes": 2}
"""The number of processes, if there are several. They are killed together, as if the machine failed."""
TIMES = ("runtime", "per_second", "waiting", "time/generate", "time/reward", "time/logps", "time/train", "step_time")
"""Suffixes of logged durations, which differ between runs."""
NEEDS = {"8-bit optimizer": "bitsandbytes"}
"""The library that a configuration requires; it is skipped if the library is not installed."""


def run(folder: Path, argv: list[str], at: int = 0, kind: str = "save", ranks: int = 1) -> int:
    """Run the command in ``folder``, in processes forked from this one, which has imported the libraries. Returns the
    exit status: -9 if a process killed itself; the others are then killed too."""
    port, children = free_port(), {}
    for rank in range(ranks):
        child = os.fork()
        if not child:
            if ranks > 1:
                environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                os.environ.update({name: str(value) for name, value in environment.items()})
                os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
            _attempt(folder, argv, at if rank == 0 else 0, kind)
        children[child] = rank
    code = 0
    while children:
        child, status = _wait_for_first(children)
        children.pop(child)
        if ended := os.waitstatus_to_exitcode(status):
            code = code or ended
            for other in children:
                os.kill(other, signal.SIGKILL)
    if code not in (0, -9):
        output = (folder / "said.txt").read_text(encoding="utf-8")
        raise AssertionError(f"{argv} at {kind} {at}: status {code}\n{output}")
    return code


def _wait_for_first(children: Iterable[int]) -> tuple[int, int]:
    """Wait for one of these processes. This process may have other children, such as the browser of an earlier test."""
    while True:
        for child in children:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return child, status
        time.sleep(0.005)


def free_port() -> int:
    with socket.socket() as result:
        result.bind(("127.0.0.1", 0))
        return int(result.getsockname()[1])


def _attempt(folder: Path, argv: list[str], at: int, kind: str) -> None:
    """Run the command in the forked process. Does not return."""
    status = 70
    try:
        os.chdir(folder)
        os.environ["BURNISH_CACHE"] = str(folder / "cache")
        output = os.open("said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        from burnish.cli import main

        if at:
            kill_at(at, kind)
        status = main(["train", "run.yaml", *argv])
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def read_result(folder: Path) -> dict[str, object]:
    """Return the weights, the last checkpoint and the log history of a finished run."""
    out = folder / "out"
    history = json.loads((out / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    entries = [{k: v for k, v in e.items() if not k.endswith(TIMES)} for e in history]
    last = max(out.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    parts = [p for p in (*out.glob("*model*.safetensors"), *last.iterdir()) if p.suffix == ".safetensors"]
    stream = last / "stream.json"
    contents = {f"{p.parent.name}/{p.name}": p.read_bytes() for p in [*parts, *([stream] if stream.is_file() else [])]}
    return {"history": [e for e in entries if "train_loss" not in e], "steps": history[-1]["step"], **contents}


def make_image_folder() -> None:
    """Fill the working directory with a vision model, SFT and preference data with one or two images per record, and
    ``run.yaml``."""
    from bad_inputs import OPTIONS, write
    from vision_models import image_models

    model, processor = image_models().build("qwen2_5_vl")
    model.save_pretrained("model")
    image_models().save_processor(processor, "model")
    names = [f"p{number}_{40 + 8 * (number % 5)}x{40 + 8 * (number % 3)}.png" for number in range(12)]
    image_models().write_images(Path("data"), names)
    answers = [
        {"instruction": f"<image>What is it? {'<image>' * (index % 2)}", "input": "", "output": f"It is {name[:2]}.",
         "images": [name, *names[: index % 2]]}
        for index, name in enumerate(names)
    ]  # fmt: skip
    pairs = [{**record, "chosen": record["output"], "rejected": "It is not."} for record in answers]
    columns = {"prompt": "instruction", "query": "input", "images": "images"}
    write("data/images.json", answers)
    write("data/pairs.json", pairs)
    entries = {
        "images": {"file_name": "images.json", "columns": {**columns, "response": "output"}},
        "pairs": {"file_name": "pairs.json", "ranking": True,
                  "columns": {**columns, "chosen": "chosen", "rejected": "rejected"}},
    }  # fmt: skip
    write("data/dataset_info.json", entries)
    Path("run.yaml").write_text("".join(f"{name}: {value}\n" for name, value in OPTIONS.items()), encoding="utf-8")


def campaign(model: Path, way: str, kills: int, draws: random.Random, root: Path) -> Iterator[str]:
    """Kill runs of one configuration ``kills`` times and compare the results. Yields a line for each attempt."""
    from bad_inputs import make_folder

    def make_run_folder(name: str) -> Path:
        folder = root / name
        folder.mkdir(parents=True)
        previous = Path.cwd()
        os.chdir(folder)
        try:
            make_image_folder() if way in IMAGES else make_folder(model)
        finally:
            os.chdir(previous)
        return folder

    argv, ranks = [*WAYS[way], "plot_loss=false"], RANKS.get(way, 1)
    uninterrupted = make_run_folder("alone")
    assert run(uninterrupted, argv, ranks=ranks) == 0
    expected, num_killed = read_result(uninterrupted), 0
    while num_killed < kills:
        folder = make_run_folder(f"killed-{num_killed}")
        for attempt in range(3):
            kinds = KINDS.get(way, _USUAL)
            kind = draws.choice([*kinds] if way in KINDS else ["save", "save", "save", "step"])
            at = draws.randrange(1, kinds[kind])
            status = run(folder, argv, at, kind, ranks)
            num_killed += status == -9
            yield f"{way}: {'killed' if status else 'ended'} in {kind} {at}, attempt {attempt + 1}"
            if status == 0 or num_killed >= kills:
                break
        assert run(folder, argv, ranks=ranks) == 0
        result = read_result(folder)
        different = [name for name in expected if result.get(name) != expected[name]]
        assert not different, f"{way}: {different} differ after kills"
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--way", action="append", choices=WAYS, help="of training; may be repeated")
    options = parser.parse_args()
    import torch

    from small_run import make_model

    torch.set_num_threads(1)
    draws, began, num_kills = random.Random(options.seed), time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        number, ways = 0, [way for way in options.way or WAYS if way not in NEEDS or find_spec(NEEDS[way])]
        while num_kills < options.kills and time.monotonic() - began < options.seconds:
            way = ways[number % len(ways)]
            for line in campaign(model, way, min(5, options.kills - num_kills), draws, Path(folder) / str(number)):
                num_kills += ": killed" in line
                print(line, flush=True)
            number += 1
    print(f"{num_kills} kills, seed {options.seed}: every run ended in the bits of the run left alone.")


if __name__ == "__main__":
    main()
