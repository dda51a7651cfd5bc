// Narrowing of arrays of any integer type to uint32, with one range check over the whole array.
#pragma once

#include "common.hpp"

namespace kvactors {

enum class IntKind : u8 { i8, u8, i16, u16, i32, u32, i64, u64 };

// Copies `count` integers that lie `stride` bytes apart. False if any is below 0 or above 2**32 - 1
// (in which case the caller must drop the contents of `out`).
bool narrow(IntKind kind, const void* source, std::ptrdiff_t stride, std::size_t count, u32* out);

// Writes `count` little-endian uint32 at `source` as a MessagePack array, each in its shortest form
// (https://github.com/msgpack/msgpack/blob/master/spec.md). `out` has 5 * count + 5 bytes. Returns
// how many bytes were written.
std::size_t pack_msgpack(const u8* source, std::size_t count, u8* out);

}  // namespace kvactors
