// The Python module: argument checks and conversions of tokens and paths.
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "module.hpp"
#include "sha256.hpp"
#include "tokens.hpp"

namespace kvactors {

void bind_copy(nb::module_& m);
void bind_events(nb::module_& m);
void bind_copy_queue(nb::module_& m);
void bind_objects(nb::module_& m);
void bind_slab_queue(nb::module_& m);
void bind_step(nb::module_& m);
void bind_tree(nb::module_& m);

// Token arrays of destroyed paths, for reuse. A long prompt's array is large enough for malloc to
// map it again each time, and the page faults would cost more than all other work on the prompt.
// Accessed under the GIL only.
std::vector<Raw<u32>>& spare_arrays() {
    static std::vector<Raw<u32>> spares;
    return spares;
}
namespace {

// ---------------------------------------------------------------- tokens

std::optional<IntKind> kind_of(const char* format, std::size_t size) {
    if (format == nullptr) return IntKind::u8;
    if (*format == '@' || *format == '=' || *format == '<') ++format;
    if (*format == '\0' || format[1] != '\0') return std::nullopt;
    const bool is_signed = std::strchr("bhilqn", *format) != nullptr;
    if (!is_signed && std::strchr("BHILQN", *format) == nullptr) return std::nullopt;
    switch (size) {
        case 1: return is_signed ? IntKind::i8 : IntKind::u8;
        case 2: return is_signed ? IntKind::i16 : IntKind::u16;
        case 4: return is_signed ? IntKind::i32 : IntKind::u32;
        case 8: return is_signed ? IntKind::i64 : IntKind::u64;
        default: return std::nullopt;
    }
}

struct Buffer {
    Py_buffer view{};
    ~Buffer() { PyBuffer_Release(&view); }
};

void append_buffer(nb::handle tokens, Raw<u32>& out) {
    Buffer buffer;
    if (PyObject_GetBuffer(tokens.ptr(), &buffer.view, PyBUF_FORMAT | PyBUF_STRIDES) != 0) throw nb::python_error();
    const Py_buffer& view = buffer.view;
    if (view.ndim != 1) throw nb::type_error("tokens must be one-dimensional");
    const std::optional<IntKind> kind = kind_of(view.format, std::size_t(view.itemsize));
    if (!kind) throw nb::type_error("tokens must be integers of 1, 2, 4 or 8 bytes in this machine's byte order");
    const std::size_t count = std::size_t(view.shape[0]), before = out.size();
    const std::ptrdiff_t stride = view.strides != nullptr ? view.strides[0] : view.itemsize;
    out.resize(before + count);
    const bool good = without_gil(count, [&] { return narrow(*kind, view.buf, stride, count, out.data() + before); });
    if (!good) {
        out.resize(before);
        throw nb::value_error("token ids must be between 0 and 2**32 - 1");
    }
}

// Leading plain ints of a list or tuple. To read them runs no code of Python that could change it.
std::size_t append_ints(PyObject* tokens, std::size_t count, u32* out) {
#ifdef Py_LIMITED_API
    const auto item_at = PyList_CheckExact(tokens) ? PyList_GetItem : PyTuple_GetItem;
#else  // a quarter faster
    const auto item_at = [items = PySequence_Fast_ITEMS(tokens)](PyObject*, Py_ssize_t i) { return items[i]; };
#endif
    for (std::size_t i = 0; i < count; ++i) {
        PyObject* const item = item_at(tokens, Py_ssize_t(i));
        if (!PyLong_CheckExact(item)) return i;
        const unsigned long value = PyLong_AsUnsignedLong(item);
        if (value > 0xffffffff) {
            PyErr_Clear();
            return i;
        }
        out[i] = u32(value);
    }
    return count;
}

void append_sequence(nb::handle tokens, Raw<u32>& out) {
    const std::size_t before = out.size();
    if (PyList_CheckExact(tokens.ptr()) || PyTuple_CheckExact(tokens.ptr())) {
        const std::size_t count = std::size_t(PyObject_Size(tokens.ptr()));
        out.resize(before + count);
        if (append_ints(tokens.ptr(), count, out.data() + before) == count) return;
        out.resize(before);
    }
    const nb::object owner = nb::steal<nb::object>(PySequence_Tuple(tokens.ptr()));
    if (!owner.is_valid()) throw nb::python_error();
    const std::size_t count = std::size_t(PyTuple_Size(owner.ptr()));
    out.resize(before + count);
    for (std::size_t i = 0; i < count; ++i) {
        PyObject* item = PyTuple_GetItem(owner.ptr(), Py_ssize_t(i));
        nb::object index;
        if (!PyLong_Check(item) || PyBool_Check(item)) {
            if (!PyBool_Check(item)) index = nb::steal<nb::object>(PyNumber_Index(item));
            else PyErr_SetString(PyExc_TypeError, "tokens must be integers, not bool");
            if (!index.is_valid()) {
                out.resize(before);
                throw nb::python_error();
            }
            item = index.ptr();
        }
        int overflow = 0;
        const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
        if (overflow != 0 || value < 0 || value > 0xffffffffLL) {
            out.resize(before);
            throw nb::value_error("token ids must be between 0 and 2**32 - 1");
        }
        out[before + i] = u32(value);
    }
}

}  // namespace

void append(nb::handle tokens, Raw<u32>& out) {
    if (PyObject_CheckBuffer(tokens.ptr()) != 0) {
        append_buffer(tokens, out);
    } else if (PySequence_Check(tokens.ptr()) != 0 && !nb::isinstance<nb::str>(tokens)) {
        append_sequence(tokens, out);
    } else {
        throw nb::type_error("tokens must be a list or tuple of integers, or a buffer of them");
    }
}

namespace {

// A path must not change while it is read either.
template <class Work>
auto guarded(const PyPath& path, Work work) {
    const Busy busy(path.busy);
    return work();
}

void assign(PyPath& path, Id start, const std::vector<Id>& blocks) {
    std::vector<u32> narrow_blocks(blocks.size());
    for (std::size_t i = 0; i < blocks.size(); ++i) narrow_blocks[i] = block_of(blocks[i]);
    path.assign(size_of(start, "start out of range"), narrow_blocks.data(), narrow_blocks.size());
}

void bind_path(nb::module_& m) {
    nb::class_<PyPath>(m, "Path")
        .def("__init__", [](PyPath* self, Id block_size, const nb::bytes& root, bool flat) {
            if (block_size < 1 || block_size > (1 << 24)) throw nb::value_error("block_size must be between 1 and 2**24");
            new (self) PyPath(u32(block_size), key_of(root, "root must be 32 bytes"), flat);
        }, "block_size"_a, "root"_a, "flat"_a = false)
        .def_prop_ro("flat", [](const PyPath& p) { return p.flat; })
        .def_prop_ro("block_size", [](const PyPath& p) { return guarded(p, [&] { return p.block_size; }); })
        .def_prop_ro("root", [](const PyPath& p) { return guarded(p, [&] { return bytes_of(&p.root, 1); }); })
        .def_prop_ro("num_tokens", [](const PyPath& p) { return guarded(p, [&] { return p.tokens.size(); }); })
        .def_prop_ro("num_full_blocks", [](const PyPath& p) { return guarded(p, [&] { return p.full_blocks(); }); })
        .def_prop_ro("num_plain_blocks", [](const PyPath& p) { return guarded(p, [&] { return p.plain_blocks(); }); })
        .def_prop_ro("num_hashed", [](const PyPath& p) { return guarded(p, [&] { return p.names.size(); }); })
        .def_prop_ro("num_held", [](const PyPath& p) { return guarded(p, [&] { return p.held(); }); })
        .def_prop_ro("num_committed", [](const PyPath& p) { return guarded(p, [&] { return p.committed; }); })
        .def_prop_ro("num_blocks", [](const PyPath& p) { return guarded(p, [&] { return p.table.size(); }); })
        .def("extend", [](PyPath& p, nb::handle tokens) {
            const Busy busy(p.busy);
            append(tokens, p.tokens);
        }, "tokens"_a)
        .def("append", [](PyPath& p, const PyPath& other) {
            const Busy busy(p.busy);
            if (&p == &other) throw nb::value_error("a path cannot be appended to itself");
            const Busy other_busy(other.busy);
            p.append(other.tokens.data(), other.tokens.size());
        }, "other"_a)
        .def("set_root", [](PyPath& p, const nb::bytes& root) {
            const Busy busy(p.busy);
            p.restart(key_of(root, "root must be 32 bytes"));
        }, "root"_a)
        .def("set_extra", [](PyPath& p, Id block, const nb::bytes& extra) {
            const Busy busy(p.busy);
            p.set_extra(size_of(block, "block out of range"), std::string(extra.c_str(), extra.size()));
        }, "block"_a, "extra"_a)
        .def("extra_key", [](const PyPath& p, Id block) {
            const Busy busy(p.busy);
            const std::string* found = p.extra(size_of(block, "block out of range"));
            return found == nullptr ? nb::bytes("", 0) : nb::bytes(found->data(), found->size());
        }, "block"_a)
        .def("extra_keys", [](const PyPath& p, Id start, Id stop) {
            const Busy busy(p.busy);
            if (start < 0 || stop < start || stop > Id(p.full_blocks())) throw nb::value_error("blocks out of range");
            nb::list found;
            for (auto one = p.extras.lower_bound(u32(start)); one != p.extras.end() && one->first < u32(stop); ++one)
                found.append(nb::make_tuple(one->first, nb::bytes(one->second.data(), one->second.size())));
            return nb::tuple(found);
        }, "start"_a, "stop"_a)
        .def("tokens", [](const PyPath& p, Id start, Id stop) {
            const Busy busy(p.busy);
            if (start < 0 || stop < start || stop > Id(p.full_blocks())) throw nb::value_error("blocks out of range");
            return bytes_of(p.tokens.data() + std::size_t(start) * p.block_size, std::size_t(stop - start) * p.block_size);
        }, "start"_a, "stop"_a)
        .def("hashes", [](PyPath& p, Id start, Id stop) {
            const Busy busy(p.busy);
            if (start < 0 || stop < start || stop > Id(p.full_blocks())) throw nb::value_error("blocks out of range");
            const std::size_t missing = p.names.size() < std::size_t(stop) ? std::size_t(stop) - p.names.size() : 0;
            without_gil(missing * p.block_size, [&] { p.name_to(u32(stop)); });
            return bytes_of(p.names.data() + start, std::size_t(stop - start));
        }, "start"_a, "stop"_a)
        .def("parent", [](PyPath& p, Id block) {
            const Busy busy(p.busy);
            if (block < 0 || block >= Id(p.full_blocks())) throw nb::value_error("block out of range");
            p.name_to(u32(block));
            return bytes_of(&p.parent_name(u32(block)), 1);
        }, "block"_a)
        .def("blocks", [](const PyPath& p, Id start, Id stop) {
            const Busy busy(p.busy);
            const Id size = Id(p.table.size());
            if (stop < 0) stop = size;
            if (start < 0 || start > stop || stop > size) throw nb::value_error("positions out of range");
            return ids_of(p.table.data() + start, std::size_t(stop - start));
        }, "start"_a = 0, "stop"_a = -1)
        .def("table", [](const PyPath& p) {
            const Busy busy(p.busy);
            return view_of(p.table.data(), p.table.size());
        })
        .def("assign", [](PyPath& p, Id start, const std::vector<Id>& blocks) {
            const Busy busy(p.busy);
            assign(p, start, blocks);
        }, "start"_a, "blocks"_a)
        .def("complete", [](PyPath& p, Id start, const std::vector<Id>& blocks) {
            const Busy busy(p.busy);
            assign(p, start, blocks);
            return numbers_of(p.table.data(), p.table.size());
        }, "start"_a, "blocks"_a)
        .def_prop_rw("salt", [](const PyPath& p) { return p.salt; }, [](PyPath& p, u64 salt) {
            const Busy busy(p.busy);
            if (p.held() != 0 && p.salt != salt) throw nb::value_error("the path holds blocks of another salt");
            p.salt = salt;
        })
        .def_prop_rw("forgotten", [](const PyPath& p) { return p.forgotten; }, [](PyPath& p, bool forgotten) {
            const Busy busy(p.busy);
            p.forgotten = forgotten;
        })
        .def("is_shared", [](const PyPath& p, Id position) {
            const Busy busy(p.busy);
            if (position < 0 || position >= Id(p.shared.size())) throw nb::value_error("position out of range");
            return p.shared[std::size_t(position)] != 0;
        }, "position"_a);
}

nb::bytes chain_hashes(const nb::bytes& parent, nb::handle tokens, Id block_size) {
    if (block_size < 1 || block_size > (1 << 24)) throw nb::value_error("block_size must be between 1 and 2**24");
    Path path(u32(block_size), key_of(parent, "parent must be 32 bytes"));
    append(tokens, path.tokens);
    without_gil(path.tokens.size(), [&] { path.name_to(path.full_blocks()); });
    return bytes_of(path.names.data(), path.names.size());
}

}  // namespace
}  // namespace kvactors

NB_MODULE(_native, m) {
    using namespace kvactors;
    nb::set_leak_warnings(false);  // objects that still exist when the interpreter ends are normal
    m.attr("HASH_BYTES") = 32;
    m.attr("DEVICE") = int(kDevice);
    m.attr("HOST") = int(kHost);
    m.attr("LOADING") = int(kLoading);
    m.attr("OFFLOADING") = int(kOffloading);
    m.def("sha256_accelerated", &sha256_accelerated);
    m.def("chain_hashes", &chain_hashes, "parent"_a, "tokens"_a, "block_size"_a);
    bind_path(m);
    bind_tree(m);
    bind_step(m);
    bind_copy(m);
    bind_events(m);
    bind_copy_queue(m);
    bind_objects(m);
    bind_slab_queue(m);
}
