// The Python module: argument checks and conversions only.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <utility>

#include "sha256.hpp"
#include "tokens.hpp"
#include "tree.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvactors {

void bind_copy(nb::module_& m);

namespace {

constexpr std::size_t kLarge = 4096;  // tokens from which letting the GIL go costs less than it gives

Key key_of(const nb::bytes& bytes, const char* what) {
    if (bytes.size() != 32) throw nb::value_error(what);
    Key key;
    std::memcpy(key.bytes, bytes.c_str(), 32);
    return key;
}

template <class T>
nb::bytes bytes_of(const T* data, std::size_t count) {
    return nb::bytes(reinterpret_cast<const char*>(data), count * sizeof(T));
}

// A path or a tree is entered by one thread at a time; letting the GIL go must not change that.
class Busy {
public:
    explicit Busy(bool& flag) : flag_(flag) {
        if (flag_) throw std::runtime_error("this object is in use by another thread");
        flag_ = true;
    }
    ~Busy() { flag_ = false; }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

private:
    bool& flag_;
};

// Token arrays of paths that have gone. A long prompt's is large enough for malloc to map it anew each time, and the page
// faults of that would cost more than everything else done with the prompt. Touched under the GIL only.
std::vector<Raw<u32>>& spare_arrays() {
    static std::vector<Raw<u32>> spares;
    return spares;
}
constexpr std::size_t kSpares = 16, kSpareTokens = std::size_t(1) << 21;

struct PyPath : Path {
    PyPath(u32 block_size, const Key& root) : Path(block_size, root) {
        std::vector<Raw<u32>>& spares = spare_arrays();
        if (spares.empty()) return;
        tokens = std::move(spares.back());
        spares.pop_back();
    }
    ~PyPath() {
        if (tokens.capacity() > kSpareTokens || spare_arrays().size() >= kSpares) return;
        tokens.clear();
        spare_arrays().push_back(std::move(tokens));
    }
    PyPath(const PyPath&) = delete;
    PyPath& operator=(const PyPath&) = delete;
    bool busy = false;
};

struct PyTree : Tree {
    using Tree::Tree;
    bool busy = false;
};

template <class Work>
auto without_gil(std::size_t tokens, Work work) {
    std::optional<nb::gil_scoped_release> released;
    if (tokens > kLarge) released.emplace();
    return work();
}

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

void append_sequence(nb::handle tokens, Raw<u32>& out) {
    const std::size_t before = out.size();
    PyObject* fast = PySequence_Tuple(tokens.ptr());
    if (fast == nullptr) throw nb::python_error();
    const nb::object owner = nb::steal<nb::object>(fast);
    const std::size_t count = std::size_t(PyTuple_Size(fast));
    out.resize(before + count);
    for (std::size_t i = 0; i < count; ++i) {
        PyObject* item = PyTuple_GetItem(fast, Py_ssize_t(i));
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

void append(nb::handle tokens, Raw<u32>& out) {
    if (PyObject_CheckBuffer(tokens.ptr()) != 0) {
        append_buffer(tokens, out);
    } else if (PySequence_Check(tokens.ptr()) != 0 && !nb::isinstance<nb::str>(tokens)) {
        append_sequence(tokens, out);
    } else {
        throw nb::type_error("tokens must be a list or tuple of integers, or a buffer of them");
    }
}

// ---------------------------------------------------------------- conversions

using Id = long long;  // block ids travel as signed: -1 is "none"

std::vector<Id> ids_of(const u32* blocks, std::size_t count) {
    std::vector<Id> ids(count);
    for (std::size_t i = 0; i < count; ++i) ids[i] = blocks[i] == kNil ? -1 : Id(blocks[i]);
    return ids;
}

std::vector<Id> ids_of(const std::vector<u32>& blocks) { return ids_of(blocks.data(), blocks.size()); }

u32 block_of(Id block) {
    if (block < 0 || block >= Id(kNil)) throw nb::value_error("device block id out of range");
    return u32(block);
}

u32 size_of(Id value, const char* what) {
    if (value < 0 || value > 0xfffffffeLL) throw nb::value_error(what);
    return u32(value);
}

u32 limit_of(Id max_blocks) { return max_blocks < 0 ? 0xffffffffu : size_of(max_blocks, "max_blocks out of range"); }

using NodeIds = nb::ndarray<nb::numpy, u32, nb::ndim<1>>;
using NodesIn = nb::ndarray<const u32, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

NodeIds nodes_of(std::vector<u32> nodes) {
    auto* owned = new std::vector<u32>(std::move(nodes));
    nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<u32>*>(p); });
    return NodeIds(owned->data(), {owned->size()}, owner);
}

std::vector<Key> keys_of(const nb::bytes& keys) {
    if (keys.size() % 32 != 0) throw nb::value_error("keys must be a multiple of 32 bytes");
    std::vector<Key> result(keys.size() / 32);
    if (!result.empty()) std::memcpy(result.data(), keys.c_str(), keys.size());
    return result;
}

nb::tuple match_tuple(const Match& match) {
    return nb::make_tuple(match.device_run, nb::bytes(match.states.data(), match.states.size()));
}

void bind_path(nb::module_& m) {
    nb::class_<PyPath>(m, "Path")
        .def("__init__", [](PyPath* self, Id block_size, const nb::bytes& root) {
            if (block_size < 1 || block_size > (1 << 24)) throw nb::value_error("block_size must be between 1 and 2**24");
            new (self) PyPath(u32(block_size), key_of(root, "root must be 32 bytes"));
        }, "block_size"_a, "root"_a)
        .def_prop_ro("block_size", [](const PyPath& p) { return p.block_size; })
        .def_prop_ro("root", [](const PyPath& p) { return bytes_of(&p.root, 1); })
        .def_prop_ro("num_tokens", [](const PyPath& p) { return p.tokens.size(); })
        .def_prop_ro("num_full_blocks", [](const PyPath& p) { return p.full_blocks(); })
        .def_prop_ro("num_plain_blocks", [](const PyPath& p) { return p.plain_blocks(); })
        .def_prop_ro("num_held", [](const PyPath& p) { return p.held(); })
        .def_prop_ro("num_committed", [](const PyPath& p) { return p.committed; })
        .def_prop_ro("num_blocks", [](const PyPath& p) { return p.table.size(); })
        .def("extend", [](PyPath& p, nb::handle tokens) {
            const Busy busy(p.busy);
            append(tokens, p.tokens);
        }, "tokens"_a)
        .def("append", [](PyPath& p, const PyPath& other) {
            const Busy busy(p.busy);
            if (&p == &other) throw nb::value_error("a path cannot be appended to itself");
            const std::size_t before = p.tokens.size();
            p.tokens.resize(before + other.tokens.size());
            std::memcpy(p.tokens.data() + before, other.tokens.data(), 4 * other.tokens.size());
        }, "other"_a)
        .def("set_root", [](PyPath& p, const nb::bytes& root) {
            const Busy busy(p.busy);
            p.restart(key_of(root, "root must be 32 bytes"));
        }, "root"_a)
        .def("set_extra", [](PyPath& p, Id block, const nb::bytes& extra) {
            const Busy busy(p.busy);
            p.set_extra(size_of(block, "block out of range"), std::string(extra.c_str(), extra.size()));
        }, "block"_a, "extra"_a)
        .def("tokens", [](const PyPath& p, Id start, Id stop) {
            if (start < 0 || stop < start || stop > Id(p.full_blocks())) throw nb::value_error("blocks out of range");
            return bytes_of(p.tokens.data() + std::size_t(start) * p.block_size, std::size_t(stop - start) * p.block_size);
        }, "start"_a, "stop"_a)
        .def("keys", [](PyPath& p, Id start, Id stop) {
            if (start < 0 || stop < start || stop > Id(p.full_blocks())) throw nb::value_error("blocks out of range");
            const Busy busy(p.busy);
            const std::size_t missing = p.names.size() < std::size_t(stop) ? std::size_t(stop) - p.names.size() : 0;
            without_gil(missing * p.block_size, [&] { p.name_to(u32(stop)); });
            return bytes_of(p.names.data() + start, std::size_t(stop - start));
        }, "start"_a, "stop"_a)
        .def("blocks", [](const PyPath& p, Id start, Id stop) {
            const Id size = Id(p.table.size());
            if (stop < 0) stop = size;
            if (start < 0 || start > stop || stop > size) throw nb::value_error("positions out of range");
            return ids_of(p.table.data() + start, std::size_t(stop - start));
        }, "start"_a = 0, "stop"_a = -1)
        .def("assign", [](PyPath& p, Id start, const std::vector<Id>& blocks) {
            std::vector<u32> narrow_blocks(blocks.size());
            for (std::size_t i = 0; i < blocks.size(); ++i) narrow_blocks[i] = block_of(blocks[i]);
            p.assign(size_of(start, "start out of range"), narrow_blocks.data(), narrow_blocks.size());
        }, "start"_a, "blocks"_a)
        .def("is_shared", [](const PyPath& p, Id position) {
            if (position < 0 || position >= Id(p.shared.size())) throw nb::value_error("position out of range");
            return p.shared[std::size_t(position)] != 0;
        }, "position"_a);
}

void bind_tree(nb::module_& m) {
    nb::class_<PyTree> tree(m, "BlockTree");
    tree.def("__init__", [](PyTree* self, Id block_size, Id capacity) {
            if (block_size < 1 || block_size > (1 << 24)) throw nb::value_error("block_size must be between 1 and 2**24");
            new (self) PyTree(u32(block_size), size_of(capacity, "capacity out of range"));
        }, "block_size"_a, "capacity"_a = 0)
        .def_prop_ro("block_size", [](const PyTree& t) { return t.block_size(); })
        .def_prop_ro("retired", [](const PyTree& t) { return t.retired(); })
        .def("pin", [](PyTree& t, PyPath& p, Id max_blocks) {
            const Busy tree_busy(t.busy), path_busy(p.busy);
            return match_tuple(without_gil(p.tokens.size(), [&] { return t.pin(p, limit_of(max_blocks)); }));
        }, "path"_a, "max_blocks"_a = -1)
        .def("peek", [](PyTree& t, PyPath& p, Id max_blocks) {
            const Busy tree_busy(t.busy), path_busy(p.busy);
            return match_tuple(without_gil(p.tokens.size(), [&] { return t.peek(p, limit_of(max_blocks)); }));
        }, "path"_a, "max_blocks"_a = -1)
        .def("trim", [](PyTree& t, PyPath& p, Id held) { return ids_of(t.trim(p, size_of(held, "held out of range"))); },
             "path"_a, "held"_a)
        .def("retreat", [](PyTree& t, PyPath& p, Id n) { return ids_of(t.retreat(p, size_of(n, "blocks out of range"))); },
             "path"_a, "blocks"_a)
        .def("commit", [](PyTree& t, PyPath& p, Id upto) {
            const Busy tree_busy(t.busy), path_busy(p.busy);
            const u32 limit = size_of(upto, "upto out of range");
            const std::size_t fresh = limit > p.committed ? limit - p.committed : 0;
            const Committed done = without_gil(fresh * p.block_size, [&] { return t.commit(p, limit); });
            return nb::make_tuple(done.start, done.stop, done.adopted);
        }, "path"_a, "upto"_a)
        .def("release", [](PyTree& t, PyPath& p) { return ids_of(t.release(p)); }, "path"_a)
        .def("begin_load", [](PyTree& t, PyPath& p, Id start, Id stop) {
            return nodes_of(t.begin_load(p, size_of(start, "start out of range"), size_of(stop, "stop out of range")));
        }, "path"_a, "start"_a, "stop"_a)
        .def("finish_load", [](PyTree& t, const NodesIn& nodes, Id good) {
            return ids_of(t.finish_load(nodes.data(), nodes.shape(0), size_of(good, "good out of range")));
        }, "nodes"_a, "good"_a)
        .def("settle", [](PyTree& t, PyPath& p) { return t.settle(p); }, "path"_a)
        .def("replace", [](PyTree& t, PyPath& p, Id position, Id block) {
            t.replace(p, size_of(position, "position out of range"), block == -1 ? kNil : block_of(block));
        }, "path"_a, "position"_a, "block"_a)
        .def("evict", [](PyTree& t, Id count) {
            Evicted out = t.evict(size_of(count, "count out of range"));
            return nb::make_tuple(nodes_of(std::move(out.nodes)), bytes_of(out.keys.data(), out.keys.size()),
                                  bytes_of(out.parents.data(), out.parents.size()), ids_of(out.blocks),
                                  nb::bytes(out.states.data(), out.states.size()));
        }, "count"_a)
        .def("finish_offload", [](PyTree& t, const NodesIn& nodes, const nb::bytes& on_host) {
            if (on_host.size() != nodes.shape(0)) throw nb::value_error("on_host must hold one byte for each node");
            const u8* flags = reinterpret_cast<const u8*>(on_host.c_str());
            const Offloaded out = t.finish_offload(nodes.data(), nodes.shape(0), flags);
            return nb::make_tuple(ids_of(out.freed), out.kept);
        }, "nodes"_a, "on_host"_a)
        .def("host_gained", [](PyTree& t, const nb::bytes& keys) {
            const std::vector<Key> names = keys_of(keys);
            return t.host_gained(names.data(), names.size());
        }, "keys"_a)
        .def("host_gone", [](PyTree& t, const nb::bytes& keys) {
            const std::vector<Key> names = keys_of(keys);
            return t.host_gone(names.data(), names.size());
        }, "keys"_a)
        .def("clear_host", &PyTree::clear_host)
        .def("mark_announced", [](PyTree& t, PyPath& p, Id upto) { return t.mark_announced(p, size_of(upto, "upto out of range")); },
             "path"_a, "upto"_a)
        .def("clear_announced", &PyTree::clear_announced)
        .def("worth_saving", [](const PyTree& t, const PyPath& p, Id upto, Id min_hits) {
            return t.worth_saving(p, size_of(upto, "upto out of range"), size_of(min_hits, "min_hits out of range"));
        }, "path"_a, "upto"_a, "min_hits"_a)
        .def("retire", [](PyTree& t) { return ids_of(t.retire()); })
        .def("device_keys", [](const PyTree& t) {
            const std::vector<Key> keys = t.device_keys();
            return bytes_of(keys.data(), keys.size());
        })
        .def("paths", [](const PyTree& t) {
            nb::list result;
            for (const Leaf& leaf : t.leaves())
                result.append(nb::make_tuple(bytes_of(&leaf.root, 1), bytes_of(leaf.tokens.data(), leaf.tokens.size()),
                                             bytes_of(leaf.keys.data(), leaf.keys.size()),
                                             nb::bytes(leaf.states.data(), leaf.states.size())));
            return result;
        })
        .def("statistics", [](const PyTree& t) {
            const Statistics s = t.statistics();
            nb::dict d;
            d["nodes"] = s.nodes;
            d["device"] = s.device;
            d["host"] = s.host;
            d["evictable"] = s.evictable;
            d["referenced"] = s.referenced;
            d["loading"] = s.loading;
            d["offloading"] = s.offloading;
            d["bytes"] = t.bytes();
            return d;
        })
        .def("check", &PyTree::check);
}

nb::bytes chain_keys(const nb::bytes& parent, nb::handle tokens, Id block_size) {
    if (block_size < 1 || block_size > (1 << 24)) throw nb::value_error("block_size must be between 1 and 2**24");
    Path path(u32(block_size), key_of(parent, "parent must be 32 bytes"));
    append(tokens, path.tokens);
    without_gil(path.tokens.size(), [&] { path.name_to(path.full_blocks()); });
    return bytes_of(path.names.data(), path.names.size());
}

nb::bytes pack_tokens(const nb::bytes& tokens) {
    const std::size_t count = tokens.size() / 4;
    if (tokens.size() % 4 || count > 0xffffffff) throw nb::value_error("tokens must be whole little-endian uint32");
    std::vector<u8> out(5 * count + 5);
    return bytes_of(out.data(), pack_msgpack(reinterpret_cast<const u8*>(tokens.c_str()), count, out.data()));
}

}  // namespace
}  // namespace kvactors

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // objects alive when the interpreter ends are no news to anybody
    using namespace kvactors;
    m.attr("KEY_BYTES") = 32;
    m.attr("DEVICE") = int(kDevice);
    m.attr("HOST") = int(kHost);
    m.attr("LOADING") = int(kLoading);
    m.attr("OFFLOADING") = int(kOffloading);
    m.def("sha256_accelerated", &sha256_accelerated);
    m.def("chain_keys", &chain_keys, "parent"_a, "tokens"_a, "block_size"_a);
    m.def("pack_tokens", &pack_tokens, "tokens"_a);
    bind_path(m);
    bind_tree(m);
    bind_copy(m);
}
