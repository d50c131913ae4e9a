/* The hot loop of zbuffer: wanted rows out of compressed chunks into a batch.
 *
 * Three things live here, all free of the GIL while they work:
 *   gather()    decode the blocks that hold the wanted rows, on several threads
 *   compress()  one raw chunk into one Blosc2 chunk, for sealing
 *   map_file()  a read-only memory map that keeps no file descriptor
 *
 * Threads are started per call and joined before it returns, and contexts are
 * handed over through atomic slots, so there is no lock and no pool that a
 * forked child could inherit half-alive.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <blosc2.h>

#define MAX_THREADS 64

/* libblosc2.a carries zstd and LZ4 whole; the wheel ships no headers of theirs.
 * These are the parts of their stable interfaces that are used here, and one
 * zstd parameter that zstd counts as experimental (ZSTD_c_literalCompressionMode);
 * where it is refused, literals are compressed as usual. */
typedef struct ZSTD_CCtx_s ZSTD_CCtx;
typedef struct ZSTD_DCtx_s ZSTD_DCtx;
ZSTD_CCtx *ZSTD_createCCtx(void);
size_t ZSTD_freeCCtx(ZSTD_CCtx *);
size_t ZSTD_CCtx_setParameter(ZSTD_CCtx *, int parameter, int value);
size_t ZSTD_compress2(ZSTD_CCtx *, void *dst, size_t dst_size, const void *src, size_t src_size);
unsigned ZSTD_isError(size_t code);
int ZSTD_maxCLevel(void);
ZSTD_DCtx *ZSTD_createDCtx(void);
size_t ZSTD_freeDCtx(ZSTD_DCtx *);
size_t ZSTD_decompressDCtx(ZSTD_DCtx *, void *dst, size_t dst_size, const void *src,
                           size_t src_size);
int LZ4_decompress_safe_partial(const char *src, char *dst, int src_size, int wanted,
                                int dst_size);
enum { ZSTD_c_compressionLevel = 100, ZSTD_c_literalCompressionMode = 1002 };
enum { LITERALS_RAW = 2 };

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
    const uint64_t *addrs; /* per entry: where its chunk (or raw page) lies */
    const int64_t *sizes;  /* per entry: bytes of the chunk, or minus the rows of a raw page */
    const int64_t *rows;   /* per entry: row inside the chunk, ascending within it */
    const int64_t *slots;  /* per entry: row of `dest` to fill */
    int64_t n;
    /* the plan: entries of one group share their first block */
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
    j->group_starts = malloc(sizeof(int64_t) * (size_t)(j->n + 1));
    j->group_chunk = malloc(sizeof(chunk_info) * (size_t)(j->n + 1));
    if (j->group_starts == NULL || j->group_chunk == NULL) {
        fail(j, NO_MEMORY, 0);
        return false;
    }
    chunk_info info = RAW_PAGE;
    int64_t last_block = -1;
    for (int64_t i = 0; i < j->n; i++) {
        bool same_chunk = i > 0 && j->addrs[i] == j->addrs[i - 1];
        if (!same_chunk) {
            if (j->sizes[i] < 0) {
                info = RAW_PAGE;
            } else if (!describe_chunk(j, (const uint8_t *)(uintptr_t)j->addrs[i], j->sizes[i],
                                       &info)) {
                fail(j, BAD_HEADER, i);
                return false;
            }
        }
        int64_t block = j->rows[i] * j->row_nbytes / info.blocksize;
        if (!same_chunk || block != last_block) {
            j->group_starts[j->n_groups] = i;
            j->group_chunk[j->n_groups] = info;
            j->n_groups++;
            last_block = block;
        }
    }
    j->group_starts[j->n_groups] = j->n;
    return true;
}

/* Decode at least the first `wanted` bytes of one block into `dest`, which holds `length`. */
static bool decode_block(decoder *d, const job *j, int64_t entry, const chunk_info *info,
                         int64_t block, int64_t length, int64_t wanted, uint8_t *dest)
{
    const uint8_t *chunk = (const uint8_t *)(uintptr_t)j->addrs[entry];
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
    return blosc2_getitem_bytes_ctx(context, chunk, (int32_t)j->sizes[entry],
                                    (int32_t)(block * info->blocksize), (int32_t)length, dest,
                                    (int32_t)length) == length;
}

/* One past the last byte of `block` that the entries of this group want. */
static int64_t last_wanted_byte(const job *j, int64_t group, int64_t block, int64_t blocksize,
                                int64_t length)
{
    const int64_t last = j->rows[j->group_starts[group + 1] - 1];
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
        uint8_t *dest = j->dest + j->slots[i] * row_nbytes;
        if (i > j->group_starts[group] && j->rows[i] == j->rows[i - 1]) {
            memcpy(dest, j->dest + j->slots[i - 1] * row_nbytes, (size_t)row_nbytes);
            continue;
        }
        int64_t start = j->rows[i] * row_nbytes;
        const int64_t stop = start + row_nbytes;
        if (j->sizes[i] < 0) {
            memcpy(dest, (const uint8_t *)(uintptr_t)j->addrs[i] + start, (size_t)row_nbytes);
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

static void *run_worker(void *argument)
{
    job *j = argument;
    decoder *d = take_decoder();
    if (d == NULL) {
        fail(j, NO_MEMORY, 0);
        return NULL;
    }
    int64_t n_blocks = 0;
    for (;;) {
        int64_t group = atomic_fetch_add(&j->next_group, 1);
        if (group >= j->n_groups || atomic_load(&j->failure) != FINE)
            break;
        if (!reserve_scratch(d, (size_t)j->group_chunk[group].blocksize)) {
            fail(j, NO_MEMORY, j->group_starts[group]);
            break;
        }
        gather_group(j, d, group, &n_blocks);
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

static bool get_array(PyObject *object, Py_buffer *view, int64_t n, const char *name)
{
    if (PyObject_GetBuffer(object, view, PyBUF_SIMPLE) < 0)
        return false;
    if (view->len != n * 8) {
        PyErr_Format(PyExc_ValueError, "%s must hold %lld items of 8 bytes", name, (long long)n);
        PyBuffer_Release(view);
        return false;
    }
    return true;
}

static PyObject *py_gather(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *dest_object, *addrs_object, *sizes_object, *rows_object, *slots_object;
    long long row_nbytes, chunk_nbytes, n;
    int n_threads;
    if (!PyArg_ParseTuple(args, "OLLLOOOOi", &dest_object, &row_nbytes, &chunk_nbytes, &n,
                          &addrs_object, &sizes_object, &rows_object, &slots_object, &n_threads))
        return NULL;
    if (row_nbytes <= 0 || chunk_nbytes < row_nbytes || chunk_nbytes % row_nbytes != 0 ||
        chunk_nbytes > BLOSC2_MAX_BUFFERSIZE || n < 0) {
        PyErr_SetString(PyExc_ValueError, "row_nbytes and chunk_nbytes do not fit together");
        return NULL;
    }

    PyObject *result = NULL;
    Py_buffer dest, addrs, sizes, rows, slots;
    if (PyObject_GetBuffer(dest_object, &dest, PyBUF_WRITABLE) < 0)
        return NULL;
    if (!get_array(addrs_object, &addrs, n, "addrs"))
        goto release_dest;
    if (!get_array(sizes_object, &sizes, n, "sizes"))
        goto release_addrs;
    if (!get_array(rows_object, &rows, n, "rows"))
        goto release_sizes;
    if (!get_array(slots_object, &slots, n, "slots"))
        goto release_rows;

    job j = {
        .dest = dest.buf,
        .row_nbytes = row_nbytes,
        .chunk_nbytes = chunk_nbytes,
        .addrs = addrs.buf,
        .sizes = sizes.buf,
        .rows = rows.buf,
        .slots = slots.buf,
        .n = n,
    };
    const int64_t chunk_rows = chunk_nbytes / row_nbytes;
    const int64_t dest_rows = dest.len / row_nbytes;
    for (int64_t i = 0; i < n; i++) {
        const int64_t rows_there = j.sizes[i] < 0 ? -j.sizes[i] : chunk_rows;
        if (j.rows[i] < 0 || j.rows[i] >= rows_there || j.slots[i] < 0 ||
            j.slots[i] >= dest_rows || j.sizes[i] > BLOSC2_MAX_BUFFERSIZE || j.addrs[i] == 0) {
            PyErr_Format(PyExc_ValueError, "entry %lld lies outside its chunk or the batch",
                         (long long)i);
            goto release_slots;
        }
    }

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
    default:
        /* The caller knows which file the entry came from. */
        result = PyLong_FromLongLong(-1 - (long long)atomic_load(&j.failed_entry));
    }

release_slots:
    PyBuffer_Release(&slots);
release_rows:
    PyBuffer_Release(&rows);
release_sizes:
    PyBuffer_Release(&sizes);
release_addrs:
    PyBuffer_Release(&addrs);
release_dest:
    PyBuffer_Release(&dest);
    return result;
}

/* ------------------------------------------------------------------------ */
/* compress                                                                  */

/* Frames decode a quarter faster when zstd leaves their literals uncompressed:
 * most of a block is matches, and the Huffman table costs more than the few
 * literals save. Blosc2 offers no such switch, so zstd is called through a codec
 * of our own, private to this copy of the library, and the chunk is then marked
 * as what it is: plain zstd. Every Blosc2 decoder reads it. */
enum { RAW_LITERALS_CODEC = 200 };

static int encode_raw_literals(const uint8_t *input, int32_t input_len, uint8_t *output,
                               int32_t output_len, uint8_t meta, blosc2_cparams *params,
                               const void *chunk)
{
    (void)meta;
    (void)chunk;
    size_t size = ZSTD_compress2(params->codec_params, output, (size_t)output_len, input,
                                 (size_t)input_len);
    return ZSTD_isError(size) ? 0 : (int)size; /* 0: does not fit, stored as it is */
}

static int decode_nothing(const uint8_t *input, int32_t input_len, uint8_t *output,
                          int32_t output_len, uint8_t meta, blosc2_dparams *params,
                          const void *chunk)
{
    (void)input, (void)input_len, (void)output, (void)output_len;
    (void)meta, (void)params, (void)chunk;
    return BLOSC2_ERROR_CODEC_SUPPORT; /* such a chunk never leaves compress() */
}

static void mark_as_zstd(uint8_t *chunk)
{
    chunk[BLOSC2_CHUNK_FLAGS] =
        (uint8_t)((chunk[BLOSC2_CHUNK_FLAGS] & 0x1f) | (BLOSC_ZSTD_FORMAT << 5));
    chunk[BLOSC2_CHUNK_VERSIONLZ] = BLOSC_ZSTD_VERSION_FORMAT;
    chunk[BLOSC2_CHUNK_FILTER_CODES + BLOSC2_MAX_FILTERS] = BLOSC_ZSTD;
}

static ZSTD_CCtx *raw_literals_encoder(int clevel)
{
    ZSTD_CCtx *zstd = ZSTD_createCCtx();
    if (zstd == NULL)
        return NULL;
    /* Blosc takes zstd's level 2 * clevel - 1. Two below that, frames come out as
     * small and decode as fast, and are encoded faster (measured at clevel 5). */
    const int level = clevel < 9 ? 2 * clevel - 3 : ZSTD_maxCLevel();
    ZSTD_CCtx_setParameter(zstd, ZSTD_c_compressionLevel, level < 1 ? 1 : level);
    ZSTD_CCtx_setParameter(zstd, ZSTD_c_literalCompressionMode, LITERALS_RAW);
    return zstd;
}

static PyObject *py_compress(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer raw;
    const char *cname;
    int typesize, blocksize, clevel, filter, raw_literals;
    if (!PyArg_ParseTuple(args, "y*iisiip", &raw, &typesize, &blocksize, &cname, &clevel, &filter,
                          &raw_literals))
        return NULL;

    PyObject *result = NULL;
    uint8_t *packed = NULL;
    int compcode = blosc2_compname_to_compcode(cname);
    if (compcode < 0 || raw.len > BLOSC2_MAX_BUFFERSIZE ||
        (raw_literals && compcode != BLOSC_ZSTD)) {
        PyErr_SetString(PyExc_ValueError, "unknown compressor, or a chunk over 2 GiB");
        goto done;
    }
    packed = malloc((size_t)raw.len + BLOSC2_MAX_OVERHEAD);
    if (packed == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    int size = -1;
    Py_BEGIN_ALLOW_THREADS
    blosc2_cparams params = BLOSC2_CPARAMS_DEFAULTS;
    params.compcode = (uint8_t)(raw_literals ? RAW_LITERALS_CODEC : compcode);
    params.codec_params = raw_literals ? raw_literals_encoder(clevel) : NULL;
    params.clevel = (uint8_t)clevel;
    params.typesize = typesize;
    params.blocksize = blocksize;
    params.nthreads = 1;
    params.splitmode = BLOSC_NEVER_SPLIT;
    memset(params.filters, 0, sizeof(params.filters));
    params.filters[BLOSC2_MAX_FILTERS - 1] = (uint8_t)filter;
    blosc2_context *context = NULL;
    if (!raw_literals || params.codec_params != NULL)
        context = blosc2_create_cctx(params);
    if (context != NULL) {
        size = blosc2_compress_ctx(context, raw.buf, (int32_t)raw.len, packed,
                                   (int32_t)(raw.len + BLOSC2_MAX_OVERHEAD));
        blosc2_free_ctx(context);
    }
    ZSTD_freeCCtx(params.codec_params);
    if (raw_literals && size > 0)
        mark_as_zstd(packed);
    Py_END_ALLOW_THREADS
    if (size <= 0)
        PyErr_Format(PyExc_RuntimeError, "Blosc2 could not compress a chunk (code %d)", size);
    else
        result = PyBytes_FromStringAndSize((const char *)packed, size);
done:
    free(packed);
    PyBuffer_Release(&raw);
    return result;
}

/* ------------------------------------------------------------------------ */
/* map_file                                                                  */

typedef struct {
    PyObject_HEAD
    void *address;
    Py_ssize_t nbytes;
} file_map;

static void file_map_dealloc(PyObject *self)
{
    file_map *map = (file_map *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (map->address != NULL)
        munmap(map->address, (size_t)map->nbytes);
    freefunc free_object = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_object(self);
    Py_DECREF(type);
}

static int file_map_getbuffer(PyObject *self, Py_buffer *view, int flags)
{
    file_map *map = (file_map *)self;
    return PyBuffer_FillInfo(view, self, map->address, map->nbytes, 1, flags);
}

static PyType_Slot file_map_slots[] = {
    {Py_tp_doc, "A file mapped read-only; it holds no file descriptor."},
    {Py_tp_dealloc, file_map_dealloc},
    {Py_bf_getbuffer, file_map_getbuffer},
    {0, NULL},
};

static PyType_Spec file_map_spec = {
    .name = "zbuffer.reading._gather.FileMap",
    .basicsize = sizeof(file_map),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = file_map_slots,
};

static PyObject *py_map_file(PyObject *module, PyObject *path)
{
    PyObject *encoded = NULL;
    if (!PyUnicode_FSConverter(path, &encoded))
        return NULL;
    const char *name = PyBytes_AsString(encoded);
    void *address = MAP_FAILED;
    struct stat status = {0};
    int code = 0;
    Py_BEGIN_ALLOW_THREADS
    int fd = open(name, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &status) < 0)
        code = errno;
    else if (status.st_size == 0)
        code = EINVAL;
    else {
        address = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (address == MAP_FAILED)
            code = errno;
    }
    if (fd >= 0)
        close(fd);
    Py_END_ALLOW_THREADS
    Py_DECREF(encoded);
    if (code != 0) {
        errno = code;
        return PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path);
    }
    PyObject *type = PyObject_GetAttrString(module, "FileMap");
    file_map *map = NULL;
    if (type != NULL) {
        allocfunc allocate = (allocfunc)PyType_GetSlot((PyTypeObject *)type, Py_tp_alloc);
        map = (file_map *)allocate((PyTypeObject *)type, 0);
        Py_DECREF(type);
    }
    if (map == NULL) {
        munmap(address, (size_t)status.st_size);
        return NULL;
    }
    map->address = address;
    map->nbytes = (Py_ssize_t)status.st_size;
    return (PyObject *)map;
}

/* ------------------------------------------------------------------------ */

static PyMethodDef methods[] = {
    {"gather", py_gather, METH_VARARGS,
     "gather(dest, row_nbytes, chunk_nbytes, n, addrs, sizes, rows, slots, n_threads)\n--\n\n"
     "Fill rows of dest; return the number of blocks decoded, or minus one minus the entry that failed."},
    {"compress", py_compress, METH_VARARGS,
     "compress(raw, typesize, blocksize, cname, clevel, filter, raw_literals)\n--\n\n"
     "Return raw as one Blosc2 chunk with unsplit blocks."},
    {"map_file", py_map_file, METH_O, "map_file(path)\n--\n\nMap a file read-only."},
    {NULL, NULL, 0, NULL},
};

static int exec_module(PyObject *module)
{
    blosc2_init();
    blosc2_codec codec = {
        .compcode = RAW_LITERALS_CODEC,
        .compname = "zstd-raw-literals",
        .complib = RAW_LITERALS_CODEC,
        .version = 1,
        .encoder = encode_raw_literals,
        .decoder = decode_nothing,
    };
    if (blosc2_register_codec(&codec) < 0) {
        PyErr_SetString(PyExc_ImportError, "cannot register a codec with Blosc2");
        return -1;
    }
    PyObject *type = PyType_FromSpec(&file_map_spec);
    if (type == NULL)
        return -1;
    int failed = PyModule_AddObjectRef(module, "FileMap", type);
    Py_DECREF(type);
    if (failed < 0)
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
