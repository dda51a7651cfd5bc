// Shared by the parts of the Python module: the guard of an object in use, and conversions of
// numbers and hashes.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <stdexcept>
#include <utility>

#include "gil.hpp"
#include "tree.hpp"
#include "tree_check.hpp"
#include "tree_walk.hpp"

namespace kvactors {

namespace nb = nanobind;
using namespace nb::literals;

// Tokens from which releasing the GIL gains more than it costs.
constexpr std::size_t kLarge = 32768;

inline Key key_of(const nb::bytes& bytes, const char* what) {
    if (bytes.size() != 32) throw nb::value_error(what);
    Key key;
    std::memcpy(key.bytes, bytes.c_str(), 32);
    return key;
}

template <class T>
nb::bytes bytes_of(const T* data, std::size_t count) {
    return nb::bytes(reinterpret_cast<const char*>(data), count * sizeof(T));
}

// A path or a tree is entered by one thread at a time, also while the GIL is released: every entry
// point holds a Busy.
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

// Token arrays of destroyed paths, see module.cpp. Accessed under the GIL only.
std::vector<Raw<u32>>& spare_arrays();
constexpr std::size_t kSpares = 16, kSpareTokens = std::size_t(1) << 21;

// Appends a Python list, tuple or buffer of token ids to an array.
void append(nb::handle tokens, Raw<u32>& out);

struct PyPath : Path {
    PyPath(u32 block_size, const Key& root, bool flat) : Path(block_size, root, flat) {
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
    mutable bool busy = false;
};

struct PyTree : Tree {
    using Tree::Tree;
    mutable bool busy = false;
    u64 version = 0;  // calls that may have changed something
};

class Change : Busy {
public:
    explicit Change(PyTree& tree) : Busy(tree.busy) { ++tree.version; }
};

struct PyCheck {
    explicit PyCheck(const PyTree& tree) : tree(tree), version(tree.version), check(tree) {}
    const PyTree& tree;
    const u64 version;
    TreeCheck check;
};

struct PyWalk {
    explicit PyWalk(PyTree& tree) : tree(tree), walk(tree) {}
    PyTree& tree;
    TreeWalk walk;
};

template <class Work>
auto without_gil(std::size_t tokens, Work work) {
    std::optional<ReleasedGil> released;
    if (tokens > kLarge) released.emplace();
    return work();
}

// ---------------------------------------------------------------- conversions

using Id = long long;  // block ids are passed as signed: -1 is "none"

inline std::vector<Id> ids_of(const u32* blocks, std::size_t count) {
    std::vector<Id> ids(count);
    for (std::size_t i = 0; i < count; ++i) ids[i] = blocks[i] == kNil ? -1 : Id(blocks[i]);
    return ids;
}

inline std::vector<Id> ids_of(const std::vector<u32>& blocks) { return ids_of(blocks.data(), blocks.size()); }

// A block id as a Python number. The numbers of the first ids are kept: to make and to free those of
// a block table took a tenth of the time of a request that hits.
inline PyObject* number_of(u32 block) {
    constexpr u32 kKept = 1 << 17;
    static std::vector<PyObject*>& kept = *new std::vector<PyObject*>;  // it outlives the module, as nothing could free it
    if (block >= kKept) return PyLong_FromLong(block == kNil ? -1 : long(block));
    if (block >= kept.size()) kept.resize(std::min(kKept, std::max(block + 1, 2 * u32(kept.size()))));
    PyObject*& number = kept[block];
    if (number == nullptr) number = PyLong_FromLong(long(block));
    Py_XINCREF(number);
    return number;
}

// The same as a tuple.
inline nb::object numbers_of(const u32* blocks, std::size_t count) {
    const nb::object numbers = nb::steal(PyTuple_New(Py_ssize_t(count)));
    for (std::size_t i = 0; numbers.is_valid() && i < count; ++i) {
        PyObject* number = number_of(blocks[i]);
        if (number == nullptr || PyTuple_SetItem(numbers.ptr(), Py_ssize_t(i), number) != 0) throw nb::python_error();
    }
    if (!numbers.is_valid()) throw nb::python_error();
    return numbers;
}

// The same as a copy whose numbers are made when they are read: a prompt has hundreds.
inline nb::object view_of(const u32* blocks, std::size_t count) {
    static_assert(kNil == 0xffffffffu, "none is -1 as a signed number");
    const nb::bytes copy = bytes_of(blocks, count);
    const nb::object bytes = nb::steal(PyMemoryView_FromObject(copy.ptr()));
    if (!bytes.is_valid()) throw nb::python_error();
    return bytes.attr("cast")("i");
}

inline u32 block_of(Id block) {
    if (block < 0 || block >= Id(kNil)) throw nb::value_error("device block id out of range");
    return u32(block);
}

inline u32 size_of(Id value, const char* what) {
    if (value < 0 || value > 0xfffffffeLL) throw nb::value_error(what);
    return u32(value);
}

inline u32 limit_of(Id max_blocks) { return max_blocks < 0 ? 0xffffffffu : size_of(max_blocks, "max_blocks out of range"); }

}  // namespace kvactors
