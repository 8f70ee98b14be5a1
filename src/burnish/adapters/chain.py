"""Adapters that were merged into the base model before an adapter was trained.

The config of an adapter names its base model only. An adapter that was trained on the base model with other adapters
merged (``create_new_adapter``, or several in ``adapter_name_or_path``) needs them again, so their names are written to
a file in its folder, from which the commands for this folder complete ``adapter_name_or_path``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from burnish.config.errors import UserError, few
from burnish.utils.json_files import read_object, write_json

MERGED_NAME = "merged_adapters.json"
_METADATA_KEY = "merged_adapters"


def write_merged(folder: Path, merged: Sequence[Path]) -> None:
    """Write the folders of the adapters that were merged before the one in ``folder`` was trained, in order."""
    if merged:
        write_json(folder / MERGED_NAME, {_METADATA_KEY: [str(each.resolve()) for each in merged]})


def previously_merged(folder: Path) -> list[str]:
    """Return the folders of the adapters that were merged before the one in ``folder`` was trained, in order.

    Raises:
        UserError: if the file cannot be used.
    """
    path = folder / MERGED_NAME
    if not path.is_file():
        return []
    names = read_object(path).get(_METADATA_KEY)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f'Expected a list of adapter folders under "{_METADATA_KEY}".', where=str(path))
    return list(names)


def incomplete_chain_notes(folders: Sequence[Path]) -> list[str]:
    """Return a note for each adapter that is used without the adapters that were merged before it was trained.

    Args:
        folders: adapters in the order in which they are merged.
    """
    notes = []
    for at, folder in enumerate(folders):
        before = {each.resolve() for each in folders[:at]}
        missing = [name for name in previously_merged(folder) if Path(name).resolve() not in before]
        if missing:
            chain = ",".join([*previously_merged(folder), str(folder)])
            notes.append(
                f"{folder} was trained on the base model merged with {few(missing)}, which adapter_name_or_path does "
                f"not contain. To include it, set adapter_name_or_path: {chain}"
            )
    return notes
