/* compress(): one raw chunk into one Blosc2 chunk, for sealing. */
#include "_native.h"

#include <stdlib.h>
#include <string.h>

/* Frames decode a quarter faster when zstd leaves their literals uncompressed:
 * most of a block is matches, and the Huffman table costs more than the few
 * literals save. Blosc2 offers no such switch, so zstd is called through a codec
 * of our own, private to this copy of the library, and the chunk is then marked
 * as what it is: plain zstd. Every Blosc2 decoder reads it. */
enum { RAW_LITERALS_CODEC = 200 };
enum { LITERALS_RAW = 2 };

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

PyObject *py_compress(PyObject *module, PyObject *args)
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

int register_raw_literals_codec(void)
{
    blosc2_codec codec = {
        .compcode = RAW_LITERALS_CODEC,
        .compname = "zstd-raw-literals",
        .complib = RAW_LITERALS_CODEC,
        .version = 1,
        .encoder = encode_raw_literals,
        .decoder = decode_nothing,
    };
    return blosc2_register_codec(&codec);
}
