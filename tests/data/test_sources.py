"""From dataset options to examples: which files are read, and the order of rows."""

import json
import sys
import types
from pathlib import Path

import numpy
import pytest

from burnish.config.errors import MissingExtraError, UserError
from burnish.data.sets.examples import content_hash
from burnish.data.sets.mixing import merged_order, sample_rows, split_rows
from burnish.data.sets.sources import load_datasets
from burnish.data.stats import DataStats
from burnish.loop.types import ContentPart, Example, Message
from burnish.utils.work import set_watcher
from dataset_helpers import (
    alpaca_record,
    data_options,
    load,
    load_error,
    openai_record,
    role_contents,
    sharegpt_record,
    write,
)
from recording import RecordingProgress
from representative import representative

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("USE_MODELSCOPE_HUB", raising=False)
    (tmp_path / "data").mkdir()


def write_data(name, records):
    return str(write(Path("data") / name, records))


def records_of(start, stop):
    return [alpaca_record(number, str(number)) for number in range(start, stop)]


def answers(examples):
    return [int(example.messages[-1].content) for example in examples]


def as_info(**sets):
    return {name: {"records": records} for name, records in sets.items()}


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["concat", "interleave_over"])
def test_held_out_examples_that_are_also_trained_are_reported(strategy):
    names = f"{write_data('a.json', records_of(0, 10))},{write_data('b.json', records_of(10, 60))}"
    sets = load(42, dataset=names, val_size=0.2, mix_strategy=strategy)
    number = len([answer for answer in answers(sets.eval[""]) if answer in answers(sets.train)])
    assert bool(number) is (strategy == "interleave_over")
    notes = [note.split(" that ")[0] for note in sets.notes if "are also in the training set" in note]
    assert notes == ([f"{number} of {len(sets.eval[''])} examples"] if number else [])


def test_every_file_type_gives_the_same_records():
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    records = records_of(0, 3)
    table = pyarrow.Table.from_pylist(records)
    parquet.write_table(table, "data/a.parquet")
    with pyarrow.OSFile("data/stream.arrow", "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    with pyarrow.OSFile("data/file.arrow", "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    write_data("a.json", records)
    write_data("a.jsonl", records)
    write_data("lines.json", "\n\n".join(map(json.dumps, records)))
    write_data("a.csv", "instruction,input,output\n" + "".join(f"{r['instruction']},,{r['output']}\n" for r in records))
    result = {
        name: load(dataset=f"data/{name}")
        for name in ("a.json", "a.jsonl", "lines.json", "a.csv", "a.parquet", "stream.arrow", "file.arrow")
    }
    assert {sets.fingerprint for sets in result.values()} == {content_hash(result["a.json"].train)}
    assert answers(result["a.parquet"].train) == [0, 1, 2]


def test_nested_messages_survive_parquet():
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    record = openai_record(("user", "q"), ("assistant", "a"))
    record["messages"].append({"role": "user", "content": "again"})
    record["messages"].append(call)
    parquet.write_table(pyarrow.Table.from_pylist([record]), "data/a.parquet")
    roles = [role for role, _ in role_contents(load(dataset="data/a.parquet").train[0])]
    assert roles == ["user", "assistant", "user", "function"]


def test_csv_keeps_text_unchanged():
    write_data("a.csv", 'instruction,output\n007,"1,5 and\nmore"\n')
    assert role_contents(load(dataset="data/a.csv").train[0]) == [("user", "007"), ("assistant", "1,5 and\nmore")]


@pytest.mark.parametrize("split", ["train[:10]", "train[:25%]", "train[30:]", "train[5:7]+train[-2:]"])
@pytest.mark.parametrize("streaming", [False, True])
def test_split_of_a_file_selects_the_records_that_datasets_would(split, streaming):
    path = write_data("a.json", records_of(0, 40))
    expected = datasets.load_dataset("json", data_files=path, split=split, cache_dir="cache")["output"]
    write(Path("data/dataset_info.json"), {"a": {"file_name": "a.json", "split": split}})
    options = {"dataset": "a", "streaming": streaming}
    sets = load_datasets(data_options(**options), 0, DataStats(), may_stream=streaming)
    assert answers(sets.train[at] for at in range(len(sets.train))) == list(map(int, expected))


@pytest.mark.parametrize("split", ["test", "train[", "validation[:3]"])
def test_other_split_of_a_file_is_rejected(split):
    write_data("a.json", records_of(0, 4))
    write(Path("data/dataset_info.json"), {"a": {"file_name": "a.json", "split": split}})
    assert 'the "split" of a local file must be train, or a part of it.' in load_error(dataset="a")


@pytest.mark.parametrize("streaming", [False, True])
def test_split_without_records_is_rejected(streaming):
    write_data("a.json", records_of(0, 4))
    write(Path("data/dataset_info.json"), {"a": {"file_name": "a.json", "split": "train[:1%]"}})
    with pytest.raises(UserError, match="the dataset contains no records"):
        load_datasets(data_options(dataset="a", streaming=streaming), 0, DataStats(), may_stream=streaming)


def test_text_is_split_into_lines_as_in_datasets():
    text = "one\r\ntwo\n\n three\x0bthree\u2028three \rfour\n"
    write_data("a.txt", text.encode())
    expected = datasets.load_dataset("text", data_files="data/a.txt", split="train", cache_dir="cache")["text"]
    assert [example.text for example in load(dataset="data/a.txt").train] == list(expected)


def test_folder_is_read_in_file_name_order():
    write_data("set/b.json", records_of(5, 8))
    write_data("set/a.jsonl", records_of(0, 5))
    write_data("set/README.md", "about")
    sets = load(dataset="data/set")
    assert answers(sets.train) == list(range(8))
    assert sets.train[5].place == "data/set/b.json, record 1"


def test_folder_saved_by_datasets_is_read():
    datasets.Dataset.from_list(records_of(0, 4)).save_to_disk("data/saved")
    assert answers(load(dataset="data/saved").train) == [0, 1, 2, 3]


def test_cache_files_in_a_folder_saved_by_datasets_are_not_read():
    datasets.Dataset.from_list(records_of(0, 4)).save_to_disk("data/saved")
    datasets.load_from_disk("data/saved").map(lambda record: {"instruction": record["instruction"] + "!"})
    assert len(list(Path("data/saved").glob("*.arrow"))) == 2
    assert answers(load(dataset="data/saved").train) == [0, 1, 2, 3]


def test_missing_file_of_a_folder_saved_by_datasets_is_rejected():
    datasets.Dataset.from_list(records_of(0, 4)).save_to_disk("data/saved", num_shards=2)
    Path("data/saved/data-00001-of-00002.arrow").unlink()
    assert 'data-00001-of-00002.arrow" does not exist' in load_error(dataset="data/saved")


def test_example_knows_its_file_and_record():
    write_data("a.json", records_of(0, 3))
    write(Path("data/dataset_info.json"), {"mine": {"file_name": "a.json"}})
    assert [example.place for example in load(dataset="mine").train][2] == "data/a.json, record 3"


def test_names_paths_and_folder_files_can_be_mixed():
    write_data("a.json", records_of(0, 2))
    write(Path("elsewhere/b.json"), records_of(2, 4))
    write_data("c.json", records_of(4, 6))
    write(Path("data/dataset_info.json"), {"mine": {"file_name": "a.json"}})
    assert answers(load(dataset="mine,elsewhere/b.json,c.json").train) == list(range(6))


def test_dict_from_python_describes_datasets():
    path = write(Path("elsewhere/b.json"), records_of(0, 2))
    assert answers(load(dataset="mine", dataset_dir={"mine": {"file_name": str(path)}}).train) == [0, 1]


# --- hubs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """The recorded requests to the Hugging Face hub. Each data set there has three records."""
    requests = []

    def load_dataset(path, **more):
        requests.append({"path": path, **more})
        return datasets.Dataset.from_list(records_of(0, 3))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return requests


def test_entry_with_hub_url_is_loaded_through_datasets(hub):
    entry = {"hf_hub_url": "someone/set", "subset": "en", "folder": "v2", "split": "validation"}
    sets = load(dataset="mine", dataset_dir={"mine": entry})
    assert hub == [{"path": "someone/set", "name": "en", "data_dir": "v2", "split": "validation",
                    "cache_dir": None, "token": None}]  # fmt: skip
    assert sets.train[2].place == "someone/set, record 3"


@pytest.mark.parametrize(
    "dataset_dir", ["ONLINE", "REMOTE:someone/sets", {"someone/set": {"hf_hub_url": "someone/set"}}], ids=str
)
def test_hub_is_not_queried_for_complete_error_lists(hub, dataset_dir):
    paths = [] if isinstance(dataset_dir, str) else [write_data("a.json", records_of(0, 2))]
    assert len(load(searches_hubs=False, dataset=["someone/set", *paths], dataset_dir=dataset_dir).train) == 2 * len(
        paths
    )
    assert hub == []


def test_online_names_are_hub_ids(hub):
    assert answers(load(dataset="someone/set", dataset_dir="ONLINE").train) == [0, 1, 2]
    assert hub[0]["path"] == "someone/set"
    assert hub[0]["split"] == "train"


def test_modelscope_is_used_if_environment_selects_it(hub, monkeypatch):
    requests = []

    class MsDataset:
        @staticmethod
        def load(name, **more):
            requests.append({"name": name, **more})
            return MsDataset()

        def to_hf_dataset(self):
            return datasets.Dataset.from_list(records_of(0, 2))

    entry = {"hf_hub_url": "someone/set", "ms_hub_url": "other/set"}
    monkeypatch.setitem(sys.modules, "modelscope", types.SimpleNamespace(MsDataset=MsDataset))
    assert len(load(dataset="mine", dataset_dir={"mine": entry}).train) == 3
    assert not requests
    monkeypatch.setenv("USE_MODELSCOPE_HUB", "1")
    assert len(load(dataset="mine", dataset_dir={"mine": entry}).train) == 2
    assert requests == [{"name": "other/set", "subset_name": None, "data_dir": None, "split": "train",
                         "cache_dir": None, "token": None}]  # fmt: skip


def test_missing_modelscope_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(UserError, match=r"burnish\[modelscope\]"):
        load(dataset="mine", dataset_dir={"mine": {"ms_hub_url": "other/set"}})
    assert issubclass(MissingExtraError, UserError)


def test_hub_dataset_without_network_is_rejected(monkeypatch):
    def load_dataset(path, **more):
        raise ConnectionError(f"Couldn't reach '{path}' on the Hub (OfflineModeIsEnabled)")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    message = load_error(dataset="someone/set", dataset_dir="ONLINE")
    assert 'cannot load the dataset "someone/set" from the Hugging Face Hub: Couldn\'t reach' in message
    assert "network" in message


def test_remote_repository_describes_datasets(hub, monkeypatch):
    import huggingface_hub

    path = write(Path("fetched/dataset_info.json"), {"mine": {"hf_hub_url": "someone/set"}})
    requests = []
    monkeypatch.setattr(
        huggingface_hub,
        "hf_hub_download",
        lambda repo, name, repo_type, cache_dir, token: requests.append((repo, name, repo_type)) or str(path),
    )
    assert len(load(dataset="mine", dataset_dir="REMOTE:someone/info").train) == 3
    assert requests == [("someone/info", "dataset_info.json", "dataset")]


def test_cloud_store_with_missing_library_is_rejected_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    message = load_error(dataset="mine", dataset_dir={"mine": {"cloud_file_name": "s3://bucket/a.jsonl"}})
    assert "requires the library 's3fs'" in message
    assert "pip install s3fs" in message


def test_cloud_store_file_is_read_and_its_errors_are_reported():
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    store.pipe("/bucket/a.jsonl", "\n".join(map(json.dumps, records_of(0, 3))).encode())
    store.pipe("/bucket/b.jsonl", b"{broken")
    sets = load(dataset="mine", dataset_dir={"mine": {"cloud_file_name": "memory://bucket/a.jsonl"}})
    assert answers(sets.train) == [0, 1, 2]
    message = load_error(dataset="mine", dataset_dir={"mine": {"cloud_file_name": "memory://bucket/b.jsonl"}})
    assert "memory://bucket/b.jsonl" in message
    assert "line 1" in message
    assert "cannot load" in load_error(dataset="x", dataset_dir={"x": {"cloud_file_name": "memory://bucket/no.jsonl"}})


# --- which rows -------------------------------------------------------------------------------------------------------


def test_max_samples_takes_first_records_of_each_dataset():
    sets = as_info(a=records_of(0, 10), b=records_of(10, 12), c=records_of(20, 30))
    assert answers(load(dataset="a,b,c", dataset_dir=sets, max_samples=3).train) == [0, 1, 2, 10, 11, 20, 21, 22]


def test_records_beyond_max_samples_are_not_read():
    write_data("a.jsonl", "\n".join([*map(json.dumps, records_of(0, 30)), "{broken"]))
    assert len(load(dataset="data/a.jsonl", max_samples=30).train) == 30


def test_num_samples_samples_rows_and_repeats_if_too_few():
    """As in LLaMA-Factory, numpy's global generator draws the rows after numpy.random.seed(seed)."""
    numpy.random.seed(7)
    few = numpy.random.permutation(10)[:4].tolist()
    many = [*numpy.random.permutation(3).tolist(), *numpy.random.choice(3, 4).tolist()]
    info = {"a": {"records": records_of(0, 10), "num_samples": 4}, "b": {"records": records_of(0, 3), "num_samples": 7}}
    assert answers(load(7, dataset="a,b", dataset_dir=info).train) == few + many
    assert sample_rows(5, 5, numpy.random.RandomState(0)) != [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("num_rows", "val_size"), [(1000, 0.1), (24, 0.3), (24, 5), (7, 1), (3, 0.01)])
@pytest.mark.parametrize("seed", [0, 42])
def test_split_matches_datasets(num_rows, val_size, seed):
    expected = datasets.Dataset.from_dict({"row": list(range(num_rows))}).train_test_split(
        test_size=val_size, seed=seed
    )
    trained, held_out = split_rows(num_rows, val_size, seed)
    assert (trained, held_out) == (list(expected["train"]["row"]), list(expected["test"]["row"]))


def test_val_size_of_a_tenth_holds_out_a_tenth():
    sets = load(42, dataset="a", dataset_dir=as_info(a=records_of(0, 1000)), val_size=0.1)
    assert (len(sets.train), len(sets.eval[""])) == (900, 100)
    assert sorted(answers(sets.train) + answers(sets.eval[""])) == list(range(1000))


STRATEGIES = {
    "interleave_under": "first_exhausted",
    "interleave_over": "all_exhausted",
    "interleave_once": "all_exhausted_without_replacement",
}


def interleaves_each_row_once():
    """Tell whether the installed datasets supports interleaving that uses each row once, which version 4.8 added."""
    sets = [datasets.Dataset.from_dict({"row": [f"{i}.{row}" for row in range(n)]}) for i, n in enumerate((2, 1))]
    try:
        partitioned = datasets.interleave_datasets(sets, stopping_strategy=STRATEGIES["interleave_once"])
    except ValueError:
        return False
    return len(partitioned) == 3


@pytest.mark.sample(10)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("probabilities", [None, [0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
@pytest.mark.parametrize("lengths", representative([[3, 4, 5], [5, 5, 1], [700, 40, 2000]], 2))
def test_interleaved_datasets_match_order_of_datasets(strategy, probabilities, lengths):
    if strategy == "interleave_once" and not interleaves_each_row_once():
        pytest.skip("needs datasets 4.8, which interleaves each row once")
    sets = [datasets.Dataset.from_dict({"row": [f"{i}.{row}" for row in range(n)]}) for i, n in enumerate(lengths)]
    expected = datasets.interleave_datasets(sets, probabilities, seed=11, stopping_strategy=STRATEGIES[strategy])
    result = [f"{index}.{row}" for index, row in merged_order(lengths, strategy, probabilities, seed=11)]
    assert result == list(expected["row"])


def test_datasets_are_mixed_according_to_options():
    sets = as_info(a=records_of(0, 3), b=records_of(10, 12))
    assert answers(load(dataset="a,b", dataset_dir=sets).train) == [0, 1, 2, 10, 11]
    mixed = load(dataset="a,b", dataset_dir=sets, mix_strategy="interleave_once")
    assert answers(mixed.train) == [0, 10, 1, 11, 2]
    by_seed = [
        load(seed, dataset="a,b", dataset_dir=sets, mix_strategy="interleave_over", interleave_probs="0.5,0.5")
        for seed in (1, 2)
    ]
    assert answers(by_seed[0].train) != answers(by_seed[1].train)


def test_eval_datasets_are_merged_or_kept_separate():
    write_data("d.json", records_of(30, 31))
    info = as_info(a=records_of(0, 3), b=records_of(10, 12))
    merged_sets = load(dataset="a", eval_dataset="a,b", dataset_dir=info)
    assert {name: answers(examples) for name, examples in merged_sets.eval.items()} == {"": [0, 1, 2, 10, 11]}
    separate = load(dataset="a", eval_dataset="a,b,data/d.json", dataset_dir=info, eval_on_each_dataset=True)
    assert {name: len(examples) for name, examples in separate.eval.items()} == {"a": 3, "b": 2, "d": 1}


def test_statistics_count_every_record_read():
    stats = DataStats()
    info = as_info(a=records_of(0, 3), b=records_of(10, 12))
    load(stats=stats, dataset="a", eval_dataset="b", dataset_dir=info)
    assert stats.seen == 5


# --- fingerprints -----------------------------------------------------------------------------------------------------


def test_fingerprint_depends_on_content_and_order_but_not_file_name():
    first, second = write_data("a.json", records_of(0, 3)), write_data("b.jsonl", records_of(0, 3))
    assert load(dataset=first).fingerprint == load(dataset=second).fingerprint
    assert load(dataset=write_data("c.json", records_of(0, 3)[::-1])).fingerprint != load(dataset=first).fingerprint
    assert load(dataset=write_data("d.json", records_of(0, 2))).fingerprint != load(dataset=first).fingerprint


@pytest.mark.parametrize(
    "change",
    [{"system": "s"}, {"tools": "[]"}, sharegpt_record(("human", "q"), ("gpt", "b")),
     {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "train": False}]}],
)  # fmt: skip
def test_fingerprint_depends_on_every_part_of_an_example(change):
    record = {**sharegpt_record(("human", "q"), ("gpt", "a")), "system": "", "tools": ""}
    before, after = (
        load(dataset=write_data("a.json", [changed_record])).fingerprint
        for changed_record in (record, {**record, **change})
    )
    assert before != after


# --- real files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count", "entry"),
    [
        ("alpaca_en_demo.json", 60, {}),
        ("alpaca_zh_demo.json", 60, {}),
        ("identity.json", 60, {}),
        (
            "glaive_toolcall_en_demo.json",
            60,
            {"formatting": "sharegpt", "columns": {"messages": "conversations", "tools": "tools"}},
        ),
        ("c4_demo.jsonl", 30, {"columns": {"prompt": "text"}}),
        ("wiki_demo.txt", 30, {"columns": {"prompt": "text"}}),
    ],
)
def test_real_files_read_equally_as_entry_and_as_path(golden_folder, name, count, entry):
    path = golden_folder / "sets" / name
    from_entry = load(dataset="set", dataset_dir={"set": {"file_name": str(path), **entry}})
    from_path = load(dataset=str(path))
    assert len(from_entry.train) == len(from_path.train) == count
    assert from_entry.fingerprint == from_path.fingerprint


def test_four_real_files_load_together(golden_folder):
    names = ["alpaca_en_demo", "alpaca_zh_demo", "identity", "glaive_toolcall_en_demo"]
    info = {name: {"file_name": f"{name}.json"} for name in names}
    info["glaive_toolcall_en_demo"] |= {
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "tools": "tools"},
    }
    for name in names:
        Path("data", f"{name}.json").symlink_to(golden_folder / "sets" / f"{name}.json")
    write(Path("data/dataset_info.json"), info)
    sets = load(42, dataset=names, val_size=0.1)
    assert (len(sets.train), len(sets.eval[""])) == (216, 24)
    assert sum(bool(example.tools) for example in [*sets.train, *sets.eval[""]]) > 20


def test_hash_of_examples_covers_every_part_of_a_message():
    def hash_of(content, **more):
        return content_hash([Example(messages=(Message("user", content, **more),))])

    image = [(ContentPart("text", "look"), ContentPart("image", path)) for path in ("a.png", "b.png")]
    result = {
        hash_of("look"), hash_of("parts"), *map(hash_of, image), hash_of((ContentPart("text", "look"),)),
        hash_of("look", raw={"role": "user", "content": "look"}), hash_of(str(image[0])),
    }  # fmt: skip
    assert len(result) == 7


@pytest.mark.parametrize(("may_stream", "begun"), [(False, "Reading"), (True, "Indexing")])
def test_reading_a_file_is_shown_as_progress(may_stream, begun):
    path, recorder = write_data("a.jsonl", [alpaca_record(number) for number in range(30)]), RecordingProgress()
    set_watcher(recorder)
    try:
        load_datasets(data_options(dataset=path, streaming=may_stream), 1, DataStats(), may_stream=may_stream)
    finally:
        set_watcher(None)
    assert [call[0] for call in recorder.calls if isinstance(call, tuple)] == [f"{begun} {path}"]
    assert recorder.calls[-1] == "end"
