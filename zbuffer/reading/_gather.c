/* The hot loop of zbuffer: wanted rows out of compressed chunks into a batch.
 *
 *   windows()   the rows around drawn rows that make a sample (_windows.c)
 *   plan()      row ids to chunks, sorted (_plan.c)
 *   gather()    decode the blocks that hold the wanted rows, on several threads
 *   compress()  one raw chunk into one Blosc2 chunk, for sealing (_encode.c)
 *   map_file()  a read-only memory map that keeps no file descriptor (_map.c)
 *
 * All but the first two are free of the GIL while they work. Threads are started per call
 * and joined before it returns, and contexts are handed over through atomic slots,
 * so there is no lock and no pool that a forked child could inherit half-alive.
 */
#include "_native.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define MAX_THREADS 64

/* ------------------------------------------------------------------------ */
/* Decoders: one Blosc2 context and one block of scratch, used by one thread. */

typedef struct {
    /* One context for Blosc2 chunks and one for Blosc1 chunks: what the extended
     * header of the former has set is not reset by the short one of the latter. */
    blosc2_context *contexts[2];
    ZSTD_DCtx *zstd;
    bool spoilt; /* a chunk did not decode: its contexts may not be used again */
    uint8_t *scratch;
    size_t scratch_size;
} decoder;

static _Atomic(decoder *) idle_decoders[MAX_THREADS];

static void free_decoder(decoder *d)
{
    for (int i = 0; i < 2; i++)
        if (d->contexts[i] != NULL)
            blosc2_free_ctx(d->contexts[i]);
    ZSTD_freeDCtx(d->zstd);
    free(d->scratch);
    free(d);
}

static decoder *take_decoder(void)
{
    for (int i = 0; i < MAX_THREADS; i++) {
        decoder *d = atomic_exchange(&idle_decoders[i], NULL);
        if (d != NULL)
            return d;
    }
    decoder *d = calloc(1, sizeof(decoder));
    if (d == NULL)
        return NULL;
    blosc2_dparams params = BLOSC2_DPARAMS_DEFAULTS;
    params.nthreads = 1;
    for (int i = 0; i < 2; i++)
        d->contexts[i] = blosc2_create_dctx(params);
    d->zstd = ZSTD_createDCtx();
    if (d->contexts[0] == NULL || d->contexts[1] == NULL || d->zstd == NULL) {
        free_decoder(d);
        return NULL;
    }
    return d;
}

static void give_decoder(decoder *d)
{
    for (int i = 0; i < MAX_THREADS && !d->spoilt; i++) {
        decoder *none = NULL;
        if (atomic_compare_exchange_strong(&idle_decoders[i], &none, d))
            return;
    }
    free_decoder(d);
}

static bool reserve_scratch(decoder *d, size_t size)
{
    if (d->scratch_size >= size)
        return true;
    free(d->scratch);
    d->scratch = malloc(size);
    d->scratch_size = d->scratch == NULL ? 0 : size;
    return d->scratch != NULL;
}

/* ------------------------------------------------------------------------ */
/* gather                                                                    */

/* What a chunk's header says, as far as the gather needs it. `plain_codec` is the
 * codec of chunks whose blocks are one unfiltered zstd frame or LZ4 block each:
 * those are decoded without going through a Blosc2 context. */
enum plain_codec { OTHER = 0, PLAIN_LZ4 = 1, PLAIN_ZSTD = 4 };

typedef struct {
    int32_t blocksize;
    int32_t header_size;
    int32_t cbytes;
    int plain_codec;
} chunk_info;

enum failure { FINE = 0, NO_MEMORY, BAD_HEADER, BAD_BLOCK };

typedef struct {
    /* the request, read-only for the threads */
    uint8_t *dest;
    int64_t row_nbytes;
    int64_t chunk_nbytes;
    const plan_object *plan;
    /* entries of one group share their first block */
    int64_t *group_starts;
    chunk_info *group_chunk;
    int64_t n_groups;
    /* what the threads share */
    atomic_llong next_group;
    atomic_llong n_blocks;
    atomic_int failure;
    atomic_llong failed_entry;
} job;

static void fail(job *j, int failure, int64_t entry)
{
    int fine = FINE;
    if (atomic_compare_exchange_strong(&j->failure, &fine, failure))
        atomic_store(&j->failed_entry, entry);
}

static const chunk_info RAW_PAGE = {.blocksize = 1 << 16}; /* only a grain for the threads */

static int32_t read_int32(const uint8_t *at)
{
    int32_t value;
    memcpy(&value, at, 4); /* little-endian on every machine that Blosc2 wheels exist for */
    return value;
}

static int plain_codec_of(const uint8_t *chunk, int32_t cbytes, int32_t *header_size)
{
    const uint8_t flags = chunk[BLOSC2_CHUNK_FLAGS];
    const int codec = flags >> 5;
    *header_size = BLOSC_MIN_HEADER_LENGTH;
    if ((flags & (BLOSC_DOSHUFFLE | BLOSC_DOBITSHUFFLE)) == (BLOSC_DOSHUFFLE | BLOSC_DOBITSHUFFLE)) {
        /* Both bits at once announce Blosc2's extended header. */
        *header_size = BLOSC_EXTENDED_HEADER_LENGTH;
        if (cbytes < BLOSC_EXTENDED_HEADER_LENGTH)
            return OTHER;
        for (int i = 0; i < BLOSC2_MAX_FILTERS; i++)
            if (chunk[BLOSC2_CHUNK_FILTER_CODES + i] != BLOSC_NOFILTER)
                return OTHER;
        if (chunk[BLOSC2_CHUNK_BLOSC2_FLAGS2] != 0 || chunk[BLOSC2_CHUNK_BLOSC2_FLAGS] != 0)
            return OTHER;
    } else if (flags & (BLOSC_DOSHUFFLE | BLOSC_DOBITSHUFFLE | BLOSC_DODELTA)) {
        return OTHER;
    }
    const bool one_stream_per_block = flags & 0x10;
    if ((flags & BLOSC_MEMCPYED) || !one_stream_per_block)
        return OTHER;
    return codec == PLAIN_LZ4 || codec == PLAIN_ZSTD ? codec : OTHER;
}

/* Read a chunk's header; false where it does not agree with what the schema says. */
static bool describe_chunk(const job *j, const uint8_t *chunk, int64_t size, chunk_info *info)
{
    int32_t nbytes, cbytes, blocksize;
    if (size < BLOSC_MIN_HEADER_LENGTH)
        return false;
    if (blosc2_cbuffer_sizes(chunk, &nbytes, &cbytes, &blocksize) < 0)
        return false;
    if (nbytes != j->chunk_nbytes || cbytes > size || cbytes < BLOSC_MIN_HEADER_LENGTH)
        return false;
    if (blocksize <= 0 || blocksize > nbytes)
        return false;
    info->blocksize = blocksize;
    info->cbytes = cbytes;
    info->plain_codec = plain_codec_of(chunk, cbytes, &info->header_size);
    return true;
}

static bool plan_groups(job *j)
{
    j->group_starts = malloc(sizeof(int64_t) * (size_t)(j->plan->n + 1));
    j->group_chunk = malloc(sizeof(chunk_info) * (size_t)(j->plan->n + 1));
    if (j->group_starts == NULL || j->group_chunk == NULL) {
        fail(j, NO_MEMORY, 0);
        return false;
    }
    chunk_info info = RAW_PAGE;
    int64_t last_block = -1;
    for (int64_t i = 0; i < j->plan->n; i++) {
        bool same_chunk = i > 0 && j->plan->addrs[i] == j->plan->addrs[i - 1];
        if (!same_chunk) {
            if (j->plan->sizes[i] < 0) {
                info = RAW_PAGE;
            } else if (!describe_chunk(j, (const uint8_t *)(uintptr_t)j->plan->addrs[i], j->plan->sizes[i],
                                       &info)) {
                fail(j, BAD_HEADER, i);
                return false;
            }
        }
        int64_t block = j->plan->rows[i] * j->row_nbytes / info.blocksize;
        if (!same_chunk || block != last_block) {
            j->group_starts[j->n_groups] = i;
            j->group_chunk[j->n_groups] = info;
            j->n_groups++;
            last_block = block;
        }
    }
    j->group_starts[j->n_groups] = j->plan->n;
    return true;
}

/* Decode at least the first `wanted` bytes of one block into `dest`, which holds `length`. */
static bool decode_block(decoder *d, const job *j, int64_t entry, const chunk_info *info,
                         int64_t block, int64_t length, int64_t wanted, uint8_t *dest)
{
    const uint8_t *chunk = (const uint8_t *)(uintptr_t)j->plan->addrs[entry];
    if (info->plain_codec != OTHER) {
        const int64_t start_at = info->header_size + 4 * block;
        if (start_at + 4 > info->cbytes)
            return false;
        const int64_t start = read_int32(chunk + start_at);
        if (start < info->header_size || start + 4 > info->cbytes)
            return false;
        const int64_t csize = read_int32(chunk + start);
        const uint8_t *stream = chunk + start + 4;
        if (csize > info->cbytes - start - 4)
            return false;
        if (csize == length) {
            memcpy(dest, stream, (size_t)wanted);
            return true;
        }
        if (csize > 0 && info->plain_codec == PLAIN_ZSTD)
            return ZSTD_decompressDCtx(d->zstd, dest, (size_t)length, stream, (size_t)csize) ==
                   (size_t)length;
        if (csize > 0)
            return LZ4_decompress_safe_partial((const char *)stream, (char *)dest, (int)csize,
                                               (int)wanted, (int)length) >= wanted;
        /* Zero and negative sizes mark runs of one byte: left to Blosc2. */
    }
    blosc2_context *context = d->contexts[info->header_size == BLOSC_EXTENDED_HEADER_LENGTH];
    return blosc2_getitem_bytes_ctx(context, chunk, (int32_t)j->plan->sizes[entry],
                                    (int32_t)(block * info->blocksize), (int32_t)length, dest,
                                    (int32_t)length) == length;
}

/* One past the last byte of `block` that the entries of this group want. */
static int64_t last_wanted_byte(const job *j, int64_t group, int64_t block, int64_t blocksize,
                                int64_t length)
{
    const int64_t last = j->plan->rows[j->group_starts[group + 1] - 1];
    const int64_t stop = (last + 1) * j->row_nbytes - block * blocksize;
    return stop < length ? stop : length;
}

static void gather_group(job *j, decoder *d, int64_t group, int64_t *n_blocks)
{
    const chunk_info *info = &j->group_chunk[group];
    const int64_t blocksize = info->blocksize;
    const int64_t row_nbytes = j->row_nbytes;
    int64_t in_scratch = -1;

    for (int64_t i = j->group_starts[group]; i < j->group_starts[group + 1]; i++) {
        uint8_t *dest = j->dest + j->plan->slots[i] * row_nbytes;
        if (i > j->group_starts[group] && j->plan->rows[i] == j->plan->rows[i - 1]) {
            memcpy(dest, j->dest + j->plan->slots[i - 1] * row_nbytes, (size_t)row_nbytes);
            continue;
        }
        int64_t start = j->plan->rows[i] * row_nbytes;
        const int64_t stop = start + row_nbytes;
        if (j->plan->sizes[i] < 0) {
            memcpy(dest, (const uint8_t *)(uintptr_t)j->plan->addrs[i] + start, (size_t)row_nbytes);
            continue;
        }
        while (start < stop) {
            const int64_t block = start / blocksize;
            const int64_t first = block * blocksize;
            int64_t length = j->chunk_nbytes - first;
            if (length > blocksize)
                length = blocksize;
            int64_t part = first + length - start;
            if (part > stop - start)
                part = stop - start;
            const bool whole = part == length;
            if (whole || block != in_scratch) {
                const int64_t wanted =
                    whole ? length : last_wanted_byte(j, group, block, blocksize, length);
                if (!decode_block(d, j, i, info, block, length, wanted,
                                  whole ? dest : d->scratch)) {
                    d->spoilt = true;
                    fail(j, BAD_BLOCK, i);
                    return;
                }
                (*n_blocks)++;
                if (!whole)
                    in_scratch = block;
            }
            if (!whole)
                memcpy(dest, d->scratch + (start - first), (size_t)part);
            dest += part;
            start += part;
        }
    }
}

/* Groups that a thread takes at a time. */
enum { GROUPS_AT_ONCE = 4 };

/* Compressed blocks lie anywhere, in no cache: have them on their way before the first
 * is decoded. First where each begins, then its first bytes. */
static void fetch_ahead(const job *j, int64_t first, int64_t stop)
{
    const uint8_t *starts_at[GROUPS_AT_ONCE] = {NULL};
    for (int64_t group = first; group < stop; group++) {
        const chunk_info *info = &j->group_chunk[group];
        const int64_t entry = j->group_starts[group];
        if (info->plain_codec == OTHER)
            continue;
        const int64_t block = j->plan->rows[entry] * j->row_nbytes / info->blocksize;
        const int64_t at = info->header_size + 4 * block;
        if (at + 4 > info->cbytes)
            continue; /* decode_block() will say so */
        starts_at[group - first] = (const uint8_t *)(uintptr_t)j->plan->addrs[entry] + at;
        __builtin_prefetch(starts_at[group - first]);
    }
    for (int64_t group = first; group < stop; group++) {
        const int64_t entry = j->group_starts[group];
        if (starts_at[group - first] == NULL)
            continue;
        const int64_t start = read_int32(starts_at[group - first]);
        if (start < 0 || start + 256 > j->group_chunk[group].cbytes)
            continue;
        const uint8_t *stream = (const uint8_t *)(uintptr_t)j->plan->addrs[entry] + start;
        for (int line = 0; line < 256; line += 64)
            __builtin_prefetch(stream + line);
    }
}

static void *run_worker(void *argument)
{
    job *j = argument;
    decoder *d = take_decoder();
    if (d == NULL) {
        fail(j, NO_MEMORY, 0);
        return NULL;
    }
    int64_t n_blocks = 0;
    while (atomic_load(&j->failure) == FINE) {
        const int64_t first = atomic_fetch_add(&j->next_group, GROUPS_AT_ONCE);
        if (first >= j->n_groups)
            break;
        int64_t stop = first + GROUPS_AT_ONCE;
        if (stop > j->n_groups)
            stop = j->n_groups;
        fetch_ahead(j, first, stop);
        for (int64_t group = first; group < stop && atomic_load(&j->failure) == FINE; group++) {
            if (reserve_scratch(d, (size_t)j->group_chunk[group].blocksize))
                gather_group(j, d, group, &n_blocks);
            else
                fail(j, NO_MEMORY, j->group_starts[group]);
        }
    }
    give_decoder(d);
    atomic_fetch_add(&j->n_blocks, n_blocks);
    return NULL;
}

static void run_job(job *j, int n_threads)
{
    if (!plan_groups(j))
        return;
    if (n_threads > MAX_THREADS)
        n_threads = MAX_THREADS;
    if (n_threads > j->n_groups / 4 + 1)
        n_threads = (int)(j->n_groups / 4 + 1);
    pthread_t threads[MAX_THREADS];
    int started = 0;
    while (started < n_threads - 1 &&
           pthread_create(&threads[started], NULL, run_worker, j) == 0)
        started++;
    /* The caller works too, so a machine that starts no thread is only slower. */
    run_worker(j);
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
}

static PyObject *py_gather(PyObject *module, PyObject *args)
{
    Py_buffer dest;
    PyObject *dest_object, *plan_argument;
    long long row_nbytes;
    int n_threads;
    if (!PyArg_ParseTuple(args, "OLOi", &dest_object, &row_nbytes, &plan_argument, &n_threads))
        return NULL;
    PyObject *plan_type = PyObject_GetAttrString(module, "Plan");
    if (plan_type == NULL)
        return NULL;
    const int is_plan = PyObject_IsInstance(plan_argument, plan_type);
    Py_DECREF(plan_type);
    if (is_plan < 0)
        return NULL;
    const plan_object *plan = (const plan_object *)plan_argument;
    if (!is_plan || row_nbytes <= 0 || row_nbytes > BLOSC2_MAX_BUFFERSIZE / plan->chunk_rows) {
        PyErr_SetString(PyExc_ValueError, "no plan, or rows too large for its chunks");
        return NULL;
    }
    if (PyObject_GetBuffer(dest_object, &dest, PyBUF_WRITABLE) < 0)
        return NULL;
    PyObject *result = NULL;
    if (dest.len / row_nbytes < plan->n) {
        PyErr_SetString(PyExc_ValueError, "the batch has no room for the rows of the plan");
        goto done;
    }
    job j = {
        .dest = dest.buf,
        .row_nbytes = row_nbytes,
        .chunk_nbytes = row_nbytes * plan->chunk_rows,
        .plan = plan,
    };
    Py_BEGIN_ALLOW_THREADS
    run_job(&j, n_threads);
    Py_END_ALLOW_THREADS
    free(j.group_starts);
    free(j.group_chunk);

    switch (atomic_load(&j.failure)) {
    case FINE:
        result = PyLong_FromLongLong(atomic_load(&j.n_blocks));
        break;
    case NO_MEMORY:
        PyErr_NoMemory();
        break;
    default: /* the caller knows which file the chunk is */
        result = PyLong_FromLongLong(-1 - plan->ids[atomic_load(&j.failed_entry)] / plan->chunk_rows);
    }
done:
    PyBuffer_Release(&dest);
    return result;
}

/* ------------------------------------------------------------------------ */

PyObject *new_object(PyObject *module, const char *type_name)
{
    PyObject *type = PyObject_GetAttrString(module, type_name);
    if (type == NULL)
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot((PyTypeObject *)type, Py_tp_alloc);
    PyObject *object = allocate((PyTypeObject *)type, 0);
    Py_DECREF(type);
    return object;
}

static PyMethodDef methods[] = {
    {"windows", py_windows, METH_VARARGS,
     "windows(ids, limit, window, rows, segments, step_type, reward, terminated, truncated, out)"
     "\n--\n\nFind the windows of rows; return how many there are."},
    {"plan", py_plan, METH_VARARGS,
     "plan(ids, first, stop, chunk_rows, base, addrs, sizes, owners, pending)\n--\n\n"
     "Return a Plan of the rows, or the list of chunks whose address the table lacks."},
    {"gather", py_gather, METH_VARARGS,
     "gather(dest, row_nbytes, plan, n_threads)\n--\n\n"
     "Fill rows of dest; return the number of blocks decoded, or minus one minus the chunk that "
     "failed."},
    {"compress", py_compress, METH_VARARGS,
     "compress(raw, typesize, blocksize, cname, clevel, filter, raw_literals)\n--\n\n"
     "Return raw as one Blosc2 chunk with unsplit blocks."},
    {"map_file", py_map_file, METH_O, "map_file(path)\n--\n\nMap a file read-only."},
    {NULL, NULL, 0, NULL},
};

static int add_type(PyObject *module, const char *name, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL)
        return -1;
    const int failed = PyModule_AddObjectRef(module, name, type);
    Py_DECREF(type);
    return failed;
}

static int exec_module(PyObject *module)
{
    blosc2_init();
    if (register_raw_literals_codec() < 0) {
        PyErr_SetString(PyExc_ImportError, "cannot register a codec with Blosc2");
        return -1;
    }
    if (add_type(module, "Plan", &plan_spec) < 0 ||
        add_type(module, "FileMap", &file_map_spec) < 0)
        return -1;
    return PyModule_AddStringConstant(module, "BLOSC2_VERSION", BLOSC2_VERSION_STRING);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, exec_module},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_gather",
    .m_doc = "Compressed chunks to batch rows, without the GIL.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__gather(void)
{
    return PyModuleDef_Init(&definition);
}
