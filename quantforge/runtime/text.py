"""The text of a request while it grows, ended by stop strings that may cross token borders."""

from collections.abc import Sequence

from quantforge.models.tokenizer import TextStream, Tokenizer


class OutputText:
    """Holds back what may still turn out to be (part of) a stop string.

    With the stop string "END", tokens "a E", "N", "x" show "a ", "", "ENx".
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._stream = TextStream(tokenizer)
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False
        """A stop string was found: the text is over, and ends before it."""

    def push(self, token_id: int) -> str:
        """The text that is safe to show now and was not before."""
        return self._release(self._stream.push(token_id))

    def finish(self) -> str:
        """The rest of the text; nothing after a stop string."""
        if self.stopped:
            return ""
        shown = self._release(self._stream.finish())
        if not self.stopped:
            shown, self._held = shown + self._held, ""
        return shown

    def _release(self, piece: str) -> str:
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, short of all of `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
