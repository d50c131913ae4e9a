"""From what lies on disk to a writer: create, take over, sweep, recover."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from zbuffer.errors import DamagedError
from zbuffer.format import layout
from zbuffer.format.commit import MID, Commit
from zbuffer.format.tail import PageState
from zbuffer.reading.lanes import overlay
from zbuffer.reading.segments import read_segments
from zbuffer.schema import STEP_TYPE
from zbuffer.storage.local import LocalStore
from zbuffer.storage.pages import Page, page_file, page_numbers
from zbuffer.writing.segment_table import SegmentTable
from zbuffer.writing.stored import read_chunk


def write_new(store: LocalStore, commit: Commit) -> None:
    """Write an empty buffer, the root document last."""
    for path in layout.group_paths(list(commit.fields)):
        group = {"zarr_format": 3, "node_type": "group", "attributes": {}}
        store.write(f"{path}/zarr.json", layout.dump(group))
    for path, document in layout.array_documents(commit).items():
        store.write(f"{path}/zarr.json", layout.dump(document))
    store.write(layout.ROOT, layout.dump(layout.root_document(commit)))


def sweep(store: LocalStore, commit: Commit) -> None:
    """Remove what a crash left beside the commit."""
    stop = commit.stop_chunk
    chunks = {layout.field_path(name) + "/c/": (commit.first_chunk, stop) for name in commit.fields}
    for key, _ in store.walk("data"):
        orphan = key.endswith(layout.PARTIAL)
        for prefix, (first, last) in chunks.items():
            if key.startswith(prefix):
                number = key[len(prefix) :].split("/")[0]
                orphan |= number.isdigit() and not first <= int(number) < last
        if orphan:
            store.delete(key)
    for top in ("meta", layout.TAIL):
        for key, _ in store.walk(top):
            if key.endswith(layout.PARTIAL):
                store.delete(key)
        store.delete(layout.ROOT + layout.PARTIAL)


def recover_pages(
    store: LocalStore, commit: Commit, new_page: Callable[[Commit, int], Page]
) -> list[Page]:
    """Return the tail pages that hold the rows beyond the sealed chunks.

    The last one is the page to go on with. Rows of a process that was killed come
    back from its pages; a buffer that was closed gets a page with the rows of its
    part-filled last chunk.
    """
    root = store.file("")
    first = commit.rows // commit.chunk_rows
    pages: list[Page] = []
    committed_page: Page | None = None
    for chunk in page_numbers(root):
        if chunk == first - 1 and commit.rows == first * commit.chunk_rows:
            # All its rows are committed, but what is pending may lie behind them.
            committed_page = Page(commit, page_file(root, chunk), chunk, writable=True)
        elif chunk < first:
            page_file(root, chunk).unlink()
        elif chunk == first + len(pages) and (not pages or _is_full(pages[-1], commit)):
            pages.append(Page(commit, page_file(root, chunk), chunk, writable=True))
        else:
            raise DamagedError(f"{page_file(root, chunk)} does not follow the rows before it")
    committed = commit.rows - first * commit.chunk_rows
    if pages and pages[0].state.count < committed:
        # An older page than the chunk: its writer was closed without removing it.
        for page in pages:
            page.unlink()
        pages = []
    if not pages:
        pages.append(new_page(commit, first))
        if committed:
            _refill(store, commit, pages[0], committed)
    before = pages[-2] if len(pages) > 1 else committed_page
    if before is not None and pages[-1].state == PageState() and before.state.pending:
        # The writer died before it went on to a new page, or as it did: what was
        # pending is in the slot after the last row of the page before.
        for name in commit.schema.observations:
            pages[-1].columns[name][0] = before.columns[name][commit.chunk_rows]
        pages[-1].publish(PageState(0, pending=True))
    if committed_page is not None:
        committed_page.unlink()
    return pages


def recover_lanes(store: LocalStore, commit: Commit) -> list[Page]:
    """Return the pages that a writer of lanes left, oldest first; none is gone on with."""
    root = store.file("")
    pages = []
    for chunk in page_numbers(root):
        if chunk < commit.first_chunk:
            page_file(root, chunk).unlink()
        else:
            pages.append(Page(commit, page_file(root, chunk), chunk, writable=True))
    return pages


def lane_state(
    store: LocalStore, commit: Commit, pages: list[Page]
) -> tuple[SegmentTable, np.ndarray]:
    """Return the segments that there are, and the steps of each lane so far."""
    table = read_segments(store, commit)
    rows, _ = overlay(table, commit, {page.chunk: page for page in pages})
    size, first = commit.rows_of_segment, commit.first_chunk
    by_page = {page.chunk: page.columns[STEP_TYPE] for page in pages}
    # Only the newest segment of a lane has steps that the table does not count yet.
    newest = {lane: at for at, (lane, _, used) in enumerate(rows.tolist()) if lane >= 0 and used}
    steps = np.zeros(commit.lanes, np.int64)
    for lane, at in newest.items():
        chunk, place = divmod(at, commit.segments_of_chunk)
        column = by_page.get(first + chunk)
        if column is None:
            column = read_chunk(store, commit, STEP_TYPE, first + chunk)
        here = column[place * size : place * size + rows[at, 2]]
        steps[lane] = rows[at, 1] + np.count_nonzero(here <= MID)
    return SegmentTable(size, first * commit.segments_of_chunk, rows), steps


def take_over(commit: Commit) -> Commit:
    """Return the commit of the next writer."""
    return replace(commit, epoch=commit.epoch + 1)


def _is_full(page: Page, commit: Commit) -> bool:
    return page.state.count == commit.chunk_rows


def _refill(store: LocalStore, commit: Commit, page: Page, count: int) -> None:
    """Decode the part-filled last chunk back into a page."""
    for name, field in commit.fields.items():
        if field.nbytes > 0:
            page.columns[name][:count] = read_chunk(store, commit, name, page.chunk)[:count]
    page.publish(PageState(count))
