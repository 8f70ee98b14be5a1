"""A watcher of work that writes down what it is told."""


class Told:
    def __init__(self):
        self.calls = []

    def begin(self, what, total, unit):
        self.calls.append((what, total, unit))

    def advance(self, count):
        self.calls.append(count)

    def end(self):
        self.calls.append("end")
