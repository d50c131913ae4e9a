/* plan(): row ids to the chunks that hold them, sorted, with the GIL held for microseconds. */
#include "_native.h"

#include <stdlib.h>
#include <string.h>

static void plan_dealloc(PyObject *self)
{
    plan_object *plan = (plan_object *)self;
    PyTypeObject *type = Py_TYPE(self);
    for (int64_t i = 0; i < plan->n_pinned; i++)
        Py_DECREF(plan->pinned[i]);
    free(plan->pinned);
    free(plan->ids); /* the first of five arrays in one piece */
    freefunc free_object = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_object(self);
    Py_DECREF(type);
}

static PyType_Slot plan_slots[] = {
    {Py_tp_doc, "Wanted rows and the chunks that hold them."},
    {Py_tp_dealloc, plan_dealloc},
    {0, NULL},
};

PyType_Spec plan_spec = {
    .name = "zbuffer.reading._gather.Plan",
    .basicsize = sizeof(plan_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = plan_slots,
};

/* Sort ids and slots by id, a byte at a time from the lowest; stable. The two spare
 * arrays are overwritten. */
static void sort_by_id(int64_t *ids, int64_t *slots, int64_t *spare_ids, int64_t *spare_slots,
                       int64_t n, int64_t least, int64_t most)
{
    const uint64_t range = (uint64_t)most - (uint64_t)least;
    int64_t *from_ids = ids, *from_slots = slots, *to_ids = spare_ids, *to_slots = spare_slots;
    for (int shift = 0; shift < 64 && range >> shift; shift += 8) {
        int64_t starts[257] = {0};
        for (int64_t i = 0; i < n; i++)
            starts[((uint64_t)(from_ids[i] - least) >> shift & 255) + 1]++;
        for (int byte = 0; byte < 256; byte++)
            starts[byte + 1] += starts[byte];
        for (int64_t i = 0; i < n; i++) {
            const int64_t at = starts[(uint64_t)(from_ids[i] - least) >> shift & 255]++;
            to_ids[at] = from_ids[i];
            to_slots[at] = from_slots[i];
        }
        int64_t *swap = from_ids;
        from_ids = to_ids, to_ids = swap;
        swap = from_slots, from_slots = to_slots, to_slots = swap;
    }
    if (from_ids != ids) {
        memcpy(ids, from_ids, sizeof(int64_t) * (size_t)n);
        memcpy(slots, from_slots, sizeof(int64_t) * (size_t)n);
    }
}

static plan_object *new_plan(PyObject *module, int64_t n)
{
    plan_object *plan = (plan_object *)new_object(module, "Plan");
    if (plan == NULL)
        return NULL;
    const size_t count = n > 0 ? (size_t)n : 1;
    plan->ids = malloc(5 * sizeof(int64_t) * count);
    if (plan->ids == NULL) {
        Py_DECREF(plan);
        PyErr_NoMemory();
        return NULL;
    }
    plan->n = n;
    plan->slots = plan->ids + count;
    plan->rows = plan->slots + count;
    plan->sizes = plan->rows + count;
    plan->addrs = (uint64_t *)(plan->sizes + count);
    return plan;
}

/* The table of what is known of chunks, from `base` on; an address of 0 is a chunk that is not. */
typedef struct {
    int64_t base;
    int64_t n;
    const uint64_t *addrs;
    const int64_t *sizes;
    PyObject *owners;
} chunk_table;

/* The one observation behind the newest row: its id, and its place in a raw page. */
typedef struct {
    long long id, addr, rows, row;
} pending_row;

/* Fill in where each entry lies; appends chunks that the table lacks to `missing`. */
static bool look_up(plan_object *plan, const chunk_table *table, const pending_row *pending,
                    PyObject *missing)
{
    int64_t chunk = INT64_MIN, at = -1;
    for (int64_t i = 0; i < plan->n; i++) {
        if (plan->ids[i] == pending->id) {
            plan->addrs[i] = (uint64_t)pending->addr;
            plan->sizes[i] = -pending->rows;
            plan->rows[i] = pending->row;
            continue;
        }
        if (plan->ids[i] / plan->chunk_rows != chunk) {
            chunk = plan->ids[i] / plan->chunk_rows;
            at = chunk - table->base;
            if (at < 0 || at >= table->n || table->addrs[at] == 0) {
                at = -1;
                PyObject *number = PyLong_FromLongLong(chunk);
                if (number == NULL || PyList_Append(missing, number) < 0) {
                    Py_XDECREF(number);
                    return false;
                }
                Py_DECREF(number);
            } else {
                PyObject *owner = PyList_GetItem(table->owners, at);
                if (owner == NULL)
                    return false;
                Py_INCREF(owner);
                plan->pinned[plan->n_pinned++] = owner;
            }
        }
        if (at < 0)
            continue;
        plan->addrs[i] = table->addrs[at];
        plan->sizes[i] = table->sizes[at];
        plan->rows[i] = plan->ids[i] - chunk * plan->chunk_rows;
    }
    return true;
}

static bool rows_fit(const plan_object *plan)
{
    for (int64_t i = 0; i < plan->n; i++) {
        const int64_t rows_there = plan->sizes[i] < 0 ? -plan->sizes[i] : plan->chunk_rows;
        if (plan->rows[i] < 0 || plan->rows[i] >= rows_there || plan->addrs[i] == 0 ||
            plan->sizes[i] > BLOSC2_MAX_BUFFERSIZE) {
            PyErr_Format(PyExc_ValueError, "row %lld lies outside its chunk",
                         (long long)plan->ids[i]);
            return false;
        }
    }
    return true;
}

static plan_object *make_plan(PyObject *module, const Py_buffer *ids, int64_t first, int64_t stop,
                              int64_t chunk_rows)
{
    const int64_t n = ids->len / 8;
    const int64_t *wanted = ids->buf;
    plan_object *plan = new_plan(module, n);
    if (plan == NULL)
        return NULL;
    plan->chunk_rows = chunk_rows;
    int64_t least = INT64_MAX, most = INT64_MIN, n_chunks = 0;
    bool ascending = true;
    for (int64_t i = 0; i < n; i++) {
        least = wanted[i] < least ? wanted[i] : least;
        ascending = ascending && wanted[i] >= most;
        most = wanted[i] > most ? wanted[i] : most;
        plan->ids[i] = wanted[i];
        plan->slots[i] = i;
    }
    if (n > 0 && (least < first || most >= stop || least < 0)) {
        PyErr_SetString(PyExc_IndexError, "ids outside the rows");
        Py_DECREF(plan);
        return NULL;
    }
    if (!ascending)
        sort_by_id(plan->ids, plan->slots, plan->rows, plan->sizes, n, least, most);
    for (int64_t i = 0, chunk = INT64_MIN; i < n; i++) {
        n_chunks += plan->ids[i] / chunk_rows != chunk;
        chunk = plan->ids[i] / chunk_rows;
    }
    plan->pinned = malloc(sizeof(PyObject *) * (size_t)(n_chunks + 1));
    if (plan->pinned == NULL) {
        Py_DECREF(plan);
        PyErr_NoMemory();
        return NULL;
    }
    return plan;
}

PyObject *py_plan(PyObject *module, PyObject *args)
{
    Py_buffer ids, addrs, sizes;
    chunk_table table;
    pending_row pending;
    long long first, stop, chunk_rows, base;
    if (!PyArg_ParseTuple(args, "y*LLLLy*y*O(LLLL)", &ids, &first, &stop, &chunk_rows, &base,
                          &addrs, &sizes, &table.owners, &pending.id, &pending.addr,
                          &pending.rows, &pending.row))
        return NULL;
    plan_object *plan = NULL;
    PyObject *missing = PyList_New(0);
    if (missing == NULL)
        goto done;
    if (chunk_rows <= 0 || ids.len % 8 || addrs.len % 8 || sizes.len != addrs.len ||
        !PyList_Check(table.owners) || PyList_Size(table.owners) != addrs.len / 8) {
        PyErr_SetString(PyExc_ValueError, "the table of chunks does not fit together");
        goto done;
    }
    table.base = base;
    table.n = addrs.len / 8;
    table.addrs = addrs.buf;
    table.sizes = sizes.buf;
    plan = make_plan(module, &ids, first, stop, chunk_rows);
    if (plan == NULL)
        goto done;
    const bool found = look_up(plan, &table, &pending, missing);
    if (!found || PyList_Size(missing) > 0 || !rows_fit(plan)) {
        Py_DECREF(plan);
        plan = NULL;
    }
done:
    PyBuffer_Release(&ids);
    PyBuffer_Release(&addrs);
    PyBuffer_Release(&sizes);
    if (plan != NULL || PyErr_Occurred()) {
        Py_XDECREF(missing);
        return (PyObject *)plan;
    }
    return missing;
}
