"""Lengths of batches as read from index arrays, and their error messages."""

from __future__ import annotations

import time

import numpy as np
import pytest

from flashattn_jit import _C
from tests.harness.slowness import slowdown

from .batch_plans import FEW_ROW, Level, Paged, Ragged, array, indptr, lengths, make, span


def raw(q_indptr, storage, q_offset=None, levels=(), dtype=np.int32):
    """BatchLengths of arrays as they are; storage: (kv_indptr, page_indptr, last, size, pages)."""
    keep = [array(q_indptr, dtype)]
    arrays = []
    for values in storage[:3]:
        keep.append(None if values is None else array(values, dtype))
        arrays.append(span(keep[-1]))
    native = []
    for q, tokens, level_storage in levels:
        keep += [array(q), None if tokens is None else array(tokens)]
        entries = [span(keep[-2]), span(keep[-1])]
        keep += [None if v is None else array(v) for v in level_storage[:3]]
        native.append((*entries, (*(span(v) for v in keep[-3:]), *level_storage[3:])))
    offset = None
    if q_offset is not None:
        keep.append(array(q_offset, dtype))
        offset = span(keep[-1])
    return _C.BatchLengths(span(keep[0]), (*arrays, *storage[3:]), offset, native)


def ragged(kv_indptr):
    return (kv_indptr, None, None, 0, 0)


def paged(page_indptr, last, size=16, pages=100):
    return (None, page_indptr, last, size, pages)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_ragged_lengths(dtype):
    batch = raw([0, 1, 1, 6], ragged([0, 10, 20, 23]), dtype=dtype)
    assert (batch.num_requests, batch.num_groups, batch.num_q_tokens) == (3, 0, 6)
    assert (batch.q_len, batch.kv_len) == ([1, 0, 5], [10, 10, 3])
    assert batch.q_offset == [9, 10, -2], "the last query sits on the last key"
    assert (batch.max_q_len, batch.max_kv_len, batch.num_kv_tokens) == (5, 10, 23)


def test_paged_lengths():
    batch = raw([0, 1, 2, 3], paged([0, 2, 2, 3], [5, 0, 16], pages=7), q_offset=[3, 4, 5])
    assert (batch.kv_len, batch.q_offset, batch.num_page_indices) == ([21, 0, 16], [3, 4, 5], 3)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_the_range_of_pages(dtype):
    """Of the entries in use alone, wherever the extremes are and whatever their number is."""
    rng = np.random.default_rng(5)
    for count in (1, 2, 7, 8, 9, 31, 64, 100):
        pages = array(rng.integers(0, 1000, count + 3), dtype)
        pages[count:] = -1
        for at, value in ((0, 5000), (count - 1, 6000), (count // 2, np.iinfo(dtype).max)):
            pages[at] = value
            assert _C.page_range(span(pages), span(indptr([count]))) == (0, pages[:count].max())
        for at, value in ((count - 1, -1), (0, -7), (count // 2, np.iinfo(dtype).min)):
            pages[at] = value
            least = _C.page_range(span(pages), span(indptr([count])))[0]
            assert least == pages[:count].min()


def test_the_range_of_no_pages():
    pages = array([3, -1])
    for ends in ([], [0], [0, 0], [0, -5]):
        assert _C.page_range(span(pages), span(array(ends))) == (0, -1)
    assert _C.page_range(span(array([])), span(array([0, 9]))) == (0, -1)
    assert _C.page_range(span(pages), span(array([0, 2**62], np.int64))) == (-1, 3)


def test_no_requests():
    batch = raw([0], ragged([0]))
    assert (batch.num_requests, batch.max_q_len, batch.q_len) == (0, 0, [])


def test_levels_come_before_own_keys():
    levels = [Level([[0, 1, 2]], Ragged([100])), Level([[0], [1, 2]], Ragged([7, 9]))]
    batch = lengths([1, 2], Ragged([3, 4]), levels=levels)
    assert batch.kv_len == [110, 113, 100, 107, 109]
    assert batch.kv_first == [107, 109, 0, 100, 100]
    assert (batch.num_groups, batch.num_kv_tokens, batch.q_offset[:2]) == (3, 123, [109, 111])


def test_kinds():
    batch = lengths([1, 2, 3, 0, 100], Ragged([5] * 5))
    assert batch.tile_kinds(4, 8) == (2, 2, 400)
    assert batch.tile_kinds(4, 8, q_block=2) == (0, 4, 400)


def test_dense_lengths():
    dense = _C.BatchLengths.dense
    batch = dense(3, 5, 10)
    assert (batch.q_len, batch.kv_len, batch.q_offset) == ([5] * 3, [10] * 3, [0] * 3)
    assert (batch.num_requests, batch.num_groups, batch.num_page_indices) == (3, 0, 0)
    assert (batch.num_q_tokens, batch.num_kv_tokens) == (15, 30)
    batch = dense(3, 5, 10, (0, 7, 10), (-5, 2, 5))
    assert (batch.kv_len, batch.q_offset) == ([0, 7, 10], [-5, 2, 5])
    assert (batch.max_q_len, batch.max_kv_len) == (5, 10)
    assert dense(3, 5, 10, (0, 7, 9)).max_kv_len == 9
    assert dense(2, 5, 10, None, -7).q_offset == [-7, -7]
    for empty in (dense(0, 5, 10), dense(0, 5, 10, (), ())):
        assert (empty.q_len, empty.max_q_len, empty.num_q_tokens) == ([], 0, 0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((-1, 5, 10), "num_requests must not be negative"),
        ((2, -1, 10), "2 requests of q_len=-1 and 10 keys"),
        ((2, 5, -1), "2 requests of q_len=5 and -1 keys"),
        ((3, 2**30, 1), "q_len=1073741824 and 1 keys have more rows than fit 32 bits"),
        ((3, 1, 2**30), "q_len=1 and 1073741824 keys have more rows than fit 32 bits"),
        ((2, 5, 10, (3,)), "kv_len must have 2 entries, got 1"),
        ((2, 5, 10, (3, 11)), r"kv_len\[1\]=11 is outside of \[0, 10\]"),
        ((2, 5, 10, (-1, 3)), r"kv_len\[0\]=-1 is outside of \[0, 10\]"),
        ((2, 5, 10, (2**31, 3)), "kv_len=2147483648 does not fit 32 bits"),
        ((2, 5, 10, None, (1, 2, 3)), "q_offset must have 2 entries, got 3"),
        ((2, 5, 10, None, (0, 2**31 - 2)), r"q_offset\[1\]=2147483646: .* 5 queries do not fit"),
        ((2, 5, 10, None, -(2**31)), r"q_offset\[0\]=-2147483648"),
        ((2, 5, 10, None, 2**31), "q_offset=2147483648 does not fit 32 bits"),
    ],
)
def test_dense_lengths_that_make_no_sense(arguments, says):
    with pytest.raises(ValueError, match=says):
        _C.BatchLengths.dense(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [(2, 5, 10, "37"), (2, 5, 10, (3.0, 7.0)), (2, 5, 10, np.array([3, 7])), (2, 5, 10, None, 1.5),
     (2, 5, 10, None, None), (2, 5.0, 10), (2**31, 5, 10)],
)  # fmt: skip
def test_dense_lengths_of_a_wrong_type(arguments):
    with pytest.raises(TypeError):
        _C.BatchLengths.dense(*arguments)


BAD = {
    "q_indptr[0]=1 must be 0": lambda: raw([1, 2], ragged([0, 4])),
    "q_indptr has 0 entries": lambda: raw([], ragged([0])),
    "q_indptr descends at request 1, from 5 to 3": lambda: raw([0, 5, 3], ragged([0, 4, 8])),
    "kv_indptr descends at request 2": lambda: raw([0, 1, 2, 3], ragged([0, 4, 8, 7])),
    "kv_indptr has 2 entries; q_indptr has 2 requests, so it needs 3": lambda: raw(
        [0, 1, 2], ragged([0, 4])
    ),
    "q_indptr reaches 4294967296 at request 0, which does not fit 32 bits": lambda: raw(
        [0, 1 << 32], ragged([0, 4]), dtype=np.int64
    ),
    "page_indptr descends at request 1, from 2 to 1": lambda: raw(
        [0, 1, 2], paged([0, 2, 1], [1, 1])
    ),
    "page_indptr[0]=-1 must be 0": lambda: raw([0, 1, 2], paged([-1, 2, 2], [1, 0])),
    "kv_indptr has 0 entries": lambda: raw([0, 1], paged([0, 1], [1], size=0)),
    "page_indptr has 4 entries": lambda: raw([0, 1, 2], paged([0, 1, 2, 3], [1, 1])),
    "last_page_len has 1 entries for 2 requests": lambda: raw([0, 1, 2], paged([0, 1, 2], [1])),
    "last_page_len[1]=0: request 1 has 2 pages, so it must be 1 to page_size=16": lambda: raw(
        [0, 1, 2], paged([0, 1, 3], [1, 0])
    ),
    "last_page_len[0]=17: request 0 has 1 pages": lambda: raw([0, 1], paged([0, 1], [17])),
    "page_indptr ends at 101, but page_indices has 100 entries": lambda: raw(
        [0, 1], paged([0, 101], [1])
    ),
    "page_size=-1 must be positive": lambda: raw([0, 1], paged([0, 1], [1], size=-1)),
    "q_offset has 1 entries for 2 requests": lambda: raw([0, 1, 2], ragged([0, 4, 8]), [3]),
    "q_offset[1]=2147483647": lambda: raw([0, 1, 3], ragged([0, 4, 8]), [0, 2**31 - 1]),
    "level 0 has pages of 16, the requests have ragged keys": lambda: raw(
        [0, 1], ragged([0, 4]), levels=[([0, 1], [0], paged([0, 1], [1]))]
    ),
    "level 1 has pages of 8, the requests have pages of 16": lambda: raw(
        [0, 1], paged([0, 1], [4]),
        levels=[([0, 1], [0], paged([0, 1], [1])), ([0, 1], [0], paged([0, 1], [1], size=8))],
    ),
    "q_indptr of level 0 descends at group 1 of level 0": lambda: raw(
        [0, 2], ragged([0, 4]), levels=[([0, 2, 1], [0, 1], ragged([0, 1, 2]))]
    ),
    "q_indptr of level 0 ends at 3, but there are 2 entries of tokens of level 0": lambda: raw(
        [0, 2], ragged([0, 4]), levels=[([0, 3], [0, 1], ragged([0, 1]))]
    ),
    "tokens of level 0[1]=7 in group 0 of level 0 is none of the 2 packed tokens": lambda: raw(
        [0, 2], ragged([0, 4]), levels=[([0, 2], [0, 7], ragged([0, 1]))]
    ),
    "the tokens of request 0 in group 0 of level 0 must follow one another": lambda: raw(
        [0, 3], ragged([0, 4]), levels=[([0, 2], [0, 2], ragged([0, 1]))]
    ),
    "token 0 does not": lambda: raw(
        [0, 2], ragged([0, 4]), levels=[([0, 2], [1, 0], ragged([0, 1]))]
    ),
    "token 1 of request 0 is in group 1 of level 0 and in an earlier group": lambda: raw(
        [0, 2], ragged([0, 4]), levels=[([0, 2, 3], [0, 1, 1], ragged([0, 1, 2]))]
    ),
    "request 0: its first token has 3 keys in shared levels, token 1 has 0": lambda: raw(
        [0, 2], ragged([0, 4]), levels=[([0, 1], [0], ragged([0, 3]))]
    ),
    "group 0 of level 1: its first token has 3 keys in outer levels, token 1 of": lambda: raw(
        [0, 1, 2], ragged([0, 4, 8]),
        levels=[([0, 1], [0], ragged([0, 3])), ([0, 2], [0, 1], ragged([0, 1]))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_errors_name_the_array_and_the_request(message):
    with pytest.raises(ValueError) as error:
        BAD[message]()
    assert message in str(error.value)


LIMITS = (2, 10, 100, 0)
BEYOND = {
    "3 requests, the limits allow max_requests=2: request 2": ([1, 1, 1], Ragged([5, 5, 5])),
    "12 query tokens, the limits allow max_q_tokens=10: request 1": ([6, 6], Ragged([9, 9])),
    "request 1 has kv_len=101, the limits allow max_kv_len=100": ([1, 1], Ragged([9, 101])),
    "3 pages, the limits allow max_pages=0: request 0": ([1], Paged([40], 16)),
}


@pytest.mark.parametrize("message", BEYOND)
def test_batches_beyond_the_limits_are_refused(message):
    with pytest.raises(ValueError) as error:
        make(*BEYOND[message], limits=LIMITS)
    assert message in str(error.value)


def test_more_groups_than_the_limits_allow():
    level = Level([[0], [1], []], Ragged([3, 3, 3]))
    with pytest.raises(ValueError, match="3 groups of shared keys, the limits allow 2"):
        make([1, 1], Ragged([5, 5]), levels=[level], limits=LIMITS, num_levels=1)


def lists(begin, count, entries, q_block=4, key_block=16):
    keep = array(begin), array(count)
    return (q_block, key_block, False, span(keep[0]), span(keep[1]), entries), keep


@pytest.mark.parametrize(
    ("begin", "count", "entries", "message"),
    [
        ([0], [1], 9, "key lists have 1 block rows; requests with blocks of 4"),
        ([0, 5], [1, 5], 9, "block row 1 of request 0 has 5 entries from 5 on, of 9"),
        ([0, -1], [1, 1], 9, "block row 1 of request 0"),
        ([0, 0], [1, -1], 9, "block row 1 of request 0"),
        ([0, 0], [1, 1], 1 << 30, "do not fit 32 bits"),
    ],
)
def test_key_lists_out_of_range(begin, count, entries, message):
    native, _held = lists(begin, count, entries)
    with pytest.raises(ValueError, match=message):
        make([7], Ragged([100]), lists=native)


def test_key_lists_and_levels_together():
    native, _held = lists([0, 0], [1, 1], 9)
    with pytest.raises(ValueError, match="cannot be combined"):
        make([7], Ragged([9]), lists=native, levels=[Level([[*range(7)]], Ragged([3]))])


def test_a_kind_that_is_not_there():
    with pytest.raises(ValueError, match=r"request 1 has q_len=100, which is prefill work"):
        make([1, 100], Ragged([5, 5]), kinds=(None, FEW_ROW))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": (4, 3)}, "num_kv_heads=3 does not divide num_q_heads=4"),
        ({"workers": 0}, "num_workers must be positive"),
        ({"workers": (1, 2), "share_workers": True}, "num_workers 1 and 2 differ"),
        ({"kinds": (_C.Kind(None, 8, 0, 16, 32, 1.0, 1.0, 1.0, 1.0), None)}, "row_granule"),
        ({"kinds": (_C.Kind(None, 8, 1, 16, 32, -1.0, 1.0, 1.0, 1.0), None)}, "from 0 to 1e9 ns"),
        ({"split_keys": (-1, 0)}, "split_keys must not be negative"),
        ({"limits": (-1, 0, 0, 0)}, "limits must not be negative"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        make([40], Ragged([5]), **options)


def test_many_requests_are_read_in_under_a_millisecond():
    q, kv = indptr([1] * 4096), indptr([100] * 4096)
    storage, times = (span(kv), None, None, 0, 0), []
    for _ in range(20):
        slow, begin = slowdown(), time.thread_time()
        _C.BatchLengths(span(q), storage)
        times.append((time.thread_time() - begin) / slow)
    assert min(times) < 1e-3
