"""Progress of long operations: nothing for short ones, a bar in a terminal, occasional lines elsewhere."""

import io

import pytest
from rich.console import Console

from burnish.report import work as shown
from burnish.report.work import WorkLine
from burnish.utils.work import progress, set_watcher, track
from recording import RecordingProgress


@pytest.fixture
def recorder():
    recording = RecordingProgress()
    set_watcher(recording)
    yield recording
    set_watcher(None)


def test_work_reports_its_start_and_end_even_on_failure(recorder):
    def fail():
        with progress("Loading") as advance:
            advance(1)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert recorder.calls == [("Loading", None, "rows"), 1, "end"]


def test_nested_work_reports_only_the_outermost(recorder):
    with progress("Exporting", 2, "files") as advance:
        with progress("Loading") as inner:
            inner(5)
        advance(2)
    assert recorder.calls == [("Exporting", 2, "files"), 2, "end"]


def test_items_are_counted_as_they_complete(recorder):
    assert list(track([7, 8], "Evaluating", "batches")) == [7, 8]
    assert recorder.calls == [("Evaluating", 2, "batches"), 1, 1, "end"]
    assert list(track(iter([7]), "Evaluating", "batches")) == [7]
    assert recorder.calls[4] == ("Evaluating", None, "batches")


def line(done, total, seconds):
    times = iter([0.0, *[seconds] * 9])
    made = WorkLine(clock=lambda: next(times))
    made.begin("Encoding", total, "records")
    made.advance(done)
    made.end()
    return made


def test_progress_line_has_share_rate_and_remaining_time():
    assert line(12_000, 100_000, 4.0).sentence() == "Encoding: 12,000 of 100,000 records, 3.00k per second, 0:29 left"
    assert line(0, None, 83.0).sentence() == "Encoding: 1:23 so far"
    assert line(0, 5, 2.0).sentence() == "Encoding: 0 of 5 records"


@pytest.mark.parametrize("width", [20, 60, 120])
def test_progress_bar_fits_the_terminal(width):
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=True, _environ={}).print(line(50, 100, 5.0))
    assert all(len(text) <= width + 40 for text in file.getvalue().splitlines())  # includes escape sequences of colors
    assert ("━" in file.getvalue()) == (width >= 60)


def test_lines_are_printed_periodically_without_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(shown, "PATIENCE_S", 0.0)
    monkeypatch.setattr(shown, "HEARTBEAT_S", 0.01)
    made = WorkLine()
    made.begin("Loading the model", None, "rows")
    for _ in range(200):
        if "Loading the model: 0:00 so far" in capsys.readouterr().out:
            break
        made._is_over.wait(0.01)
    else:
        pytest.fail("nothing was printed")
    made.end()


def test_short_work_shows_no_progress(capsys):
    made = WorkLine()
    made.begin("Loading the model", None, "rows")
    made.end()
    assert capsys.readouterr().out == ""
