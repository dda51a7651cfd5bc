// Headers of the objects of a shared pool, many a call: the format is in header.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>

#include "common.hpp"
#include "gil.hpp"
#include "xxh3.hpp"

namespace nb = nanobind;

namespace kvactors {
namespace {

constexpr std::size_t kHeader = 96, kDigestAt = 16, kKeyAt = 48, kSizeAt = 80, kSumAt = 88;
// Bytes for which another thread is worth its start, and threads of a call at most: a transfer waits for the checksums.
constexpr std::size_t kThreadBytes = 4 << 20, kThreads = 4;

// Objects of one size in memory that the caller keeps.
class Objects {
public:
    Objects(const nb::bytes& digest, const nb::bytes& keys, const std::vector<std::uintptr_t>& payloads,
            const std::vector<std::uintptr_t>& headers, std::size_t size)
        : keys_(reinterpret_cast<const u8*>(keys.c_str())), payloads_(payloads), headers_(headers), size_(size) {
        if (digest.size() != 32 || keys.size() != 32 * payloads.size() || headers.size() != payloads.size())
            throw nb::value_error("digest, keys, payloads and headers differ in length");
        std::memcpy(blank_, "KVACTORS", 8);
        const u32 version = 1;
        std::memcpy(blank_ + 8, &version, 4);
        std::memcpy(blank_ + kDigestAt, digest.c_str(), 32);
        const u64 bytes = size;
        std::memcpy(blank_ + kSizeAt, &bytes, 8);
    }

    std::size_t count() const { return payloads_.size(); }

    u8* header(std::size_t i) const { return reinterpret_cast<u8*>(headers_[i]); }

    void make(std::size_t i, u8* to) const {
        std::memcpy(to, blank_, kHeader);
        std::memcpy(to + kKeyAt, keys_ + 32 * i, 32);
        const u64 sum = xxh3_64(reinterpret_cast<const u8*>(payloads_[i]), size_);
        std::memcpy(to + kSumAt, &sum, 8);
    }

private:
    const u8* keys_;
    const std::vector<std::uintptr_t>& payloads_;
    const std::vector<std::uintptr_t>& headers_;
    std::size_t size_;
    u8 blank_[kHeader] = {};
};

// visit(i) for each object, by more than one thread if the objects are large. A system that starts no thread is slower.
template <typename Visit>
void each(const Objects& objects, std::size_t size, const Visit& visit) {
    std::atomic<std::size_t> next{0};
    const auto work = [&] {
        for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < objects.count();) visit(i);
    };
    const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
    const std::size_t wanted = std::min({objects.count(), objects.count() * size / kThreadBytes, kThreads, cores});
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

void make_headers(nb::bytes digest, nb::bytes keys, const std::vector<std::uintptr_t>& payloads,
                  const std::vector<std::uintptr_t>& headers, std::size_t size) {
    const Objects objects(digest, keys, payloads, headers, size);
    const ReleasedGil released;
    each(objects, size, [&](std::size_t i) { objects.make(i, objects.header(i)); });
}

std::vector<bool> headers_fit(nb::bytes digest, nb::bytes keys, const std::vector<std::uintptr_t>& payloads,
                              const std::vector<std::uintptr_t>& headers, std::size_t size) {
    const Objects objects(digest, keys, payloads, headers, size);
    std::vector<u8> fit(objects.count());  // threads cannot share the words of a vector<bool>
    const ReleasedGil released;
    each(objects, size, [&](std::size_t i) {
        u8 expected[kHeader];
        objects.make(i, expected);
        fit[i] = std::memcmp(expected, objects.header(i), kHeader) == 0;
    });
    return {fit.begin(), fit.end()};
}

}  // namespace

void bind_objects(nb::module_& m) {
    m.def("addresses", &addresses, nb::arg("views"));
    m.def("make_headers", &make_headers, nb::arg("digest"), nb::arg("keys"), nb::arg("payloads"), nb::arg("headers"),
          nb::arg("size"));
    m.def("headers_fit", &headers_fit, nb::arg("digest"), nb::arg("keys"), nb::arg("payloads"), nb::arg("headers"),
          nb::arg("size"));
}

}  // namespace kvactors
