"""How much memory the machine has free, and the most that this process has held."""

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

STATUS = Path("/proc/self/status")
MEMINFO = Path("/proc/meminfo")
SAMPLE_SECONDS = 0.05


def available_host_bytes() -> int | None:
    """Host memory that can be had without swapping; None where the system does not say."""
    kibibytes = _field(MEMINFO, "MemAvailable:")
    return None if kibibytes is None else kibibytes * 1024


def anonymous_bytes() -> int:
    """Resident memory of this process that is not mapped from files; 0 where that is unknown."""
    return (_field(STATUS, "RssAnon:") or 0) * 1024


class AnonymousPeak:
    """The most anonymous memory held while the context lasts, looked at every `SAMPLE_SECONDS`.

    The system keeps a peak of all resident memory only, in which mapped model files count.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.sample()

    def sample(self) -> None:
        """Looks now."""
        self.num_bytes = max(self.num_bytes, anonymous_bytes())

    def __enter__(self) -> Self:
        self.sample()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.sample()


def _field(path: Path, name: str) -> int | None:
    """The number after `name` in a file of /proc."""
    try:
        with path.open(encoding="ascii") as file:
            for line in file:
                if line.startswith(name):
                    return int(line.split()[1])
    except OSError:
        return None
    return None
