/* map_file(): a read-only memory map that keeps no file descriptor. */
#include "_native.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

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

PyType_Spec file_map_spec = {
    .name = "zbuffer.reading._gather.FileMap",
    .basicsize = sizeof(file_map),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = file_map_slots,
};

PyObject *py_map_file(PyObject *module, PyObject *path)
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
    file_map *map = (file_map *)new_object(module, "FileMap");
    if (map == NULL) {
        munmap(address, (size_t)status.st_size);
        return NULL;
    }
    map->address = address;
    map->nbytes = (Py_ssize_t)status.st_size;
    return (PyObject *)map;
}
