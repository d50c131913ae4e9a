/* What the parts of the extension share. */
#ifndef ZBUFFER_NATIVE_H
#define ZBUFFER_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

#include <blosc2.h>

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

/* Wanted rows, sorted by id, and where the chunk (or raw page) of each lies. It holds
 * references to the chunks' owners, so what it points to stays while it lives. */
typedef struct {
    PyObject_HEAD
    int64_t n;
    int64_t chunk_rows;
    int64_t *ids;    /* ascending */
    int64_t *rows;   /* row inside the chunk or page */
    int64_t *sizes;  /* bytes of the chunk, or minus the rows of a raw page */
    uint64_t *addrs; /* where the chunk or page lies */
    int64_t *slots;  /* row of the batch to fill */
    PyObject **pinned;
    int64_t n_pinned;
} plan_object;

extern PyType_Spec plan_spec;
extern PyType_Spec file_map_spec;
PyObject *py_plan(PyObject *module, PyObject *args);
PyObject *py_windows(PyObject *module, PyObject *args);
PyObject *py_compress(PyObject *module, PyObject *args);
PyObject *py_map_file(PyObject *module, PyObject *path);
int register_raw_literals_codec(void);
/* Make an object of one of the module's types; its own part is zero. */
PyObject *new_object(PyObject *module, const char *type_name);

#endif
