"""The install command in the error about a missing library."""

from types import SimpleNamespace

import pytest

from burnish.config import errors

SOURCE_FOLDER = errors.source_folder.__wrapped__


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ('{"url": "file:///home/a%20b/burnish", "dir_info": {"editable": true}}', "/home/a b/burnish"),
        ('{"url": "file:///home/burnish", "dir_info": {}}', None),
        ('{"url": "https://example.org/burnish.whl", "archive_info": {}}', None),
        (None, None),
        ("{", None),
    ],
)
def test_extra_is_installed_from_the_source_code_if_burnish_was(record, expected, monkeypatch):
    distribution = SimpleNamespace(read_text=lambda name: record)
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: distribution)
    assert SOURCE_FOLDER() == expected
    monkeypatch.setattr(errors, "source_folder", lambda: expected)
    package = '"burnish[web]"' if expected is None else f'-e "{expected}[web]"'
    message = str(errors.MissingExtraError("jinja2", "burnish webui", "web"))
    assert message.splitlines() == [
        "burnish webui requires the library 'jinja2', which is not installed.",
        f"  Install it with: pip install {package}",
    ]
