#include "tokens.hpp"

#include <type_traits>

namespace kvactors {
namespace {

// A processor's own prefetching ends at each 4 KiB page, and a prompt's tokens lie on many.
constexpr std::size_t kStride = 64, kAhead = 8192;  // tokens, bytes

// The part of a value that must be zero in a token id: the sign for narrow types, the sign and
// upper half for 64-bit ones. It is collected with OR, so the loop has no branch and vectorises.
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
        std::size_t i = 0;
        for (; i + kStride <= count; i += kStride) {
            for (std::size_t byte = 0; byte < kStride * sizeof(T); byte += 64)
                __builtin_prefetch(reinterpret_cast<const u8*>(in + i) + kAhead + byte);
            for (std::size_t j = i; j < i + kStride; ++j) {
                bad = std::make_unsigned_t<T>(bad | excess(in[j]));
                out[j] = u32(in[j]);
            }
        }
        for (; i < count; ++i) {
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

// Without branches: the lengths of token ids follow no pattern that a processor could predict.
std::size_t pack_number(u32 value, u8* out) {
    static constexpr u64 tags[] = {0, 0xcc, 0xcd, 0xce};
    static constexpr u8 sizes[] = {0, 1, 2, 4};  // of the value after its tag
    const unsigned form = unsigned(value > 127) + unsigned(value > 255) + unsigned(value > 65535);
    const unsigned size = sizes[form];
    const u64 word = (tags[form] << 8 * size | value) << (56 - 8 * size);
    for (int i = 0; i < 8; ++i) out[i] = u8(word >> (56 - 8 * i));
    return size + 1;
}

std::size_t pack_numbers(const u8* source, std::size_t count, u8* out) {
    u8* at = out;
    for (std::size_t i = 0; i < count; ++i, source += 4) {
        const u32 value = u32(source[0]) | u32(source[1]) << 8 | u32(source[2]) << 16 | u32(source[3]) << 24;
        at += pack_number(value, at);
    }
    return std::size_t(at - out);
}

}  // namespace kvactors
