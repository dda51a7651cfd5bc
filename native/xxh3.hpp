// XXH3, the 64-bit variant without a seed (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md).
#pragma once

#include "common.hpp"

namespace kvactors {

u64 xxh3_64(const u8* data, std::size_t bytes);
// The same without vector instructions.
u64 xxh3_64_plain(const u8* data, std::size_t bytes);

}  // namespace kvactors
