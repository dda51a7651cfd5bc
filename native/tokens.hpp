// Narrowing of arrays of any integer type to uint32, with the range check done over the whole array at once.
#pragma once

#include "common.hpp"

namespace kvactors {

enum class IntKind : u8 { i8, u8, i16, u16, i32, u32, i64, u64 };

// Copies `count` integers that lie `stride` bytes apart. False if any is below 0 or above 2**32 - 1
// (then `out` holds rubbish, which the caller drops).
bool narrow(IntKind kind, const void* source, std::ptrdiff_t stride, std::size_t count, u32* out);

}  // namespace kvactors
