"""A progress callback that records its calls."""


class RecordingProgress:
    def __init__(self):
        self.calls = []

    def begin(self, what, total, unit):
        self.calls.append((what, total, unit))

    def advance(self, count):
        self.calls.append(count)

    def end(self):
        self.calls.append("end")
