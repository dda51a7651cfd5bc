// What the binding files share: guarded objects and small conversions.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "path.hpp"
#include "tree.hpp"

namespace kvactors {

namespace nb = nanobind;

// Work on this many tokens or more is done with the GIL released. Less than that takes under 0.2 ms, and having to win
// the GIL back from a busy thread may take 5 ms.
constexpr std::size_t kReleaseTokens = 32768;

// An object that is not thread-safe, and the mark that a call on it is running (changed with the GIL held only).
template <class T>
struct Guarded {
    template <class... Args>
    explicit Guarded(Args&&... args) : value(std::forward<Args>(args)...) {}
    T value;
    bool busy = false;
};
using PyPath = Guarded<Path>;
using PyTree = Guarded<Tree>;

template <class T>
class Use {
public:
    explicit Use(const Guarded<T>& object) : object_(const_cast<Guarded<T>&>(object)) {
        if (object_.busy) throw std::runtime_error("used by two threads at once: trees and paths belong to one owner");
        object_.busy = true;
    }
    ~Use() { object_.busy = false; }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    T* operator->() const { return &object_.value; }
    T& operator*() const { return object_.value; }

private:
    Guarded<T>& object_;
};

template <class F>
auto without_gil(bool release, F work) {
    std::optional<nb::gil_scoped_release> released;
    if (release) released.emplace();
    return work();
}

inline u32 position(std::int64_t value, const char* what) {
    if (value < 0 || value >= std::int64_t(kNil)) throw nb::value_error((std::string(what) + " out of range").c_str());
    return u32(value);
}

inline u32 limit(std::int64_t value) { return value < 0 || value > std::int64_t(kNil) ? kNil : u32(value); }

inline Key key_of(const nb::bytes& bytes, const char* what) {
    if (bytes.size() != 32) throw nb::value_error((std::string(what) + " must have 32 bytes").c_str());
    Key key;
    std::memcpy(key.bytes, bytes.c_str(), 32);
    return key;
}

inline std::size_t keys_in(const nb::bytes& keys) {
    if (keys.size() % 32 != 0) throw nb::value_error("keys must be a multiple of 32 bytes");
    return keys.size() / 32;
}

inline nb::bytes to_bytes(const void* data, std::size_t bytes) { return nb::bytes(static_cast<const char*>(data), bytes); }
inline nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

inline nb::list to_list(const u32* values, std::size_t count) {
    PyObject* list = PyList_New(Py_ssize_t(count));
    if (list == nullptr) throw nb::python_error();
    const nb::object result = nb::steal(list);
    for (std::size_t i = 0; i < count; ++i) {
        PyObject* item = values[i] == kNil ? PyLong_FromLong(-1) : PyLong_FromUnsignedLong(values[i]);
        if (item == nullptr || PyList_SetItem(list, Py_ssize_t(i), item) != 0) throw nb::python_error();
    }
    return nb::borrow<nb::list>(result);
}
inline nb::list to_list(const std::vector<u32>& values) { return to_list(values.data(), values.size()); }

using Nodes = nb::ndarray<const u32, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using NodeArray = nb::ndarray<nb::numpy, u32, nb::ndim<1>>;

inline NodeArray to_array(std::vector<u32>&& values) {
    auto* kept = new std::vector<u32>(std::move(values));
    nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<u32>*>(p); });
    return NodeArray(kept->data(), {kept->size()}, owner);
}

void bind_path(nb::module_& module);
void bind_tree(nb::module_& module);
void bind_copy(nb::module_& module);

}  // namespace kvactors
