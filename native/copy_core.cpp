#include "copy_core.hpp"

namespace kvactors {
namespace {

u8* piece(const Regions& regions, std::size_t r, i64 block) {
    return reinterpret_cast<u8*>(regions.address[r]) + std::size_t(block) * std::size_t(regions.piece_bytes[r]);
}

// SplitMix64: a counter through a mixer, so that any word can be had alone.
u64 word(u64 seed, u64 index) {
    u64 x = seed + (index + 1) * 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

u64 seed_of(const u8* key, std::size_t region) {
    u64 seed = region * 0xd1342543de82ef95ULL;
    for (int i = 0; i < 4; ++i) {
        u64 part;
        std::memcpy(&part, key + 8 * i, 8);
        seed = word(seed ^ part, u64(i));
    }
    return seed;
}

}  // namespace

void gather(const Regions& regions, const i64* blocks, Slots slots, const i64* ids, std::size_t pairs) {
    for (std::size_t j = 0; j < pairs; ++j) {
        u8* to = slots.arena + std::size_t(ids[j]) * slots.stride;
        for (std::size_t r = 0; r < regions.count; ++r) {
            const std::size_t bytes = std::size_t(regions.piece_bytes[r]);
            std::memcpy(to, piece(regions, r, blocks[j]), bytes);
            to += bytes;
        }
    }
}

void scatter(const Regions& regions, const i64* blocks, Slots slots, const i64* ids, std::size_t pairs) {
    for (std::size_t j = 0; j < pairs; ++j) {
        const u8* from = slots.arena + std::size_t(ids[j]) * slots.stride;
        for (std::size_t r = 0; r < regions.count; ++r) {
            const std::size_t bytes = std::size_t(regions.piece_bytes[r]);
            std::memcpy(piece(regions, r, blocks[j]), from, bytes);
            from += bytes;
        }
    }
}

void touch(u8* memory, std::size_t bytes) {
    volatile u8* page = memory;
    for (std::size_t i = 0; i < bytes; i += 4096) page[i] = 0;
    if (bytes != 0) page[bytes - 1] = 0;  // memory that does not start on a page ends on one more
}

void fill_block(const Regions& regions, i64 block, const u8* key) {
    for (std::size_t r = 0; r < regions.count; ++r) {
        u8* to = piece(regions, r, block);
        const std::size_t bytes = std::size_t(regions.piece_bytes[r]), whole = bytes / 8;
        const u64 seed = seed_of(key, r);
        for (std::size_t i = 0; i < whole; ++i) {
            const u64 value = word(seed, i);
            std::memcpy(to + 8 * i, &value, 8);
        }
        const u64 last = word(seed, whole);
        std::memcpy(to + 8 * whole, &last, bytes - 8 * whole);
    }
}

bool check_block(const Regions& regions, i64 block, const u8* key) {
    for (std::size_t r = 0; r < regions.count; ++r) {
        const u8* from = piece(regions, r, block);
        const std::size_t bytes = std::size_t(regions.piece_bytes[r]), whole = bytes / 8;
        const u64 seed = seed_of(key, r);
        u64 differs = 0;
        for (std::size_t i = 0; i < whole; ++i) {
            u64 value;
            std::memcpy(&value, from + 8 * i, 8);
            differs |= value ^ word(seed, i);
        }
        const u64 last = word(seed, whole);
        if (differs != 0 || std::memcmp(from + 8 * whole, &last, bytes - 8 * whole) != 0) return false;
    }
    return true;
}

}  // namespace kvactors
