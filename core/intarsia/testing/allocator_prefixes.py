"""What allocators keep that share prefixes: claims of `AllocatorContract`."""

from __future__ import annotations

from collections.abc import Sequence

from intarsia.testing.allocator_case import AllocatorCase, distinct_tokens, number_id
from intarsia.testing.claims import unclaimed

__all__ = ["PrefixClaims"]

#: Pairs of prompts that a weak name for a page confuses; pages of 1, 2 and 4 tokens end inside their common lengths.
LOOKALIKES: tuple[tuple[Sequence[int], Sequence[int]], ...] = (
    ([10, 20, 30, 40, 9], [41, 19, 30, 40, 9]),
    ([10, 20, 30, 40, 9], [20, 10, 30, 40, 9]),
    ([1, 23, 5, 6, 9], [12, 3, 5, 6, 9]),
    ([1, 1, 1, 1, 5, 6, 7, 8, 9], [2, 2, 2, 2, 5, 6, 7, 8, 9]),
    ([1, 2, 3, 2**31, 9], [1, 2, 3, 0, 9]),
    ([256, 1, 1, 1, 9], [1, 256, 1, 1, 9]),
)


class PrefixClaims(AllocatorCase):
    """A prefix is found where tokens and salt are equal, and nowhere else."""

    def test_an_equal_prefix_is_found_but_for_the_last_token(self) -> None:
        """Where prefixes are shared `reserve` finds what `lookup` promised, never the last token, and it is there."""
        for cache in self.each():
            books, seen = cache.allocator, 0
            for length in (16, 17, 32, 33):
                ids = distinct_tokens(length, length)
                cache.grow(number_id(length), ids)
                for state in ("held", "left"):
                    promised = books.lookup(ids)
                    assert books.lookup(ids) == promised, "`lookup` changes what it finds"
                    found = cache.enter((f"{state}-{length}", 0), ids)
                    assert found == promised, f"`reserve` found {found}, `lookup` promised {promised}"
                    assert found < length, "the last token is found cached, and its logits are nowhere"
                    assert found == 0 or books.shares_prefixes, "it says that it shares no prefixes, and shares one"
                    seen += found
                    cache.grow((f"{state}-{length}", 0), ids)
                    cache.release((f"{state}-{length}", 0))
                    cache.release(number_id(length))
                cache.check_all()
            assert seen or not books.shares_prefixes, "it says that it shares prefixes, and shares none"

    def test_different_prefixes_never_meet(self) -> None:
        """A prefix is found for equal tokens in equal places alone, whatever its pages have in common."""
        self._needs_sharing()
        for page_size in (1, 2, 4):
            for first, second in LOOKALIKES:
                cache = self.build(page_size=page_size)
                cache.grow(number_id(0), first)
                common = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
                found = cache.enter(number_id(1), second)
                assert found is not None and found <= common, f"{found} tokens of {first} are found for {second}"
                cache.grow(number_id(1), second)
                cache.check_all()

    def test_salts_keep_equal_prefixes_apart(self) -> None:
        """A prefix is found under its own salt alone, in `lookup` as in `reserve`."""
        self._needs_sharing()
        cache, ids = self.build(), distinct_tokens(0, 13)
        for number, salt in enumerate(("", "a", "b", "a\0", "\udcff")):
            assert cache.allocator.lookup(ids, salt) == 0, f"`lookup` finds under {salt!r} what another salt computed"
            assert cache.enter(number_id(number), ids, salt) == 0, f"a prefix of another salt is found under {salt!r}"
            cache.grow(number_id(number), ids, salt=salt)
            cache.check_all()
        assert cache.allocator.lookup(ids, "a") > 0, "nothing is found under a salt's own"

    def test_only_computed_tokens_are_found(self) -> None:
        """What is reserved, or accepted and not run yet, is found by nobody."""
        self._needs_sharing()
        for cache in self.each():
            ids, size = distinct_tokens(0, 33), cache.layout.page_size
            assert cache.allocator.reserve(number_id(0), ids, 33) == 0
            assert cache.allocator.lookup([*ids, 1]) == 0, "reserved tokens are found"
            for end in (1, 7, 15, 16, 17, 32):
                cache.grow(number_id(0), ids, count=end)
                found = cache.allocator.lookup([*ids, 1])
                assert found <= end, f"{end} tokens are computed, and {found} are found (pages of {size})"

    def test_rejected_drafts_are_found_by_nobody(self) -> None:
        """Tokens that were run and not accepted have no name, and what is written over them is found instead."""
        self._needs_sharing()
        for cache in self.each():
            ids = distinct_tokens(0, 14)
            cache.grow(number_id(0), ids)
            cache.grow(number_id(0), ids, drafts=(90, 91, 92, 93))
            assert cache.allocator.lookup([*ids, 90, 91, 92, 93, 1]) <= 14, "rejected drafts are found"
            cache.grow(number_id(0), [*ids, 60, 61, 62, 63, 64])
            assert cache.allocator.lookup([*ids, 90, 91, 92, 93, 1]) <= 14, "rejected drafts are found"
            cache.enter(number_id(1), [*ids, 60, 61, 62, 63, 64, 1])
            cache.check_all()

    def test_what_is_named_is_not_written_over(self) -> None:
        """After a rewind others still find what was there: a page that is known by its content is not changed."""
        for cache in self.each():
            ids = distinct_tokens(0, 32)
            cache.grow(number_id(0), ids)
            for back in (31, 21, 16):
                if not cache.rewind(number_id(0), back):
                    continue
                cache.grow(number_id(0), [*ids[:back], *distinct_tokens(back, 12)])
                cache.enter(number_id(back), [*ids, 1])
                cache.check_all()
                cache.release(number_id(back))

    def _needs_sharing(self) -> None:
        if not self.build().allocator.shares_prefixes:
            unclaimed("it shares no prefixes")
