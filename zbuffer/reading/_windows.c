/* windows(): what resolve() of zbuffer.sampling.windows finds, row by row instead of
 * array by array. The Python function is the definition; this one is for speed. */
#include "_native.h"

#include <stdlib.h>
#include <string.h>

enum { FIRST = 0, MID = 1, LAST = 2, NO_ROW = 255, NO_ID = -1, FEW_PLACES = 64, MOST_PLACES = 4096 };

typedef struct {
    /* which ids are rows, and how they follow each other */
    int64_t first, stop;
    const int64_t *pending;
    int64_t n_pending;
    int64_t segment_rows; /* 0: one lane without gaps */
    int64_t first_segment, n_segments;
    const int64_t *used, *following, *preceding;
    /* the small fields, each with the id of its item 0; NULL where there is none */
    const uint8_t *step_type, *terminated, *truncated, *reward;
    int64_t step_type_base, terminated_base, truncated_base, reward_base;
} rows_view;

static bool find_segment(const rows_view *rows, int64_t id, int64_t *segment, int64_t *offset)
{
    if (id < rows->first || id >= rows->stop)
        return false;
    *segment = id / rows->segment_rows - rows->first_segment;
    *offset = id % rows->segment_rows;
    return *segment >= 0 && *segment < rows->n_segments;
}

static int type_of(const rows_view *rows, int64_t id)
{
    bool there = id >= rows->first && id < rows->stop;
    int64_t segment, offset;
    if (there && rows->segment_rows)
        there = find_segment(rows, id, &segment, &offset) && offset < rows->used[segment];
    if (there)
        return rows->step_type[id - rows->step_type_base];
    for (int64_t i = 0; i < rows->n_pending; i++)
        if (rows->pending[i] == id)
            return LAST;
    return NO_ROW;
}

static int64_t before(const rows_view *rows, int64_t id)
{
    int64_t segment, offset;
    if (!rows->segment_rows)
        return id - 1;
    if (!find_segment(rows, id, &segment, &offset))
        return NO_ID;
    return offset > 0 ? id - 1 : rows->preceding[segment];
}

static int64_t after(const rows_view *rows, int64_t id)
{
    int64_t segment, offset;
    if (!rows->segment_rows)
        return id + 1;
    if (!find_segment(rows, id, &segment, &offset) || offset >= rows->used[segment])
        return NO_ID;
    return offset + 1 < rows->used[segment] ? id + 1 : rows->following[segment];
}

/* What is wanted, and where it is put. */
typedef struct {
    int64_t stack, n_step;
    const double *powers;   /* gamma ** 0 to gamma ** n_step */
    int reward_kind;        /* 'f', 'd', or 'x': copied as it is, for one step */
    int64_t reward_nbytes;
    int64_t *ids, *stacks, *n_steps, *kept;
    uint8_t *reward, *terminated, *truncated, *mask;
    float *discount;
    int64_t *behind, *ahead; /* the path around the row that is looked at */
} window_out;

static void add_reward(const window_out *out, uint8_t *total, const uint8_t *here, int64_t j)
{
    if (out->n_step == 1) {
        memcpy(total, here, (size_t)out->reward_nbytes);
    } else if (out->reward_kind == 'f') {
        float sum, value;
        memcpy(&sum, total, sizeof sum);
        memcpy(&value, here, sizeof value);
        const float part = value * (float)out->powers[j];
        sum += part;
        memcpy(total, &sum, sizeof sum);
    } else {
        double sum, value;
        memcpy(&sum, total, sizeof sum);
        memcpy(&value, here, sizeof value);
        const double part = value * out->powers[j];
        sum += part;
        memcpy(total, &sum, sizeof sum);
    }
}

/* Find the window of one row, and write it as number `at`; false where there is none. */
static bool find_window(const rows_view *rows, const window_out *out, int64_t id, int64_t at)
{
    int64_t *behind = out->behind, *ahead = out->ahead;
    const int64_t k = out->stack, n = out->n_step;
    int64_t back = 0;
    behind[0] = ahead[0] = id;
    for (int64_t place = 0; place < k; place++) {
        const int type = type_of(rows, behind[back]);
        if (type > MID)
            return false;
        if (type == FIRST)
            break;
        if (place + 1 < k) {
            behind[back + 1] = before(rows, behind[back]);
            back++;
        }
    }
    int64_t n_steps = 0;
    bool terminated = false, truncated = false, mask = false;
    if (rows->reward != NULL && n > 0)
        memset(out->reward + at * out->reward_nbytes, 0, (size_t)out->reward_nbytes);
    for (int64_t j = 0; j < n; j++) {
        const int64_t row = ahead[j];
        ahead[j + 1] = after(rows, row);
        const int next = type_of(rows, ahead[j + 1]);
        const bool stored = next == MID || next == LAST;
        const bool ends =
            rows->terminated != NULL && rows->terminated[row - rows->terminated_base];
        if (!stored && !ends)
            break;
        terminated = ends;
        truncated = rows->truncated != NULL && rows->truncated[row - rows->truncated_base];
        mask = stored;
        n_steps++;
        if (rows->reward != NULL)
            add_reward(out, out->reward + at * out->reward_nbytes,
                       rows->reward + (row - rows->reward_base) * out->reward_nbytes, j);
        if (terminated || truncated || next != MID)
            break;
    }
    if (n > 0 && n_steps == 0)
        return false;
    /* The stack, and the stack after the steps; with one step they share all but a row. */
    const int64_t width = n == 0 ? k : n == 1 ? k + 1 : 2 * k;
    int64_t *stacks = out->stacks + at * width;
    for (int64_t p = 0; p < k; p++)
        stacks[p] = behind[k - 1 - p < back ? k - 1 - p : back];
    for (int64_t p = n == 1 ? k - 1 : 0; n > 0 && p < k; p++) {
        int64_t offset = p - (k - 1) + n_steps;
        if (offset < -back)
            offset = -back;
        int64_t *place = n == 1 ? stacks + k : stacks + k + p;
        *place = offset <= 0 ? behind[-offset] : ahead[offset];
        if (p == k - 1 && !mask)
            *place = id; /* a stand-in, blanked later */
    }
    out->ids[at] = id;
    out->n_steps[at] = n_steps;
    out->discount[at] = terminated ? 0.0f : (float)out->powers[n_steps];
    out->terminated[at] = terminated;
    out->truncated[at] = truncated;
    out->mask[at] = mask;
    return true;
}

/* Buffers of the arguments, released together. */
typedef struct {
    Py_buffer held[20];
    int n;
} buffers;

static void *get(buffers *b, PyObject *object, bool writable, int64_t least_nbytes)
{
    if (object == Py_None)
        return NULL;
    Py_buffer *view = &b->held[b->n];
    if (PyObject_GetBuffer(object, view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return NULL;
    b->n++;
    if (view->len < least_nbytes) {
        PyErr_SetString(PyExc_ValueError, "an array is too short");
        return NULL;
    }
    return view->buf;
}

PyObject *py_windows(PyObject *module, PyObject *args)
{
    (void)module;
    buffers b = {.n = 0};
    rows_view rows = {0};
    window_out out = {0};
    PyObject *ids_object, *pending, *step_type, *reward, *terminated, *truncated;
    PyObject *used, *following, *preceding, *powers;
    PyObject *o_ids, *o_stacks, *o_n_steps, *o_reward, *o_discount, *o_term, *o_trunc, *o_mask;
    PyObject *o_kept;
    long long limit, stack, n_step, first, stop, segment_rows, first_segment, reward_nbytes;
    long long bases[4];
    int kind;
    if (!PyArg_ParseTuple(args, "OL(LLOCL)(LLO)(LLOOO)(OL)(OL)(OL)(OL)(OOOOOOOOO)", &ids_object,
                          &limit, &stack, &n_step, &powers, &kind, &reward_nbytes, &first, &stop,
                          &pending, &segment_rows, &first_segment, &used, &following, &preceding,
                          &step_type, &bases[0], &reward, &bases[1], &terminated, &bases[2],
                          &truncated, &bases[3], &o_ids, &o_stacks, &o_n_steps, &o_reward,
                          &o_discount, &o_term, &o_trunc, &o_mask, &o_kept))
        return NULL;
    if (stack < 1 || n_step < 0 || stack >= MOST_PLACES || n_step >= MOST_PLACES || limit < 0 ||
        segment_rows < 0 || reward_nbytes < 0) {
        PyErr_SetString(PyExc_ValueError, "the window does not fit");
        return NULL;
    }
    out.stack = stack;
    out.n_step = n_step;
    out.reward_kind = kind;
    out.reward_nbytes = reward_nbytes;
    rows.first = first;
    rows.stop = stop;
    rows.segment_rows = segment_rows;
    rows.first_segment = first_segment;
    rows.step_type_base = bases[0];
    rows.reward_base = bases[1];
    rows.terminated_base = bases[2];
    rows.truncated_base = bases[3];
    const int64_t width = n_step == 0 ? stack : n_step == 1 ? stack + 1 : 2 * stack;

    const int64_t *ids = get(&b, ids_object, false, 0);
    const int64_t n = b.n ? b.held[b.n - 1].len / 8 : 0;
    rows.pending = get(&b, pending, false, 0);
    rows.n_pending = rows.pending == NULL ? 0 : b.held[b.n - 1].len / 8;
    rows.used = get(&b, used, false, 0);
    rows.n_segments = rows.used == NULL ? 0 : b.held[b.n - 1].len / 8;
    rows.following = get(&b, following, false, 8 * rows.n_segments);
    rows.preceding = get(&b, preceding, false, 8 * rows.n_segments);
    rows.step_type = get(&b, step_type, false, stop - bases[0]);
    rows.reward = get(&b, reward, false, (stop - bases[1]) * reward_nbytes);
    rows.terminated = get(&b, terminated, false, stop - bases[2]);
    rows.truncated = get(&b, truncated, false, stop - bases[3]);
    out.powers = get(&b, powers, false, 8 * (n_step + 1));
    out.ids = get(&b, o_ids, true, 8 * limit);
    out.stacks = get(&b, o_stacks, true, 8 * limit * width);
    out.n_steps = get(&b, o_n_steps, true, 8 * limit);
    out.reward = get(&b, o_reward, true, limit * reward_nbytes);
    out.discount = get(&b, o_discount, true, 4 * limit);
    out.terminated = get(&b, o_term, true, limit);
    out.truncated = get(&b, o_trunc, true, limit);
    out.mask = get(&b, o_mask, true, limit);
    out.kept = get(&b, o_kept, true, 8 * limit);

    PyObject *result = NULL;
    bool outside = first < bases[0] || (rows.reward != NULL && first < bases[1]) ||
                   (rows.terminated != NULL && first < bases[2]) ||
                   (rows.truncated != NULL && first < bases[3]);
    for (int64_t i = 0; i < n && !PyErr_Occurred(); i++)
        outside = outside || ids[i] < first || ids[i] >= stop;
    if (!PyErr_Occurred() && outside)
        PyErr_SetString(PyExc_ValueError, "ids outside the rows");
    if (!PyErr_Occurred()) {
        int64_t path[2 * FEW_PLACES], *more = NULL;
        out.behind = path;
        if (stack + n_step > FEW_PLACES) {
            out.behind = more = malloc(2 * sizeof(int64_t) * (size_t)(stack + n_step + 2));
            if (more == NULL)
                PyErr_NoMemory();
        }
        out.ahead = out.behind + stack;
        int64_t at = 0;
        for (int64_t i = 0; i < n && at < limit && out.behind != NULL; i++)
            if (find_window(&rows, &out, ids[i], at))
                out.kept[at++] = i;
        free(more);
        if (!PyErr_Occurred())
            result = PyLong_FromLongLong(at);
    }
    while (b.n > 0)
        PyBuffer_Release(&b.held[--b.n]);
    return result;
}
