"""A clock that only sleep and work move on."""


class Clock:
    """Wall and processor time, in the place of the module `time`; sleeping passes the first, working both."""

    def __init__(self):
        self.now_s = self.worked_s = 100.0

    def monotonic(self):
        return self.now_s

    def thread_time(self):
        return self.worked_s

    def sleep(self, seconds):
        assert seconds > 0
        self.now_s += seconds

    def work(self, seconds):
        self.now_s += seconds
        self.worked_s += seconds
