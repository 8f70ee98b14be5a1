"""Damaged rows on disk (one flipped bit) are rejected or tokenized again."""

import json
from pathlib import Path

import pytest

from bad_inputs import change, read_output
from burnish import cli
from burnish.checkpoint.manifest import manifest_sha256
from burnish.data.rows.store import BLOCKS, MANIFEST, read_rows_manifest

pytestmark = pytest.mark.run

TRAIN = ["train", "run.yaml", "max_steps=2", "save_strategy=no"]


def weights(folder: str) -> bytes:
    return Path(folder, "model.safetensors").read_bytes()


def flip(path: Path, offset: int = -5) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


@pytest.fixture
def encoded_rows(user_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run twice: with rows in the cache, and with rows in ``tokenized_path``."""
    monkeypatch.setenv("BURNISH_CACHE", "cache")
    assert cli.main([*TRAIN, "output_dir=first"]) == 0
    assert cli.main([*TRAIN, "tokenized_path=kept", "output_dir=second"]) == 0


@pytest.mark.parametrize("name", [MANIFEST, "the index"])
@pytest.mark.usefixtures("encoded_rows")
def test_cache_with_damaged_index_is_encoded_again(name: str) -> None:
    (folder,) = Path("cache/rows").glob("*/")
    path, offset = (folder / MANIFEST, -5) if name == MANIFEST else (folder / BLOCKS, -40)
    flip(path, offset)
    assert cli.main([*TRAIN, "output_dir=again"]) == 0
    assert weights("again") == weights("first")
    read_rows_manifest(folder)


@pytest.mark.usefixtures("encoded_rows")
def test_damaged_cache_block_is_rejected_and_same_command_encodes_it_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (path,) = Path("cache/rows").glob(f"*/{BLOCKS}")
    block = read_rows_manifest(path.parent)["blocks"][0]
    flip(path, block["end"] - 20)
    read_output(capsys)
    assert cli.main([*TRAIN, "output_dir=again"]) == 2
    assert "Run the same command again: the dataset is tokenized" in read_output(capsys)[1]
    assert cli.main([*TRAIN, "output_dir=again"]) == 0
    assert weights("again") == weights("first")


@pytest.mark.usefixtures("encoded_rows")
def test_damaged_rows_of_tokenized_path_are_rejected_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*TRAIN, "tokenized_path=kept", "output_dir=again"]
    path = Path("kept/train", BLOCKS)
    for number, block in enumerate(read_rows_manifest(path.parent)["blocks"]):
        flip(path, block["end"] - 20)
        read_output(capsys)
        assert cli.main(argv) == 2
        assert (
            f'kept/train: block {number} of "{BLOCKS}" of the tokenized dataset is corrupted' in read_output(capsys)[1]
        )
        flip(path, block["end"] - 20)
    change("kept/train/rows.json", rows=7)
    assert cli.main(argv) == 2
    assert '"rows.json" of the tokenized dataset is corrupted' in read_output(capsys)[1]


OTHER_TYPES: list[tuple[str, object]] = [
    ("stats", None), ("stats", []), ("stats", {"seen": "x", "records": []}), ("stats", {"seen": 1, "records": [1]}),
    ("stats", {"seen": 1, "records": [["a", "kept", False, [1]]]}), ("blocks", []), ("blocks", {}), ("blocks", [1]),
    ("blocks", [{"begin": 0, "end": "x", "rows": 1, "crc32": 0}]), ("made_from", []),
]  # fmt: skip


@pytest.mark.usefixtures("encoded_rows")
def test_index_of_tokenized_path_with_other_types_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    """The checksum is valid: another program may have written the folder."""
    path = Path("kept/train", MANIFEST)
    original = json.loads(path.read_text())
    del original["sha256"]
    for name, value in OTHER_TYPES:
        manifest = {**original, name: value}
        path.write_text(json.dumps({**manifest, "sha256": manifest_sha256(manifest)}))
        read_output(capsys)
        assert cli.main([*TRAIN, "tokenized_path=kept", "output_dir=again"]) == 2, (name, value)
        error = read_output(capsys)[1]
        assert "has an invalid format" in error
        assert "Delete the folder" in error


@pytest.mark.usefixtures("user_folder")
def test_tokenized_path_without_rows_or_a_dataset_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Path("run.yaml").read_text().splitlines()
    Path("run.yaml").write_text("\n".join(line for line in lines if not line.startswith("dataset:")))
    assert cli.main([*TRAIN, "tokenized_path=nowhere", "output_dir=first"]) == 2
    error = read_output(capsys)[1]
    assert 'tokenized_path "nowhere" contains no tokenized dataset, and "dataset" is not set.' in error
    assert "Set dataset to tokenize it" in error
