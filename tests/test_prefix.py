"""The digests that name blocks, and the index that finds them."""

import os
import subprocess
import sys

import pytest

from pdserve.prefix import CacheIndex, block_digests, extend, max_cached_tokens, pack_tokens, seed_extras

EXTRAS = seed_extras(model="m")


def test_only_full_blocks_have_a_digest():
    assert [len(block_digests(range(n), 4, EXTRAS)) for n in (0, 1, 3, 4, 5, 7, 8)] == [0, 0, 0, 1, 1, 1, 2]


def test_a_longer_prompt_keeps_the_digests_of_its_prefix():
    assert block_digests(range(20), 4, EXTRAS)[:3] == block_digests(range(12), 4, EXTRAS)


def test_a_block_after_another_prefix_is_another_block():
    one, two = block_digests([1, 2, 9, 9], 2, EXTRAS), block_digests([3, 4, 9, 9], 2, EXTRAS)
    assert one[1] != two[1]


def test_growing_a_sequence_token_by_token_gives_the_same_digests_as_all_at_once():
    tokens, digests = list(range(37)), []
    for length in range(38):
        extend(digests, tokens[:length], 4, EXTRAS)
    assert digests == block_digests(tokens, 4, EXTRAS)


def test_digests_are_128_bits():
    assert {len(digest) for digest in block_digests(range(64), 4, EXTRAS)} == {16}


def test_block_size_is_part_of_the_identity():
    assert block_digests([1, 2], 2, EXTRAS)[0] != block_digests([1, 2, 0, 0], 4, EXTRAS)[0]


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_digests_are_equal_in_every_process(hash_seed):
    call = "block_digests(range(64), 16, seed_extras(model='m', cache_salt='a'))[-1].hex()"
    code = f"from pdserve.prefix import block_digests, seed_extras; print({call})"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == block_digests(range(64), 16, seed_extras(model="m", cache_salt="a"))[-1].hex()


def test_different_salts_never_share():
    salts = [None, "", "a", "b", "ab"]
    assert len({block_digests([1, 2], 2, seed_extras(model="m", cache_salt=salt))[0] for salt in salts}) == len(salts)


def test_a_salt_never_collides_with_another_field_of_the_same_text():
    fields = [
        seed_extras(cache_salt="x"),
        seed_extras(adapter="x"),
        seed_extras(cache_salt="x", adapter=""),
        seed_extras(adapter="x", cache_salt=""),
        seed_extras(adapter="xcache_salt"),
    ]
    assert len(set(fields)) == len(fields)


def test_the_order_of_the_fields_does_not_matter():
    assert seed_extras(model="m", cache_salt="s") == seed_extras(cache_salt="s", model="m")


def test_at_least_one_token_is_always_computed():
    lengths = (1, 15, 16, 17, 31, 32, 33, 48)
    assert [max_cached_tokens(n, 16) for n in lengths] == [0, 0, 0, 16, 16, 16, 32, 32]


def test_tokens_are_packed_as_little_endian_uint32():
    assert pack_tokens([1, 0x01020304]) == b"\x01\0\0\0\x04\x03\x02\x01"


def index_with(tokens, digests, block_size=2):
    index = CacheIndex(block_size)
    for at, digest in enumerate(digests):
        index.store(at + 1, digest, tokens[at * block_size : (at + 1) * block_size])
    return index


def test_the_longest_cached_prefix_is_found():
    tokens = [1, 2, 3, 4, 5, 6]
    digests = block_digests(tokens, 2, EXTRAS)
    assert index_with(tokens, digests[:2]).match(digests, tokens) == [1, 2]


def test_a_hit_is_verified_against_the_token_ids():
    index = index_with([1, 2], [b"same"])
    assert index.match([b"same"], [1, 3]) == []


def test_with_an_eight_bit_digest_no_prompt_reads_another_ones_first_block():
    index, seen = CacheIndex(2), {}
    for number in range(300):
        tokens = [number, 7]
        digest = block_digests(tokens, 2, EXTRAS)[0][:1]
        assert [seen[block] for block in index.match([digest], tokens)] in ([], [tokens])
        if index.find(digest) is None:
            index.store(number + 1, digest, tokens)
            seen[number + 1] = tokens
    assert len(index) < 256


def test_a_gap_in_the_cache_ends_the_prefix():
    tokens = [1, 2, 3, 4, 5, 6]
    digests = block_digests(tokens, 2, EXTRAS)
    index = index_with(tokens, digests)
    index.remove(2)
    assert index.match(digests, tokens) == [1]


def test_the_estimate_counts_leading_blocks():
    tokens = list(range(40))
    digests = block_digests(tokens, 2, EXTRAS)
    assert [index_with(tokens, digests[:n]).estimate(digests) for n in (0, 1, 7, 20)] == [0, 1, 7, 20]


def test_events_are_the_net_change_since_the_last_report():
    index = index_with([1, 2, 3, 4], [b"a", b"b"])
    index.remove(1)
    events = index.take_events()
    assert (events.stored, events.removed) == ((b"b",), (b"a",))
    assert index.take_events().stored == ()


def test_a_snapshot_lists_everything_and_leaves_no_change_pending():
    index = index_with([1, 2, 3, 4], [b"a", b"b"])
    assert index.snapshot().stored == (b"a", b"b")
    assert index.take_events().stored == ()
