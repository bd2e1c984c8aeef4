"""Who owns which page of the KV cache. Pure accounting: the tensors are in `kv/cache.py`.

A page holds `page_size` consecutive tokens of a sequence. Owners (request ids) grow by whole pages
and give all of them back at once. A page may have several owners, which only read it: `share` is
what forks and a prefix cache stand on.
"""

from collections import Counter
from collections.abc import Sequence


class BlockManager:
    """Pages 0 .. num_pages - 1, each free or with at least one owner."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))  # the lowest page is taken first
        self._ref_count = [0] * num_pages
        self._owned: dict[str, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def pages(self, owner: str) -> Sequence[int]:
        """The pages of `owner`, in the order of its tokens: another list whenever they change."""
        return self._owned.get(owner, ())

    def owners(self) -> frozenset[str]:
        return frozenset(self._owned)

    def grow(self, owner: str, num_tokens: int, keep_free: int = 0) -> bool:
        """Gives `owner` room for `num_tokens` tokens in all; False, and no change, if fewer than
        `keep_free` pages would be left free."""
        held = self._owned.get(owner, [])
        missing = self.pages_for(num_tokens) - len(held)
        if missing <= 0:
            return True
        if missing + keep_free > len(self._free):
            return False
        taken = [self._free.pop() for _ in range(missing)]
        for page in taken:
            self._ref_count[page] = 1
        self._owned[owner] = held + taken
        return True

    def share(self, owner: str, pages: Sequence[int]) -> None:
        """Makes the new `owner` start with `pages`, which have owners already."""
        assert owner not in self._owned, f"{owner} has pages already"
        assert all(self._ref_count[page] for page in pages), "a free page cannot be shared"
        for page in pages:
            self._ref_count[page] += 1
        if pages:
            self._owned[owner] = list(pages)

    def release(self, owner: str) -> None:
        """Takes every page from `owner`; those that nobody else owns become free."""
        for page in reversed(self._owned.pop(owner, [])):
            self._ref_count[page] -= 1
            if not self._ref_count[page]:
                self._free.append(page)

    def check(self) -> None:
        """Raises `AssertionError` if a page is leaked, free and owned, or miscounted."""
        counted = Counter(page for pages in self._owned.values() for page in pages)
        for owner, pages in self._owned.items():
            assert len(set(pages)) == len(pages), f"{owner} holds a page twice: {pages}"
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        for page in range(self.num_pages):
            assert self._ref_count[page] == counted[page], f"page {page} is miscounted"
        owned_or_free = set(self._free) | set(counted)
        assert not set(self._free) & set(counted), "a page is both free and owned"
        assert owned_or_free == set(range(self.num_pages)), "a page is neither free nor owned"
