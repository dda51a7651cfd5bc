// Copies between scattered device blocks and contiguous host slots, and patterns that distinguish
// blocks.
#pragma once

#include "common.hpp"

namespace kvactors {

using i64 = std::int64_t;

// Device side: region r is laid out [block][piece_bytes[r]], or has its blocks `strides[r]` bytes
// apart. Host side: slot s starts at arena + s * stride and holds the pieces of one block from every
// region, one after another. With `per_row` > 1, so many slots follow one another in each row of
// `stride` bytes, `slot_bytes` apart.
struct Regions {
    const i64* address;
    const i64* piece_bytes;
    std::size_t count;
    const i64* strides = nullptr;
};

struct Slots {
    u8* arena;
    std::size_t stride;
    std::size_t per_row = 1;
    std::size_t slot_bytes = 0;
};

void gather(const Regions& regions, const i64* blocks, Slots slots, const i64* ids, std::size_t pairs);
void scatter(const Regions& regions, const i64* blocks, Slots slots, const i64* ids, std::size_t pairs);

// Writes one byte to each page.
void touch(u8* memory, std::size_t bytes);

// The pattern of a block: pseudo-random words seeded by its key, the region and the offset.
void fill_block(const Regions& regions, i64 block, const u8* key);
bool check_block(const Regions& regions, i64 block, const u8* key);

}  // namespace kvactors
