// Objects of a shared pool, many a call: names, addresses, and headers. The format is in header.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>

#include "common.hpp"
#include "gil.hpp"
#include "give_way.hpp"
#include "xxh3.hpp"

namespace nb = nanobind;

namespace kvactors {
namespace {

constexpr std::size_t kHeader = 96, kKindAt = 12, kDigestAt = 16, kKeyAt = 48, kSizeAt = 80, kSumAt = 88;
// Bytes for which another thread is worth its start, and threads of a call at most: a transfer waits for the checksums.
constexpr std::size_t kThreadBytes = 4 << 20, kThreads = 4;

enum Fit : u8 { kDiffers, kFits, kUnsummed };  // header.py

// Objects of one size in memory that the caller keeps. Each is a list of addresses: of a payload with its header behind it,
// or of both.
class Objects {
public:
    Objects(const nb::bytes& digest, const nb::bytes& keys, const nb::list& pointers, std::size_t size, bool checksums)
        : keys_(reinterpret_cast<const u8*>(keys.c_str())), size_(size), checksums_(checksums) {
        if (digest.size() != 32 || keys.size() != 32 * pointers.size())
            throw nb::value_error("digest, keys and pointers differ in length");
        places_.reserve(pointers.size());
        for (nb::handle item : pointers) {
            if (!PyList_Check(item.ptr())) throw nb::type_error("the pieces of an object are a list");
            const auto pieces = nb::borrow<nb::list>(item);
            const std::size_t count = pieces.size();
            if (count != 1 && count != 2) throw nb::value_error("an object has one piece or two");
            u8* const payload = address(pieces[0]);
            places_.push_back({payload, count == 1 ? payload + size : address(pieces[1])});
        }
        std::memcpy(blank_, "KVACTORS", 8);
        const u32 version = 1;
        std::memcpy(blank_ + 8, &version, 4);
        const u32 kind = checksums ? 0 : 1;
        std::memcpy(blank_ + kKindAt, &kind, 4);
        std::memcpy(blank_ + kDigestAt, digest.c_str(), 32);
        const u64 bytes = size;
        std::memcpy(blank_ + kSizeAt, &bytes, 8);
    }

    std::size_t count() const { return places_.size(); }

    // Bytes to read for a header.
    std::size_t work() const { return checksums_ ? size_ : 0; }

    void make(std::size_t i) const {
        u8* const to = places_[i].header;
        std::memcpy(to, blank_, kHeader);
        std::memcpy(to + kKeyAt, keys_ + 32 * i, 32);
        const u64 sum = checksums_ ? sum_of(i) : 0;
        std::memcpy(to + kSumAt, &sum, 8);
    }

    Fit check(std::size_t i) const {
        const u8* const header = places_[i].header;
        u32 kind;
        u64 sum;
        std::memcpy(&kind, header + kKindAt, 4);
        std::memcpy(&sum, header + kSumAt, 8);
        if (std::memcmp(header, blank_, kKindAt) != 0 || std::memcmp(header + kKeyAt, keys_ + 32 * i, 32) != 0 ||
            std::memcmp(header + kDigestAt, blank_ + kDigestAt, 32) != 0 ||
            std::memcmp(header + kSizeAt, blank_ + kSizeAt, 8) != 0)
            return kDiffers;
        if (kind == 1) return sum == 0 ? kUnsummed : kDiffers;
        return kind == 0 && (!checksums_ || sum == sum_of(i)) ? kFits : kDiffers;
    }

private:
    struct Place {
        u8 *payload, *header;
    };

    static u8* address(nb::handle number) { return reinterpret_cast<u8*>(nb::cast<std::uintptr_t>(number)); }

    u64 sum_of(std::size_t i) const {
        give_way(size_);
        return xxh3_64(places_[i].payload, size_);
    }

    const u8* keys_;
    std::vector<Place> places_;
    std::size_t size_;
    bool checksums_;
    u8 blank_[kHeader] = {};
};

// visit(i) for each object, by more than one thread if the objects are large. A system that starts no thread is slower.
template <typename Visit>
void each(const Objects& objects, const Visit& visit) {
    std::atomic<std::size_t> next{0};
    const auto work = [&] {
        for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < objects.count();) visit(i);
    };
    const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
    const std::size_t wanted = std::min({objects.count(), objects.count() * objects.work() / kThreadBytes, kThreads, cores});
    std::vector<std::thread> others;
    others.reserve(kThreads);
    try {
        while (others.size() + 1 < wanted) others.emplace_back(work);
    } catch (const std::system_error&) {
    }
    work();
    for (std::thread& other : others) other.join();
}

std::vector<std::uintptr_t> addresses(nb::list views) {
    std::vector<std::uintptr_t> found;
    found.reserve(views.size());
    for (nb::handle view : views) {
        Py_buffer buffer;
        if (PyObject_GetBuffer(view.ptr(), &buffer, PyBUF_SIMPLE) != 0) throw nb::python_error();
        found.push_back(reinterpret_cast<std::uintptr_t>(buffer.buf));
        PyBuffer_Release(&buffer);
    }
    return found;
}

// A new list. Each item is made by item(i), a new reference.
template <typename Item>
nb::list list_of(std::size_t count, const Item& item) {
    nb::list found = nb::steal<nb::list>(PyList_New(Py_ssize_t(count)));
    if (!found.is_valid()) throw nb::python_error();
    for (std::size_t i = 0; i < count; i++) {
        PyObject* const made = item(i);
        if (made == nullptr) throw nb::python_error();
        PyList_SetItem(found.ptr(), Py_ssize_t(i), made);
    }
    return found;
}

// The names of objects, whose keys are joined.
nb::list object_names(std::string_view prefix, nb::bytes keys) {
    static constexpr char kDigits[] = "0123456789abcdef";
    if (keys.size() % 32 != 0) throw nb::value_error("keys have 32 bytes each");
    std::string name(prefix);
    name.resize(prefix.size() + 64);
    char* const hex = name.data() + prefix.size();
    return list_of(keys.size() / 32, [&](std::size_t i) {
        const u8* const key = reinterpret_cast<const u8*>(keys.c_str()) + 32 * i;
        for (std::size_t at = 0; at < 32; at++) {
            hex[2 * at] = kDigits[key[at] >> 4];
            hex[2 * at + 1] = kDigits[key[at] & 15];
        }
        return PyUnicode_FromStringAndSize(name.data(), Py_ssize_t(name.size()));
    });
}

// The pieces of objects in slots: one a slot.
nb::list slot_pointers(std::size_t address, std::size_t stride, const std::vector<std::size_t>& slots) {
    return list_of(slots.size(), [&](std::size_t i) {
        return list_of(1, [&](std::size_t) { return PyLong_FromSize_t(address + slots[i] * stride); }).release().ptr();
    });
}

void make_headers(nb::bytes digest, nb::bytes keys, nb::list pointers, std::size_t size, bool checksums) {
    const Objects objects(digest, keys, pointers, size, checksums);
    const ReleasedGil released;
    each(objects, [&](std::size_t i) { objects.make(i); });
}

nb::bytes check_headers(nb::bytes digest, nb::bytes keys, nb::list pointers, std::size_t size, bool checksums) {
    const Objects objects(digest, keys, pointers, size, checksums);
    std::vector<u8> found(objects.count());
    {
        const ReleasedGil released;
        each(objects, [&](std::size_t i) { found[i] = objects.check(i); });
    }
    return nb::bytes(found.data(), found.size());
}

}  // namespace

void bind_objects(nb::module_& m) {
    m.def("addresses", &addresses, nb::arg("views"));
    m.def("object_names", &object_names, nb::arg("prefix"), nb::arg("keys"));
    m.def("slot_pointers", &slot_pointers, nb::arg("address"), nb::arg("stride"), nb::arg("slots"));
    m.def("make_headers", &make_headers, nb::arg("digest"), nb::arg("keys"), nb::arg("pointers"), nb::arg("size"),
          nb::arg("checksums") = true);
    m.def("check_headers", &check_headers, nb::arg("digest"), nb::arg("keys"), nb::arg("pointers"), nb::arg("size"),
          nb::arg("checksums") = true);
}

}  // namespace kvactors
