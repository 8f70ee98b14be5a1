"""Encoded rows on a disk, one bit of which has changed: they are not trained on."""

from pathlib import Path

import pytest

from bad_inputs import change, told
from burnish import cli
from burnish.data.rows.store import MANIFEST

pytestmark = pytest.mark.run

WORDS = ["train", "run.yaml", "max_steps=2", "save_strategy=no"]


def weights(folder: str) -> bytes:
    return Path(folder, "model.safetensors").read_bytes()


def flip(path: Path, place: int = -5) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def column_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in (".values", ".ends") or path.name == "origins")


def test_a_damaged_cache_is_encoded_again(user_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURNISH_CACHE", "cache")
    assert cli.main([*WORDS, "output_dir=first"]) == 0
    files = column_files(Path("cache/rows"))
    assert len(files) == 5
    for number, path in enumerate([*files, next(Path("cache/rows").rglob(MANIFEST))]):
        before = path.read_bytes()
        flip(path)
        assert cli.main([*WORDS, f"output_dir=out{number}"]) == 0
        assert weights(f"out{number}") == weights("first")
        assert path.name == MANIFEST or path.read_bytes() == before


def test_damaged_rows_of_a_tokenized_path_are_refused_by_name(
    user_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, "tokenized_path=kept"]
    assert cli.main([*words, "output_dir=first"]) == 0
    for path in column_files(Path("kept")):
        flip(path)
        told(capsys)
        assert cli.main([*words, "output_dir=second"]) == 2
        err = told(capsys)[1]
        assert f'kept/train: "{path.name}" of the encoded rows was changed after it was written' in err
        flip(path)
    change("kept/train/rows.json", rows=7)
    assert cli.main([*words, "output_dir=second"]) == 2
    assert '"rows.json" of the encoded rows was changed' in told(capsys)[1]
    assert not Path("second").exists()
