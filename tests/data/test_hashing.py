"""Keys of text: pinned for ever, equal to their definition, and no two alike where that is promised."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle.text import token_key
from shoal.data import hash_strings

# Keys are stored in models: these numbers never change.
GOLDEN = [
    (0, "", 5197578548964807871),
    (0, "a", 15917764306486427952),
    (1, "a", 4938449432114577906),
    (0, "shoal", 8533897606811339686),
    (1, "SP0", 15100693662387036526),
    (13, "1906", 12728961683078190376),
    (14, "68fd1e64", 506082733431835310),
    (39, "123456789", 6194563826816452013),
    (18446744073709551615, "0123456789abcdef", 9227426056807018114),
    (7, "The quick brown fox jumps over the lazy dog", 301464951468346091),
    (0, "Pärnu 魚", 11906019774717310521),
]


@pytest.mark.parametrize(("field", "token", "key"), GOLDEN)
def test_the_hash_never_changes(field, token, key):
    assert hash_strings([token], field=field).tolist() == [key]
    assert token_key(field, token.encode()) == key


@given(st.lists(st.binary(max_size=40)), st.integers(0, 2**64 - 1))
def test_keys_are_what_the_definition_says(tokens, field):
    keys = hash_strings(tokens, field=field)
    assert keys.dtype == np.uint64
    assert keys.tolist() == [token_key(field, token) for token in tokens]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_str_has_the_key_of_its_utf8(text):
    assert hash_strings([text]).tolist() == hash_strings([text.encode()]).tolist()


def test_every_length_and_every_byte_of_a_token_counts():
    tokens = [b"\0" * n for n in range(40)]
    tokens += [b"\0" * i + b"\1" + b"\0" * (n - i - 1) for n in range(1, 40) for i in range(n)]
    assert len(set(hash_strings(tokens).tolist())) == len(set(tokens)) == len(tokens)


def test_tokens_of_two_bytes_never_share_a_key_in_a_field():
    tokens = [bytes(pair) for pair in itertools.product(range(256), repeat=2)]
    assert len(np.unique(hash_strings(tokens, field=3))) == 1 << 16


def test_the_same_token_has_another_key_in_another_field():
    keys = [hash_strings(["68fd1e64"], field=field)[0] for field in (*range(1000), 2**63, 2**64 - 1)]
    assert len(set(keys)) == 1002


def test_every_bit_of_the_key_depends_on_every_bit_of_a_token(rng):
    for size in (1, 4, 8, 9, 16, 23):
        tokens = [rng.bytes(size) for _ in range(400)]
        keys = hash_strings(tokens)
        for bit in range(8 * size):
            flipped = [(int.from_bytes(t, "little") ^ 1 << bit).to_bytes(size, "little") for t in tokens]
            changed = keys ^ hash_strings(flipped)
            share = np.unpackbits(changed.view(np.uint8)).reshape(-1, 64).mean(axis=0)
            assert share.min() > 0.3
            assert share.max() < 0.7


def test_lists_tuples_and_arrays_of_text_are_taken():
    want = hash_strings(["ab", "c"]).tolist()
    for tokens in (
        ("ab", "c"),
        [b"ab", b"c"],
        np.array(["ab", "c"]),
        np.array([b"ab", b"c"]),
        np.array(["ab", "c"], object),
    ):
        assert hash_strings(tokens).tolist() == want
    assert hash_strings([]).shape == (0,)


def test_what_is_no_text_is_refused():
    with pytest.raises(TypeError, match="token 1 is a int: pass str or bytes"):
        hash_strings(["a", 5])
    for single in ("abc", b"abc"):
        with pytest.raises(TypeError, match="pass a list"):
            hash_strings(single)
    with pytest.raises(ValueError, match="surrogates not allowed"):
        hash_strings(["\ud800"])


@pytest.mark.parametrize("field", [-1, 2**64])
def test_a_field_that_does_not_fit_is_refused(field):
    with pytest.raises(OverflowError):
        hash_strings(["a"], field=field)
