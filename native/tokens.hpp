// Token ids: narrowing of arrays of any integer type to uint32, with one range check over the whole
// array, and MessagePack.
#pragma once

#include "common.hpp"

namespace kvactors {

enum class IntKind : u8 { i8, u8, i16, u16, i32, u32, i64, u64 };

// Copies `count` integers that lie `stride` bytes apart. False if any is below 0 or above 2**32 - 1
// (in which case the caller must drop the contents of `out`).
bool narrow(IntKind kind, const void* source, std::ptrdiff_t stride, std::size_t count, u32* out);

// Writes a number in MessagePack's shortest form
// (https://github.com/msgpack/msgpack/blob/master/spec.md). Returns how many bytes it has. `out` holds
// 8 bytes.
std::size_t pack_number(u32 value, u8* out);

// Writes `count` little-endian uint32 at `source`, each in its shortest form. `out` holds
// `packed_size(count)` bytes. Returns how many bytes were written.
std::size_t pack_numbers(const u8* source, std::size_t count, u8* out);

constexpr std::size_t packed_size(std::size_t count) { return 5 * count + 3; }

}  // namespace kvactors
