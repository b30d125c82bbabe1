"""What is sent, and the words for what comes instead."""

import pytest

from agent.selftest.patterns import FULL, LINE, POISON, Patterns, describe, make, salt_for

KIB = 1 << 10
SIZE = 16 * KIB
SALT = salt_for(7, "0000:01:00.0", "0000:11:00.0")


def sort_of(want: bytes, got: bytes) -> str:
    return describe(memoryview(want), memoryview(got)).partition(";")[0]


@pytest.mark.parametrize("kind", FULL)
def test_no_pattern_looks_like_an_untouched_target(kind: str):
    data = make(kind, SIZE, SALT)
    assert len(data) == SIZE
    assert all(data[at : at + LINE] != bytes([POISON]) * LINE for at in range(0, SIZE, LINE))


def test_the_two_directions_of_a_pair_send_different_data_and_the_same_seed_the_same():
    back = salt_for(7, "0000:11:00.0", "0000:01:00.0")
    for kind in ("address", "random"):
        assert make(kind, SIZE, SALT) != make(kind, SIZE, back)
        assert make(kind, SIZE, SALT) == make(kind, SIZE, salt_for(7, "0000:01:00.0", "0000:11:00.0"))
        assert make(kind, SIZE, SALT) != make(kind, SIZE, salt_for(8, "0000:01:00.0", "0000:11:00.0"))


def test_no_word_of_the_address_pattern_comes_twice_at_whatever_power_of_two():
    size = 4 << 20
    data = make("address", size, SALT)
    assert len({data[at : at + 8] for at in range(0, size, 8)}) == size // 8


def test_the_address_pattern_goes_on_where_it_is_told_to():
    assert make("address", SIZE, SALT)[80:] == make("address", SIZE - 80, SALT, first_word=10)


def test_kept_patterns_are_the_same_as_fresh_ones_at_every_size():
    kept, fresh = Patterns(SALT, keep=True), Patterns(SALT, keep=False)
    for size in (4 * KIB, 64 * KIB + 12, 4 * KIB):
        for kind in FULL:
            assert kept.get(kind, size) == fresh.get(kind, size)
    assert kept.get("address", 64, 3) == fresh.get("address", 64, 3)


@pytest.mark.parametrize("kind", ["address", "random"])
@pytest.mark.parametrize("first", [0, 200, 8 * KIB])
def test_each_sort_of_wrong_data_has_its_word(kind: str, first: int):
    want = make(kind, SIZE, SALT)
    rest = SIZE - first
    assert sort_of(want, want[:first] + bytes(rest)) == "zeros"
    assert sort_of(want, want[:first] + b"\xff" * rest) == "all ones"
    assert sort_of(want, want[:first] + bytes([POISON]) * rest) == "dropped write"
    flipped = bytearray(want)
    flipped[first] ^= 0x10
    assert sort_of(want, bytes(flipped)) == "flipped bits (1)"
    assert sort_of(want, want[:first] + make("random", rest, SALT + 1)) == "wrong data"


def test_data_that_arrives_elsewhere_is_told_with_both_places():
    want = make("address", SIZE, SALT)
    assert (
        sort_of(want, want[:4096] + want[:4096] + want[8192:])
        == "shifted (what belongs at byte 0 is at 4096)"
    )


def test_the_first_wrong_byte_the_wrong_lines_and_both_words_are_named():
    want = make("address", SIZE, SALT)
    got = bytearray(want)
    got[1003] ^= 0xFF
    got[9000] ^= 0xFF
    said = describe(memoryview(want), memoryview(got))
    word = want[1000:1008]
    assert "first wrong byte 1003, 2 of 256 lines of 64 bytes wrong" in said
    assert f"got {bytes(got[1000:1008]).hex()}, want {word.hex()}" in said


def test_an_end_that_is_no_whole_line_is_compared_too():
    want = make("random", 64 * KIB + 12, SALT)
    assert "1 of 1025 lines" in describe(memoryview(want), memoryview(want[:-1] + bytes([want[-1] ^ 1])))
