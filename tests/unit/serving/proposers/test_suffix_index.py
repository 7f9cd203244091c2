"""Matches of a text's end, and what followed them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from distillspec.serving.proposers.suffix_index import LONGEST, SuffixIndex, find_matches


def index_of(*texts: list[int], limit: int = 10_000) -> SuffixIndex:
    index = SuffixIndex(limit)
    for text in texts:
        index.add(text)
    return index


def places_of_the_longest_match(texts: list[list[int]], text: list[int]) -> tuple[list[list[int]], int]:
    """Return what follows each occurrence of the longest end of `text` of three tokens or more, and its length."""
    for match in range(min(len(text), LONGEST), 2, -1):
        rest = [
            other[end:]
            for other in texts
            for end in range(match, len(other))
            if other[end - match : end] == text[-match:]
        ]
        if rest:
            return rest, match
    return [], 0


def test_what_followed_the_longest_match_is_proposed() -> None:
    generator, lengths = torch.Generator().manual_seed(0), set()
    for _ in range(300):
        texts = [torch.randint(0, 4, (30,), generator=generator).tolist() for _ in range(4)]
        text = torch.randint(0, 4, (12,), generator=generator).tolist()
        matches = find_matches([index_of(*texts[:2]), index_of(*texts[2:])], text)
        found = matches.continuation(8, 0.3)
        alive, match = places_of_the_longest_match(texts, text)
        assert matches.match == match
        count, expected = len(alive), 0.0
        for place in range(len(found.tokens) + 1):
            following = Counter(rest[place] for rest in alive if place < len(rest))
            best = max(following.values(), default=0)
            if place == len(found.tokens):
                assert place == min(8, match) or best < 0.3 * count or not best
                break
            assert following[found.tokens[place]] == best >= 0.3 * count
            alive = [rest for rest in alive if place < len(rest) and rest[place] == found.tokens[place]]
            expected += len(alive) / count
        assert found.expected == pytest.approx(expected)
        lengths.add(len(found.tokens))
    assert len(lengths) > 3


def test_the_most_frequent_token_is_proposed_and_a_rare_one_is_not() -> None:
    index = index_of(*[[7, 1, 2, 3, 4, 4, 4]] * 3, [7, 1, 2, 3, 5, 5, 5])
    matches = find_matches([index], [7, 1, 2, 3])
    assert (matches.match, matches.continuation(3, 0.1)) == (4, ((4, 4, 4), 2.25))
    assert find_matches([index], [7, 1, 2, 3]).continuation(3, 0.8).tokens == ()
    assert find_matches([index], [9, 9, 2, 3]).continuation(3, 0.1).tokens == ()
    assert find_matches([index], [1, 2]).match == 0
    assert find_matches([index], [4, 4, 4]).continuation(3, 0.1).tokens == (), (
        "a text's end is no beginning of the next"
    )


def test_a_match_bounds_the_proposal() -> None:
    index = index_of([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert find_matches([index], [0, 1, 2, 3]).continuation(8, 0.1).tokens == (4, 5, 6)
    assert find_matches([index], [1, 2, 3, 4, 5]).continuation(8, 0.1).tokens == (6, 7, 8, 9)


def test_old_texts_give_way() -> None:
    index = SuffixIndex(200)
    for number in range(100):
        index.add([number] * 3 + [1000 + number] * 6)
    assert len(index) <= 200
    assert find_matches([index], [99] * 3).continuation(4, 0.1).tokens == (1099,) * 3
    assert find_matches([index], [5] * 3).continuation(4, 0.1).tokens == ()


def test_shares_are_of_all_places_of_the_match() -> None:
    matches = find_matches([index_of([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7])], [1, 2, 3])
    assert matches.behind(()) == pytest.approx({4: 2 / 3, 7: 1 / 3})
    assert matches.behind((4,)) == pytest.approx({5: 1 / 3, 6: 1 / 3})
    assert matches.behind((7,)) == {}, "that text ends there"
    assert matches.behind((8,)) == {}, "nobody went there"
