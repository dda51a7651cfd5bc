#include "tokens.hpp"

#include <type_traits>

namespace kvactors {
namespace {

// The part of a value that must be zero for it to be a token id: its sign for narrow types, the sign and upper half
// for 64-bit ones. It is collected with OR, so the loop has no branch and vectorises.
template <class T>
inline __attribute__((always_inline)) std::make_unsigned_t<T> excess(T value) {
    using U = std::make_unsigned_t<T>;
    if constexpr (sizeof(T) == 8) return U(value) >> 32;
    if constexpr (std::is_signed_v<T>) return U(value) >> (8 * sizeof(T) - 1);
    return 0;
}

template <class T>
inline __attribute__((always_inline)) bool narrow_as(const void* source, std::ptrdiff_t stride, std::size_t count, u32* out) {
    std::make_unsigned_t<T> bad = 0;
    if (stride == std::ptrdiff_t(sizeof(T)) && reinterpret_cast<std::uintptr_t>(source) % alignof(T) == 0) {
        const T* in = static_cast<const T*>(source);
        for (std::size_t i = 0; i < count; ++i) {
            bad = std::make_unsigned_t<T>(bad | excess(in[i]));
            out[i] = u32(in[i]);
        }
        return bad == 0;
    }
    const u8* at = static_cast<const u8*>(source);
    for (std::size_t i = 0; i < count; ++i, at += stride) {
        T value;
        std::memcpy(&value, at, sizeof value);
        bad = std::make_unsigned_t<T>(bad | excess(value));
        out[i] = u32(value);
    }
    return bad == 0;
}

}  // namespace

KVACTORS_WIDE bool narrow(IntKind kind, const void* source, std::ptrdiff_t stride, std::size_t count, u32* out) {
    switch (kind) {
        case IntKind::i8: return narrow_as<std::int8_t>(source, stride, count, out);
        case IntKind::u8: return narrow_as<std::uint8_t>(source, stride, count, out);
        case IntKind::i16: return narrow_as<std::int16_t>(source, stride, count, out);
        case IntKind::u16: return narrow_as<std::uint16_t>(source, stride, count, out);
        case IntKind::i32: return narrow_as<std::int32_t>(source, stride, count, out);
        case IntKind::u32: return narrow_as<std::uint32_t>(source, stride, count, out);
        case IntKind::i64: return narrow_as<std::int64_t>(source, stride, count, out);
        case IntKind::u64: return narrow_as<std::uint64_t>(source, stride, count, out);
    }
    return false;
}

}  // namespace kvactors
