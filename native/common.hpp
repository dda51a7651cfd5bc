// Shared definitions: integer types, block keys, vectors that do not zero elements about to be
// overwritten.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace kvactors {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using i32 = std::int32_t;

// Compiled twice where the compiler can: for any x86-64, and for those with AVX2 (chosen when the
// module is loaded).
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
#define KVACTORS_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define KVACTORS_WIDE
#endif

constexpr u32 kNil = 0xffffffffu;  // no node, no block

struct Key {
    u8 bytes[32];
};

inline bool operator==(const Key& a, const Key& b) { return std::memcmp(a.bytes, b.bytes, 32) == 0; }

// std::vector<T>::resize zeroes, but token and key arrays are written right after they grow.
template <class T>
struct Uninitialised : std::allocator<T> {
    template <class U>
    struct rebind {
        using other = Uninitialised<U>;
    };
    template <class U>
    void construct(U* p) noexcept {
        ::new (static_cast<void*>(p)) U;
    }
    template <class U, class... Args>
    void construct(U* p, Args&&... args) {
        ::new (static_cast<void*>(p)) U(std::forward<Args>(args)...);
    }
};

template <class T>
using Raw = std::vector<T, Uninitialised<T>>;

}  // namespace kvactors
