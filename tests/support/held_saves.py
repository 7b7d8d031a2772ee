"""A disk that takes the first bytes of a save, and no more until it is let go."""

import threading

import pytest

from shoal.storage import transaction


class Held:
    """Waits of a save: `came` is set when the first bytes are to be written, which `go` lets go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.came = threading.Event()
        self.go = threading.Event()
        real = transaction.DataFileWriter.append

        def append(writer, data):
            self.came.set()
            assert self.go.wait(120)
            return real(writer, data)

        monkeypatch.setattr(transaction.DataFileWriter, "append", append)
