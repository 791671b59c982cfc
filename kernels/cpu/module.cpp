// The Python module `kvir.kernels.cpu._ops`: addresses, sizes and strides as integers, checked by ops.py.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "args.h"
#include "parallel.h"

namespace kvir {

#define KVIR_DECLARE(name) namespace name { extern const Isa isa; }
#if defined(__x86_64__)
KVIR_DECLARE(avx512bf16)
KVIR_DECLARE(avx512)
KVIR_DECLARE(avx2)
#endif
KVIR_DECLARE(generic)

namespace {

const Isa* const ISAS[] = {
#if defined(__x86_64__)
    &avx512bf16::isa, &avx512::isa, &avx2::isa,
#endif
    &generic::isa,
};
const Isa* current = nullptr;

// Reads the arguments of a call one after another; the first that is not a number ends it.
class Reader {
public:
    Reader(PyObject* const* args, Py_ssize_t count) : args_(args), count_(count) {}
    int64_t integer() {
        PyObject* x = next();
        return x ? PyLong_AsLongLong(x) : 0;
    }
    float real() {
        PyObject* x = next();
        return x ? float(PyFloat_AsDouble(x)) : 0;
    }
    template <class P> P* address() {
        PyObject* x = next();
        return x ? static_cast<P*>(PyLong_AsVoidPtr(x)) : nullptr;
    }
    CacheView cache() {
        CacheView c;
        c.kv = address<char>();
        c.bias = address<float>();
        c.table = address<const int32_t>();
        c.table_stride = integer();
        c.head_pages = integer();
        c.logical_pages = integer();
        c.page_rows = integer();
        c.head_size = integer();
        return c;
    }
    PagesView pages() {
        PagesView p;
        p.pages = address<const int32_t>();
        p.stride = integer();
        p.max_pages = integer();
        return p;
    }
    BoundsView bounds() {
        BoundsView b;
        b.sink = address<const int32_t>();
        b.recent = address<const int32_t>();
        b.batch_stride = integer();
        return b;
    }
    // False, with a Python error set, unless exactly all arguments were read and understood.
    bool done() {
        if (PyErr_Occurred()) return false;
        if (at_ == count_) return true;
        PyErr_Format(PyExc_TypeError, "takes %zd arguments, got %zd", at_, count_);
        return false;
    }

private:
    PyObject* next() {
        at_++;
        return at_ <= count_ && !PyErr_Occurred() ? args_[at_ - 1] : nullptr;
    }
    PyObject* const* args_;
    Py_ssize_t count_, at_ = 0;
};

PyObject* py_append(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Reader r(args, count);
    AppendArgs a;
    a.k = r.address<const char>();
    a.k_token_stride = r.integer();
    a.k_head_stride = r.integer();
    a.v = r.address<const char>();
    a.v_token_stride = r.integer();
    a.v_head_stride = r.integer();
    a.cache = r.cache();
    a.slots = r.address<const int64_t>();
    a.tokens = r.integer();
    a.kv_heads = r.integer();
    a.unit0 = r.integer();
    a.element_bytes = r.integer();
    a.threads = int(r.integer());
    if (!r.done()) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    append(a);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject* py_decode(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Reader r(args, count);
    DecodeArgs a;
    a.q = r.address<const char>();
    a.q_batch_stride = r.integer();
    a.q_head_stride = r.integer();
    a.out = r.address<char>();
    a.out_batch_stride = r.integer();
    a.out_head_stride = r.integer();
    a.cache = r.cache();
    a.pages = r.pages();
    a.lens = r.address<const int32_t>();
    a.bounds = r.bounds();
    a.batch = r.integer();
    a.query_heads = r.integer();
    a.kv_heads = r.integer();
    a.unit0 = r.integer();
    a.scale = r.real();
    a.logit_cap = r.real();
    a.dtype = Dtype(r.integer());
    a.threads = int(r.integer());
    if (!r.done()) return nullptr;
    int64_t holes;
    Py_BEGIN_ALLOW_THREADS;
    holes = current->decode(a);
    Py_END_ALLOW_THREADS;
    return PyLong_FromLongLong(holes);
}

PyObject* py_extend(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Reader r(args, count);
    ExtendArgs a;
    a.q = r.address<const char>();
    a.q_token_stride = r.integer();
    a.q_head_stride = r.integer();
    a.k = r.address<const char>();
    a.k_token_stride = r.integer();
    a.k_head_stride = r.integer();
    a.v = r.address<const char>();
    a.v_token_stride = r.integer();
    a.v_head_stride = r.integer();
    a.out = r.address<char>();
    a.out_token_stride = r.integer();
    a.out_head_stride = r.integer();
    a.cache = r.cache();
    a.pages = r.pages();
    a.prefix_lens = r.address<const int32_t>();
    a.extend_lens = r.address<const int32_t>();
    a.bounds = r.bounds();
    a.batch = r.integer();
    a.query_heads = r.integer();
    a.kv_heads = r.integer();
    a.unit0 = r.integer();
    a.scale = r.real();
    a.logit_cap = r.real();
    a.dtype = Dtype(r.integer());
    a.threads = int(r.integer());
    if (!r.done()) return nullptr;
    int64_t holes;
    Py_BEGIN_ALLOW_THREADS;
    holes = current->extend(a);
    Py_END_ALLOW_THREADS;
    return PyLong_FromLongLong(holes);
}

PyObject* py_stream_read(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Reader r(args, count);
    const char* from = r.address<const char>();
    int64_t bytes = r.integer();
    int threads = int(r.integer());
    if (!r.done()) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    current->stream_read(from, bytes, threads);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject* py_use_gomp(PyObject*, PyObject* address) {
    void* gomp_parallel = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred()) return nullptr;
    use_gomp(gomp_parallel);
    Py_RETURN_NONE;
}

PyObject* py_isas(PyObject*, PyObject*) {
    PyObject* names = PyList_New(0);
    for (const Isa* isa : ISAS) {
        if (names == nullptr || !isa->runs_here()) continue;
        PyObject* name = PyUnicode_FromString(isa->name);
        if (name == nullptr || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

PyObject* py_use_isa(PyObject*, PyObject* wanted) {
    for (const Isa* isa : ISAS)
        if (isa->runs_here() && PyUnicode_CompareWithASCIIString(wanted, isa->name) == 0) {
            PyObject* before = PyUnicode_FromString(current->name);
            if (before) current = isa;
            return before;
        }
    return PyErr_Format(PyExc_ValueError, "this machine has no instruction set %R", wanted);
}

#define FAST(name) (PyCFunction)(void (*)(void)) name, METH_FASTCALL
PyMethodDef METHODS[] = {
    {"append", FAST(py_append), "Rows into the pool."},
    {"decode", FAST(py_decode), "Decode attention; the number of holes."},
    {"extend", FAST(py_extend), "Prefill attention; the number of holes."},
    {"stream_read", FAST(py_stream_read), "stream_read(address, bytes, threads): read it all."},
    {"use_gomp", py_use_gomp, METH_O, "use_gomp(address of GOMP_parallel, or 0 for threads of our own)"},
    {"isas", py_isas, METH_NOARGS, "Instruction sets that run here, best first."},
    {"use_isa", py_use_isa, METH_O, "use_isa(name): the name of the one used before."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "_ops", "Compiled kernels.", -1, METHODS, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace kvir

PyMODINIT_FUNC PyInit__ops() {
    for (const kvir::Isa* isa : kvir::ISAS)
        if (kvir::current == nullptr && isa->runs_here()) kvir::current = isa;
    PyObject* module = PyModule_Create(&kvir::MODULE);
    if (module && PyModule_AddStringConstant(module, "SOURCES", KVIR_SOURCES) < 0) Py_CLEAR(module);
    return module;
}
