"""What is sent where: sizes, alignments and the far ends of memory."""

import pytest

from agent.selftest.transfer import GIB, GUARD, KIB, LARGE, MIB, Piece, pieces

QUICK_ROOM = LARGE + GUARD


def test_the_quick_test_sends_three_sizes_one_of_them_odd_and_unaligned():
    assert pieces(QUICK_ROOM, full=False, words=False) == [
        Piece(0, 4 * KIB),
        Piece(4, 64 * KIB + 12),
        Piece(0, 4 * MIB),
    ]


@pytest.mark.parametrize("full", [False, True])
def test_kernels_get_whole_aligned_words(full: bool):
    for piece in pieces(90 * GIB, full=full, words=True):
        assert piece.offset % 8 == piece.size % 8 == 0


def test_the_full_test_crosses_4_GiB_and_reaches_the_end_of_what_it_has():
    room = 90 * GIB
    found = pieces(room, full=True, words=False)
    assert any(p.offset < 4 * GIB < p.offset + p.size for p in found)
    assert max(p.offset + p.size for p in found) == room
    assert Piece(0, 64 * MIB) in found


@pytest.mark.parametrize("room", [QUICK_ROOM, 9 * MIB, 65 * MIB, 4 * GIB, 4 * GIB + LARGE, 90 * GIB])
@pytest.mark.parametrize("words", [False, True])
def test_nothing_is_sent_beyond_the_room_between_the_guards(room: int, words: bool):
    assert all(p.offset + p.size <= room for p in pieces(room, full=True, words=words))


def test_a_piece_is_said_in_the_units_that_people_use():
    assert str(Piece(4, 64 * KIB + 12)) == "64 KiB + 12 at offset 4"
    assert str(Piece(4 * GIB - 2 * MIB, 4 * MIB)) == "4 MiB at offset 3 GiB + 1071644672"
