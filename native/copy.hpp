// Copies between paged device regions ([block][piece] per region) and host slots (all pieces of a block in a row).
// No Python here: callers hold no lock and may run several of these at once on disjoint blocks.
#pragma once

#include <string>

#include "common.hpp"

namespace kvactors {

struct Regions {
    const std::int64_t* address;
    const std::int64_t* piece_bytes;
    std::size_t count;
    std::int64_t blocks;  // blocks in each region
};

struct Slots {
    u8* arena;
    std::size_t stride;
    std::int64_t count;
};

// Throws std::invalid_argument if a piece is empty or an id is out of range, or if a slot cannot hold all pieces.
void require_blocks(const Regions& regions, const std::int64_t* blocks, std::size_t n);
void require_slots(const Regions& regions, const Slots& slots, const std::int64_t* ids, std::size_t n);

void gather(const Regions& regions, const std::int64_t* blocks, const Slots& slots, const std::int64_t* ids, std::size_t n);
void scatter(const Regions& regions, const std::int64_t* blocks, const Slots& slots, const std::int64_t* ids, std::size_t n);
void touch(u8* address, std::size_t bytes);

void fill_blocks(const Regions& regions, const std::int64_t* blocks, const Key* keys, std::size_t n);
std::vector<u32> check_blocks(const Regions& regions, const std::int64_t* blocks, const Key* keys, std::size_t n);

}  // namespace kvactors
