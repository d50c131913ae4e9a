"""Do the segment table and the row set say of rows what a plain list of them says?

The model keeps a Python list of ids a lane and knows nothing of prefix sums or links.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zbuffer.format.segments import NOBODY, Segments
from zbuffer.sampling.rowset import NONE, RowSet

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Table:
    """A segment table as a list of (lane, rows used); segments before `first` were evicted."""

    segment_rows: int
    first: int
    segments: tuple[tuple[int, int], ...]

    def start(self, i: int) -> int:
        return (self.first + i) * self.segment_rows

    @property
    def stop(self) -> int:
        return self.start(len(self.segments))

    def lanes(self) -> dict[int, list[int]]:
        """Return the ids of each lane's rows, oldest first."""
        lanes: dict[int, list[int]] = {}
        for i, (lane, used) in enumerate(self.segments):
            lanes.setdefault(lane, []).extend(self.start(i) + k for k in range(used))
        return lanes

    def rows(self) -> list[int]:
        return sorted(i for ids in self.lanes().values() for i in ids)

    def next_id(self, lane: int) -> int:
        """Return the id of the row that is to come, in the lane's newest segment."""
        i = max(i for i, (other, _) in enumerate(self.segments) if other == lane)
        used = self.segments[i][1]
        return self.start(i) + used if used < self.segment_rows else NONE

    def path(self, row: int, behind: int, ahead: int) -> list[int]:
        lane, ids = next((lane, ids) for lane, ids in self.lanes().items() if row in ids)
        at = ids.index(row)
        line = [NONE] * behind + ids + [self.next_id(lane)] + [NONE] * ahead
        return line[at : at + behind + 1 + ahead]

    def linked(self) -> Segments:
        lane = np.array([lane for lane, _ in self.segments], np.int64)
        used = np.array([used for _, used in self.segments], np.int64)
        return Segments.of(self.segment_rows, self.first, lane, used)

    def row_set(self) -> RowSet:
        return RowSet(self.start(0), self.stop, segments=self.linked())

    def some_ids(self) -> Array:
        """Return every id of the table, and those around it on both sides."""
        return np.arange(min(self.start(0), 0) - 7, self.stop + 7)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Any table there can be: segments of any lane or of none, of any fill."""
    segment_rows = draw(st.integers(1, 5))
    lanes = draw(st.integers(1, 4))
    owned = st.tuples(st.integers(0, lanes - 1), st.integers(0, segment_rows))
    passed_over = st.just((NOBODY, 0))
    segments = draw(st.lists(st.one_of(owned, owned, owned, passed_over), max_size=14))
    return Table(segment_rows, draw(st.integers(0, 6)), tuple(segments))


@st.composite
def written_tables(draw: st.DrawFn) -> Table:
    """A table as a writer leaves it: rows, early flushes, and oldest segments evicted."""
    segment_rows = draw(st.integers(1, 5))
    lanes = draw(st.integers(1, 4))
    segments: list[list[int]] = []
    newest: dict[int, int] = {}
    actions = st.tuples(st.sampled_from(["row", "row", "row", "flush"]), st.integers(0, lanes - 1))
    for action, lane in draw(st.lists(actions, max_size=40)):
        i = newest.get(lane)
        if i is None or segments[i][1] == segment_rows or action == "flush":
            # After a flush the rest of the segment stays unused.
            newest[lane] = i = len(segments)
            segments.append([lane, 0])
        if action == "row":
            segments[i][1] += 1
    n_evicted = draw(st.integers(0, len(segments)))
    live = tuple((lane, used) for lane, used in segments[n_evicted:])
    return Table(segment_rows, n_evicted, live)


ANY = st.one_of(tables(), written_tables())


# Rows and positions


@given(ANY)
def test_rows_are_counted_and_found_by_their_position(table: Table) -> None:
    rows, wanted = table.row_set(), table.rows()

    ids = rows.ids(np.arange(len(wanted)))

    assert len(rows) == len(table.linked()) == len(wanted)
    assert ids.tolist() == wanted
    assert ids.dtype == np.int64


@given(ANY, st.randoms())
def test_positions_may_come_in_any_order_and_shape(table: Table, random: Any) -> None:
    rows, wanted = table.row_set(), table.rows()
    if not wanted:
        return
    positions = np.array([[random.randrange(len(wanted)) for _ in range(3)] for _ in range(2)])

    ids = rows.ids(positions)

    assert ids.tolist() == [[wanted[p] for p in line] for line in positions.tolist()]


@given(ANY)
def test_any_id_has_as_many_rows_below_as_the_model_counts(table: Table) -> None:
    ids, wanted = table.some_ids(), table.rows()

    below = table.row_set().count_below(ids)

    assert below.tolist() == [sum(row < i for row in wanted) for i in ids.tolist()]


@given(ANY)
def test_of_a_row_the_count_below_is_its_position(table: Table) -> None:
    rows = table.row_set()
    positions = np.arange(len(rows))

    assert rows.count_below(rows.ids(positions)).tolist() == positions.tolist()


@given(ANY)
def test_only_rows_are_contained(table: Table) -> None:
    ids, wanted = table.some_ids(), set(table.rows())

    contained = table.row_set().contains(ids)

    assert contained.dtype == bool
    assert contained.tolist() == [i in wanted for i in ids.tolist()]


@given(ANY)
def test_ids_may_have_any_shape(table: Table) -> None:
    rows = table.row_set()
    line = table.some_ids()[:12]
    block = line.reshape(3, 4)

    assert rows.contains(block).tolist() == rows.contains(line).reshape(3, 4).tolist()
    assert rows.count_below(block).tolist() == rows.count_below(line).reshape(3, 4).tolist()
    assert np.shape(rows.contains(line[0])) == np.shape(rows.count_below(line[0])) == ()


@given(ANY)
def test_each_row_is_in_its_lane(table: Table) -> None:
    rows = table.row_set()

    lanes = rows.lanes(np.array(table.rows(), np.int64))

    lane_of = {row: lane for lane, ids in table.lanes().items() for row in ids}
    assert lanes.dtype == np.int64
    assert lanes.tolist() == [lane_of[row] for row in table.rows()]


# Lanes


@given(ANY, st.integers(0, 12), st.integers(0, 12))
def test_a_path_follows_the_lane_to_the_row_that_is_to_come(
    table: Table, behind: int, ahead: int
) -> None:
    wanted = table.rows()

    path = table.row_set().path(np.array(wanted, np.int64), behind, ahead)

    assert path.dtype == np.int64
    assert path.shape == (len(wanted), behind + 1 + ahead)
    assert path.tolist() == [table.path(row, behind, ahead) for row in wanted]


@given(ANY, st.randoms())
def test_the_rows_of_a_path_may_come_in_any_order_and_more_than_once(
    table: Table, random: Any
) -> None:
    wanted = table.rows()
    if not wanted:
        return
    ids = [random.choice(wanted) for _ in range(9)]

    path = table.row_set().path(np.array(ids, np.int64), 2, 3)

    assert path.tolist() == [table.path(row, 2, 3) for row in ids]


@given(ANY)
def test_an_id_that_is_no_row_never_counts_as_one(table: Table) -> None:
    rows = table.row_set()
    wanted = table.rows()
    longest = len(wanted) + 2

    path = rows.path(np.array(wanted, np.int64), longest, longest)

    contained = rows.contains(path)
    assert contained.tolist() == [[i in set(wanted) for i in line] for line in path.tolist()]
    lanes = table.lanes()
    for line, there in zip(path, contained, strict=True):
        assert line[there].tolist() in lanes.values()


@given(ANY)
def test_segments_are_linked_within_their_lanes(table: Table) -> None:
    links = table.linked()
    n = len(table.segments)
    newest = {lane: i for i, (lane, _) in enumerate(table.segments)}

    for i, (lane, used) in enumerate(table.segments):
        ids = table.lanes()[lane]
        before = [row for row in ids if row < table.start(i)]
        after = [row for row in ids if row >= table.start(i + 1)]
        if used:
            assert links.following[i] == (after[0] if after else table.next_id(lane))
        if used or newest[lane] == i:
            assert links.preceding[i] == (before[-1] if before else NONE)
    used_before = [sum(used for _, used in table.segments[:i]) for i in range(n + 1)]
    assert links.bounds.tolist() == used_before
    assert {a.dtype for a in (links.following, links.preceding, links.bounds)} == {
        np.dtype(np.int64)
    }


@given(ANY)
def test_linking_leaves_what_it_was_given_as_it_was(table: Table) -> None:
    links = table.linked()

    assert list(zip(links.lane.tolist(), links.used.tolist(), strict=True)) == list(table.segments)


# The rules one by one; segments have four ids


@pytest.mark.parametrize(
    ("segments", "row", "wanted"),
    [
        # A lane goes on in its next segment, past those of other lanes.
        (((0, 4), (1, 4), (0, 2)), 3, [1, 2, 3, 8, 9, 10]),
        (((0, 4), (1, 4), (0, 2)), 8, [2, 3, 8, 9, 10, NONE]),
        # What is unused of an older segment is passed over, in both directions.
        (((0, 2), (0, 3)), 1, [NONE, 0, 1, 4, 5, 6]),
        (((0, 2), (0, 3)), 4, [0, 1, 4, 5, 6, 7]),
        # So is an empty segment, unless the next row will be there.
        (((0, 2), (0, 0), (0, 1)), 1, [NONE, 0, 1, 8, 9, NONE]),
        (((0, 2), (0, 0), (0, 1)), 8, [0, 1, 8, 9, NONE, NONE]),
        (((0, 4), (1, 1), (0, 0)), 3, [1, 2, 3, 8, NONE, NONE]),
        (((0, 2), (0, 0)), 1, [NONE, 0, 1, 4, NONE, NONE]),
        (((0, 2), (0, 0), (0, 0)), 1, [NONE, 0, 1, 8, NONE, NONE]),
        # Behind a full newest segment it is not known where the next row will be.
        (((0, 4), (1, 2)), 3, [1, 2, 3, NONE, NONE, NONE]),
        # One that was passed over belongs to no lane.
        (((0, 4), (NOBODY, 0), (0, 1)), 3, [1, 2, 3, 8, 9, NONE]),
    ],
)
def test_the_rules_of_a_path(
    segments: tuple[tuple[int, int], ...], row: int, wanted: list[int]
) -> None:
    table = Table(4, 0, segments)

    assert table.row_set().path(np.array([row]), 2, 3).tolist() == [wanted]
    assert table.path(row, 2, 3) == wanted


def test_a_lane_whose_beginning_was_evicted_begins_later() -> None:
    table = Table(4, 5, ((1, 4), (0, 3)))
    rows = table.row_set()

    path = rows.path(np.array([20, 24]), 2, 1)

    assert path.tolist() == [[NONE, NONE, 20, 21], [NONE, NONE, 24, 25]]
    assert rows.contains(np.array([16, 19, 20, 23, 26, 27])).tolist() == [
        *(False, False),
        *(True, True),
        *(True, False),
    ]
    assert rows.count_below(np.array([-1, 0, 19, 20, 21, 27, 99])).tolist() == [0, 0, 0, 0, 1, 7, 7]


@pytest.mark.parametrize("segments", [(), ((0, 0),), ((1, 0), (NOBODY, 0), (1, 0))])
def test_a_table_without_rows_has_none(segments: tuple[tuple[int, int], ...]) -> None:
    table = Table(4, 3, segments)
    rows, none = table.row_set(), np.zeros(0, np.int64)

    assert len(rows) == 0
    assert not rows.contains(table.some_ids()).any()
    assert not rows.count_below(table.some_ids()).any()
    assert rows.ids(none).shape == rows.lanes(none).shape == (0,)
    assert rows.path(none, 2, 3).shape == (0, 6)


# All ids are rows, of one lane


RANGES = st.tuples(st.integers(0, 20), st.integers(0, 15)).map(lambda r: (r[0], r[0] + r[1]))


@given(RANGES)
@example((0, 0))
def test_without_a_table_every_id_is_a_row(ids: tuple[int, int]) -> None:
    first, stop = ids
    rows, wanted = RowSet(first, stop), list(range(first, stop))
    around = np.arange(first - 5, stop + 5)

    assert len(rows) == len(wanted)
    assert rows.ids(np.arange(len(wanted))).tolist() == wanted
    assert rows.contains(around).tolist() == [i in wanted for i in around.tolist()]
    assert rows.count_below(around).tolist() == [
        sum(row < i for row in wanted) for i in around.tolist()
    ]
    lanes = rows.lanes(np.array(wanted, np.int64))
    assert (lanes.dtype, lanes.tolist()) == (np.int64, [0] * len(wanted))


@given(RANGES, st.integers(0, 12), st.integers(0, 12))
def test_without_a_table_a_path_leaves_the_rows_for_ids_that_are_none(
    ids: tuple[int, int], behind: int, ahead: int
) -> None:
    first, stop = ids
    rows, wanted = RowSet(first, stop), list(range(first, stop))

    path = rows.path(np.array(wanted, np.int64), behind, ahead)

    assert path.dtype == np.int64
    assert path.shape == (len(wanted), behind + 1 + ahead)
    for row, line in zip(wanted, path.tolist(), strict=True):
        for place, i in enumerate(line):
            there = row - behind + place
            assert i == there if first <= there < stop else i not in wanted
    if wanted and ahead:
        # The row that is to come.
        assert path[-1, behind + 1] == stop


@given(st.integers(1, 5), st.lists(st.just(0), max_size=6), st.integers(0, 4))
def test_full_segments_of_one_lane_are_as_no_table(
    segment_rows: int, full: list[int], first: int
) -> None:
    table = Table(segment_rows, first, tuple((0, segment_rows) for _ in full))
    tabled, plain = table.row_set(), RowSet(table.start(0), table.stop)
    ids, wanted = table.some_ids(), np.array(table.rows(), np.int64)

    assert len(tabled) == len(plain)
    assert tabled.contains(ids).tolist() == plain.contains(ids).tolist()
    assert tabled.count_below(ids).tolist() == plain.count_below(ids).tolist()
    paths, plain_paths = tabled.path(wanted, 3, 3), plain.path(wanted, 3, 3)
    known = plain.contains(plain_paths)
    assert tabled.contains(paths).tolist() == known.tolist()
    assert paths[known].tolist() == plain_paths[known].tolist()
